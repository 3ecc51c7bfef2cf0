"""Topics: made, listed, described, altered, emptied and deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import broker
from broker import TopicPartition


def fill(log: broker.Log, topic: str, count: int, partition: int | None = None) -> None:
    with log.producer() as producer:
        for number in range(count):
            producer.send(topic, str(number).encode(), partition=partition)


def test_a_new_topic_is_listed_and_described(log: broker.Log) -> None:
    log.create_topic("orders", partitions=3, config={"retention.ms": 5000})
    described = log.describe_topic("orders")
    assert log.topics() == ["orders"]
    assert [part.partition for part in described.partitions] == [0, 1, 2]
    assert described.config["retention.ms"] == 5000
    assert described.config["cleanup.policy"] == "delete"
    assert (described.incarnation, described.record_count) == (1, 0)


def test_a_topic_is_not_made_twice(log: broker.Log) -> None:
    log.create_topic("orders")
    with pytest.raises(broker.TopicExists, match="'orders' exists already"):
        log.create_topic("orders")


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 250, "a/b", "a b", "ä", "a:b"])
def test_names_kafka_refuses_are_refused(log: broker.Log, name: str) -> None:
    with pytest.raises(broker.InvalidTopicName):
        log.create_topic(name)


def test_names_that_collide_as_in_kafka_are_refused(log: broker.Log) -> None:
    log.create_topic("a.b")
    with pytest.raises(broker.InvalidTopicName, match="collides with topic 'a.b'"):
        log.create_topic("a_b")


def test_an_unknown_setting_suggests_the_nearest_name(log: broker.Log) -> None:
    with pytest.raises(broker.InvalidOption, match=r"did you mean 'retention\.ms'\?"):
        log.create_topic("orders", config={"retention.msec": 1})
    assert log.topics() == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retention.ms", "soon"),
        ("retention.ms", -2),
        ("cleanup.policy", "shred"),
        ("max.message.bytes", 1.5),
        ("min.cleanable.dirty.ratio", 2),
        ("segment.bytes", True),
    ],
)
def test_a_wrong_value_names_the_setting(log: broker.Log, setting: str, value: object) -> None:
    with pytest.raises(broker.InvalidOption, match=setting.replace(".", r"\.")):
        log.create_topic("orders", config={setting: value})


def test_settings_are_altered_and_go_back_to_the_default(log: broker.Log) -> None:
    log.create_topic("orders", config={"retention.ms": 5000})
    log.alter_topic("orders", config={"retention.bytes": 7, "retention.ms": None})
    described = log.describe_topic("orders")
    assert described.given_config == {"retention.bytes": 7}
    assert described.config["retention.ms"] == 604_800_000


def test_partitions_only_grow(log: broker.Log) -> None:
    log.create_topic("orders", partitions=2)
    log.create_partitions("orders", 5)
    assert len(log.describe_topic("orders").partitions) == 5
    with pytest.raises(broker.LogError, match="can only grow"):
        log.create_partitions("orders", 5)


def test_deleted_records_are_gone_and_the_rest_stays(log: broker.Log) -> None:
    log.create_topic("orders")
    fill(log, "orders", 10)
    place = TopicPartition("orders", 0)
    assert log.delete_records({place: 4}) == {place: 4}
    with log.consumer("orders", auto_offset_reset="earliest") as consumer:
        values = [record.value for record in consumer.poll(1000)[place]]
    assert values == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert log.delete_records({place: -1}) == {place: 10}
    assert log.delete_records({place: 3}) == {place: 10}


def test_records_past_the_end_cannot_be_deleted(log: broker.Log) -> None:
    log.create_topic("orders")
    with pytest.raises(broker.OffsetOutOfRange):
        log.delete_records({TopicPartition("orders", 0): 1})


def test_a_topic_made_again_is_a_new_incarnation(log: broker.Log, root: Path) -> None:
    log.create_topic("orders")
    fill(log, "orders", 3)
    log.delete_topic("orders")
    assert log.topics() == []
    with pytest.raises(broker.UnknownTopic):
        log.describe_topic("orders")
    log.create_topic("orders")
    described = log.describe_topic("orders")
    assert (described.incarnation, described.record_count) == (2, 0)
    assert sorted(path.name for path in (root / "topics/orders").iterdir()) == ["2"]


def test_a_delete_that_stopped_half_way_is_finished_by_the_next_create(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("orders")
    writer = log._open_writer("orders")
    from broker.commit import Kind

    writer._change(Kind.DELETE, lambda state: {})
    writer.close()
    with pytest.raises(broker.UnknownTopic):
        log.describe_topic("orders")
    log.create_topic("orders")
    assert log.describe_topic("orders").incarnation == 2


def test_the_mark_holds_format_and_cluster_id(log: broker.Log, root: Path) -> None:
    mark = json.loads((root / "_log.json").read_text())
    assert mark == {"format": 1, "cluster_id": log.cluster_id}
    assert broker.open(root).cluster_id == log.cluster_id


def test_a_newer_format_is_refused_with_what_is_understood(log: broker.Log, root: Path) -> None:
    (root / "_log.json").write_text('{"format": 2, "cluster_id": "x"}')
    with pytest.raises(broker.UnsupportedFormat, match="format version 2.*understands version 1"):
        broker.open(root)


def test_a_directory_of_other_files_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"")
    with pytest.raises(broker.NotALog, match="holiday.jpg"):
        broker.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_missing_log_is_only_made_when_asked(tmp_path: Path) -> None:
    with pytest.raises(broker.LogNotFound, match="no log at"):
        broker.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_an_address_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(broker.InvalidOption, match="is not known; use a local path"):
        broker.open("gopher://x/y")
    assert broker.open(f"file://{tmp_path}/log").root == str(tmp_path / "log")
