"""Settings and options: what conf/ says is what the code does."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import broker
from broker.config import (
    GROUP_SETTINGS,
    STORAGE_OPTIONS,
    TOPIC_SETTINGS,
    ConsumerOptions,
    ProducerOptions,
    parse_options,
    parse_storage_options,
    parse_topic_settings,
)

CONF = Path(__file__).parent.parent / "conf"
IN_CODE_ONLY = {"key_serializer", "value_serializer", "key_deserializer", "value_deserializer"}


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((CONF / f"{name}.toml").read_text())


def test_conf_lists_every_topic_setting_with_its_default() -> None:
    assert read("topic") == {name: default for name, (_, default) in TOPIC_SETTINGS.items()}


def test_conf_lists_every_group_setting_with_its_default() -> None:
    defaults = {name: default for name, (_, default) in GROUP_SETTINGS.items()}
    assert read("group") == {name: "" if one is None else one for name, one in defaults.items()}


@pytest.mark.parametrize(
    ("name", "options"), [("producer", ProducerOptions), ("consumer", ConsumerOptions)]
)
def test_conf_lists_every_client_option_with_its_default(name: str, options: Any) -> None:
    defaults = {
        option.name: "" if option.default is None else option.default
        for option in fields(options)
        if option.name not in IN_CODE_ONLY
    }
    assert read(name) == defaults


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_conf_lists_every_storage_option_with_its_default(kind: str) -> None:
    defaults = {name: default for name, (_, default) in STORAGE_OPTIONS[kind].items()}
    listed = read("storage")[kind]
    assert listed == {name: "" if one is None else one for name, one in defaults.items()}


@pytest.mark.parametrize("name", ["topic", "group", "producer", "consumer", "storage"])
def test_conf_says_why_for_every_setting(name: str) -> None:
    lines = (CONF / f"{name}.toml").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if line and not line.startswith(("#", "[")):
            assert before.startswith("# "), f"{name}.toml: {line} has no reason"


def test_the_defaults_are_values_the_rules_allow() -> None:
    assert parse_topic_settings(read("topic")) == read("topic")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lingerms": 5}, "unknown producer option 'lingerms'; did you mean 'linger_ms'?"),
        ({"linger_ms": -1}, "linger_ms=-1 is too small"),
        ({"linger_ms": "soon"}, "linger_ms='soon' is not a whole number"),
        ({"compression_type": "brotli"}, "compression_type='brotli' is not one of none, gzip"),
        ({"durability": "maybe"}, "durability='maybe' is not one of buffered, fsync"),
        ({"partitioner": "random"}, "partitioner='random' is not sticky, round_robin"),
        ({"key_serializer": 3}, "key_serializer=3 cannot be called"),
        ({"transactional_id": ""}, "transactional_id='' is not a text"),
        (
            {"acks": "all"},
            "unknown producer option 'acks': there are no replicas to wait for, and a",
        ),
        ({"retries": 3}, "retries go on until delivery_timeout_ms has passed"),
        ({"sasl_mechanism": "x"}, "unknown producer option 'sasl_mechanism'; known: batch_size,"),
    ],
)
def test_a_wrong_producer_option_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(broker.InvalidOption) as caught:
        parse_options(ProducerOptions, "producer", given)
    assert message in str(caught.value)


def test_numbers_may_come_as_text() -> None:
    assert parse_options(ProducerOptions, "producer", {"linger_ms": "5"}).linger_ms == 5


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("hdfs", {"pol.ms": "5"}, "unknown storage option of hdfs 'pol.ms'; did you mean 'poll.ms"),
        ("hdfs", {"region": "x"}, "unknown storage option of hdfs 'region'; known: kerberos_cache"),
        ("s3", {"regin": "x"}, "unknown storage option of s3 'regin'; did you mean 'region'?"),
        ("s3", {"dfs.replication": "2"}, "unknown storage option of s3 'dfs.replication'; known"),
        ("s3", {"poll.ms": "soon"}, "storage option poll.ms='soon' is not a whole number"),
        ("s3", {"poll.ms": "-4"}, "storage option poll.ms='-4' is too small; use at least 1"),
        ("hdfs", {"poll.ms": "nan"}, "storage option poll.ms='nan' is not a whole number"),
        ("s3", {"anon": "perhaps"}, "storage option anon='perhaps' is not true or false"),
        ("hdfs", {"dfs.replication": ""}, "storage option dfs.replication='' is not a text"),
    ],
)
def test_a_wrong_storage_option_is_refused_in_one_clear_line(
    kind: str, given: dict[str, str], message: str
) -> None:
    with pytest.raises(broker.InvalidOption) as refused:
        parse_storage_options(kind, given)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_the_defaults_as_they_are_written_down_may_be_given(kind: str) -> None:
    written = read("storage")[kind]
    given = {name: str(value).lower() for name, value in written.items()}
    assert parse_storage_options(kind, given) == parse_storage_options(kind, {})


def test_hdfs_takes_hadoops_own_settings_too() -> None:
    parsed = parse_storage_options("hdfs", {"dfs.replication": "2", "poll.ms": "50"})
    assert (parsed["dfs.replication"], parsed["poll.ms"], parsed["user"]) == ("2", 50, None)
