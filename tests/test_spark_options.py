"""Options of reads: names in any case, values checked, mistakes named."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from broker import InvalidOption
from spark_log import options as options_module
from spark_log.options import Edge, ReadOptions, unknown_option

BASE = {"path": "/log", "subscribe": "orders"}


def parse(**given: str) -> ReadOptions:
    """Parse as Spark hands options over: with names in lower case."""
    return ReadOptions.parse({name.lower(): value for name, value in {**BASE, **given}.items()})


def parse_with(strategy: dict[str, str], **given: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/log", **strategy, **given})


def test_without_options_everything_is_the_default() -> None:
    parsed = parse()
    assert parsed.selection.topics == ("orders",)
    assert (parsed.starting, parsed.ending) == (None, None)
    assert parsed.fail_on_data_loss and not parsed.include_headers
    assert parsed.trigger_delay_ms_max == 15 * 60_000
    assert parsed.offsets_per_trigger_max is None


def test_topics_are_trimmed_and_blanks_dropped() -> None:
    assert parse(subscribe=" a, ,b,a ").selection.topics == ("a", "b")


def test_a_pattern_is_searched_anywhere_in_the_name() -> None:
    selection = parse_with({"subscribepattern": "ord"}).selection
    assert selection.includes("my-orders") and not selection.includes("copies")


def test_assigned_partitions_are_sorted() -> None:
    selection = parse_with({"assign": '{"a":[2,0],"b":[1]}'}).selection
    assert selection.partitions == {"a": (0, 2), "b": (1,)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "One of the following options must be specified"),
        ({"subscribe": "a", "assign": "{}"}, "Only one of the following options can be specified"),
        ({"subscribe": " , "}, "No topics to subscribe to .* 'subscribe' is ' , '"),
        ({"subscribepattern": " "}, "Pattern to subscribe is empty"),
        ({"subscribepattern": "("}, r"subscribePattern='\(' is not a regular expression"),
        ({"assign": "a"}, "No topicpartitions to assign .* 'assign' is 'a'"),
        ({"assign": '{"a":0}'}, r'Expected e.g. \{"topicA":\[0,1\]'),
        ({"assign": '{"a":[]}'}, "Expected e.g."),
        ({"assign": '{"a":[-1]}'}, "Expected e.g."),
        ({"assign": '{"a":["x"]}'}, "Expected e.g."),
        ({"assign": "{"}, "Expected e.g."),
    ],
)
def test_exactly_one_valid_way_to_choose_topics(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption, match=text):
        ReadOptions.parse({"path": "/log", **given})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "startingOffsets",
            "soon",
            "startingOffsets='soon' is not earliest, latest, group or JSON",
        ),
        ("startingOffsets", "", "startingOffsets='' is not earliest, latest, group or JSON"),
        ("endingOffsets", " ", "endingOffsets=' ' is not earliest, latest or JSON"),
        ("startingOffsets", "{", "startingOffsets: Expected e.g."),
        ("startingOffsets", '{"a":{"0":9223372036854775808}}', "startingOffsets: Expected e.g."),
        ("startingTimestamp", "-5", "startingTimestamp: Expected a single long value"),
        ("endingTimestamp", "9223372036854775808", "endingTimestamp: Expected a single long"),
        ("startingOffsets", '{"a":{"0":-3}}', "startingOffsets: Expected e.g."),
        ("startingOffsets", '{"a":{"0":1.5}}', "startingOffsets: Expected e.g."),
        ("startingOffsets", '{"a":[0]}', "startingOffsets: Expected e.g."),
        ("startingTimestamp", "x", "startingTimestamp: Expected a single long value"),
        ("endingTimestamp", "1.5", "endingTimestamp: Expected a single long value"),
        ("startingOffsetsByTimestamp", "[]", "startingOffsetsByTimestamp: Expected e.g."),
        ("endingOffsetsByTimestamp", '{"a":{"0":-1}}', "endingOffsetsByTimestamp: Expected e.g."),
        ("startingOffsetsByTimestampStrategy", "x", "Strategy='x' is not one of error, latest"),
        ("failOnDataLoss", "no", "failOnDataLoss='no' is not true or false"),
        ("includeHeaders", "1", "includeHeaders='1' is not true or false"),
        ("maxOffsetsPerTrigger", "many", "maxOffsetsPerTrigger='many' is not a whole number"),
        ("maxOffsetsPerTrigger", "0", "maxOffsetsPerTrigger must be positive, got '0'"),
        ("maxBytesPerTrigger", "1k", "maxBytesPerTrigger='1k' is not a whole number"),
        ("minPartitions", "-1", "minPartitions must be positive"),
        ("maxRecordsPerPartition", "0", "maxRecordsPerPartition must be positive"),
        ("metricsPort", "-1", "metricsPort must be at least 0"),
        ("metricsPort", "65536", "metricsPort must be at most 65535"),
        ("maxTriggerDelay", "1 year", "maxTriggerDelay='1 year' is not a time"),
        ("groupId", " ", "groupId=' ' is empty"),
        ("startingOffsets", "group", "startingOffsets=group needs the option groupId"),
        ("endingOffsets", "group", "endingOffsets='group' is not earliest, latest or JSON"),
        ("startingOffsetsFallback", "latest", "startingOffsetsFallback is for startingOffsets=gr"),
        ("startingOffsetsFallback", "x", "Fallback='x' is not one of earliest, latest"),
        ("path", " ", "needs the path of the log"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(name: str, value: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=text):
        parse(**{name: value})


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"minOffsetsPerTrigger\(20\) is higher than the max"):
        parse(minOffsetsPerTrigger="20", maxOffsetsPerTrigger="15")


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("500", 500), ("500ms", 500), ("10s", 10_000), ("2m", 120_000), ("2 min", 120_000),
     ("1h", 3_600_000), ("1d", 86_400_000), ("5000us", 5)],
)  # fmt: skip
def test_times_are_read_as_spark_reads_them(text: str, milliseconds: int) -> None:
    assert parse(maxTriggerDelay=text).trigger_delay_ms_max == milliseconds


def test_a_time_wins_over_times_by_partition_and_those_over_offsets() -> None:
    everything = {
        "startingTimestamp": "5",
        "startingOffsetsByTimestamp": '{"orders":{"0":7}}',
        "startingOffsets": "earliest",
    }
    first = parse(**everything).starting
    del everything["startingTimestamp"]
    second = parse(**everything).starting
    assert first == Edge("startingTimestamp", "timestamp", timestamp_ms=5)
    assert second == Edge("startingOffsetsByTimestamp", "timestamps", {"orders": {0: 7}})


@pytest.mark.parametrize("value", ["earliest", " Latest ", "EARLIEST"])
def test_words_for_offsets_are_trimmed_and_in_any_case(value: str) -> None:
    starting = parse(startingOffsets=value).starting
    assert starting is not None and starting.kind == value.strip().lower()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        ({"endingTimestamp": "5"}, "ending timestamp not valid in streaming queries"),
        ({"endingOffsetsByTimestamp": '{"a":{"0":1}}'}, "ending timestamp not valid"),
    ],
)
def test_a_streaming_query_has_no_end(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption, match=text):
        parse(**given).check_streaming()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"startingOffsets": "latest"}, "starting offset can't be latest for batch queries"),
        ({"startingOffsets": '{"a":{"0":-1}}'}, r"startingOffsets for a-0 can't be latest"),
        ({"endingOffsets": "earliest"}, "ending offset can't be earliest for batch queries"),
        ({"endingOffsets": '{"a":{"0":-2}}'}, "endingOffsets for a-0 can't be earliest"),
        (
            {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"1":9}}'},
            "name different partitions",
        ),
        (
            {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"0":4}}'},
            "The specified start 5 .* is greater than the end 4 .* topic a partition 0",
        ),
    ],
)
def test_a_batch_has_a_start_before_its_end(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption, match=text):
        parse(**given).check_batch()


@pytest.mark.parametrize(
    ("name", "near"),
    [("startingOffset", "startingOffsets"), ("subscribed", "subscribe"), ("topics", "topic"),
     ("maxoffsetpertrigger", "maxOffsetsPerTrigger")],
)  # fmt: skip
def test_an_unknown_option_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InvalidOption, match=f"did you mean '{near}'"):
        parse(**{name: "x"})


def test_a_name_like_no_other_lists_all() -> None:
    assert "known: assign, compression" in str(unknown_option("zzz"))


def test_options_of_writes_are_known_and_ignored() -> None:
    parse(topic="orders", txnAppId="a", checkpointLocation="/c", queryName="q")


def test_kafkas_own_options_are_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "_warned", set())
    kafkas: dict[str, Any] = {
        "kafka.bootstrap.servers": "host:9092",
        "groupIdPrefix": "g",
        "fetchOffset.numRetries": "3",
    }
    with caplog.at_level(logging.WARNING):
        parse(**kafkas)
        parse(**kafkas)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "ignored: fetchOffset.numRetries, groupIdPrefix, kafka.bootstrap.servers"
    )


def test_a_batch_read_says_once_which_options_mean_nothing_to_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "_warned", set())
    limits = {
        "maxOffsetsPerTrigger": "5",
        "minOffsetsPerTrigger": "1",
        "maxBytesPerTrigger": "9",
        "maxTriggerDelay": "1s",
    }
    with caplog.at_level(logging.WARNING):
        parse(groupId="g", **limits).check_streaming()
        parse(groupId="g", startingOffsets="group").check_batch()
        assert caplog.messages == []
        for _ in range(2):
            parse(groupId="g", **limits).check_batch()
    assert caplog.messages == [
        "a batch read has no triggers; ignored: maxBytesPerTrigger, maxOffsetsPerTrigger, "
        "maxTriggerDelay, minOffsetsPerTrigger",
        "a batch read publishes no position to a group; ignored: groupId",
    ]


def test_a_list_of_one_path_is_a_path_and_of_two_is_not() -> None:
    assert ReadOptions.parse({"subscribe": "a", "paths": '["/x"]'}).path == "/x"
    with pytest.raises(InvalidOption, match="one log at a time"):
        ReadOptions.parse({"subscribe": "a", "paths": '["/x", "/y"]'})
