"""Staged records: written by many, committed by one, once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

import broker

pytestmark = pytest.mark.any_store


@pytest.fixture
def log(root: Path) -> broker.Log:
    opened = broker.open(root)
    opened.create_topic("t", partitions=2)
    return opened


def write(log: broker.Log, *values: str, **columns: list[object]) -> broker.Staged:
    stage = log.stage("t")
    try:
        stage.write(pa.table({"value": list(values), **columns}))
        staged: broker.Staged = pickle.loads(pickle.dumps(stage.finish()))
        return staged
    finally:
        stage.close()


def values(log: broker.Log) -> list[bytes]:
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return sorted(record.value for record in consumer)


@pytest.mark.every_store
def test_nothing_is_seen_before_the_commit(log: broker.Log) -> None:
    staged = [write(log, "a", "b"), write(log, "c")]
    assert values(log) == []
    assert log.commit_staged("t", staged).record_count == 3
    assert values(log) == [b"a", b"b", b"c"]


@pytest.mark.every_store
def test_a_transaction_is_committed_once(log: broker.Log) -> None:
    first = log.commit_staged("t", [write(log, "a")], ("job", 1))
    again = log.commit_staged("t", [write(log, "a")], ("job", 1))
    assert (first.is_repeated, again.is_repeated) == (False, True)
    assert values(log) == [b"a"]


def test_the_last_version_of_a_transaction_can_be_asked_for(log: broker.Log) -> None:
    assert log.transaction_version("t", "job") is None
    for version in (3, 7):
        log.commit_staged("t", [write(log, "a")], ("job", version))
    assert log.transaction_version("t", "job") == 7
    assert log.transaction_version("t", "other") is None
    with pytest.raises(broker.UnknownTopic):
        log.transaction_version("none", "job")


def test_an_empty_transaction_counts_too(log: broker.Log) -> None:
    log.commit_staged("t", [], ("job", 1))
    assert log.commit_staged("t", [write(log, "late")], ("job", 1)).is_repeated
    assert values(log) == []


@pytest.mark.on_disk
def test_discarded_records_leave_no_file(log: broker.Log, root: Path) -> None:
    staged = write(log, "a")
    assert len(list(root.glob("topics/t/1/data/*"))) == 1
    log.discard_staged("t", [staged])
    assert list(root.glob("topics/t/1/data/*")) == []


def test_records_staged_for_an_earlier_incarnation_are_refused(log: broker.Log) -> None:
    staged = write(log, "a")
    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    with pytest.raises(broker.InvalidRecord, match="deleted and made again"):
        log.commit_staged("t", [staged])
    assert values(log) == []


def test_a_partition_that_does_not_exist_is_refused(log: broker.Log) -> None:
    with pytest.raises(broker.UnknownPartition):
        write(log, "a", partition=[2])


def test_a_record_that_is_too_large_is_refused(log: broker.Log) -> None:
    log.alter_topic("t", {"max.message.bytes": 10})
    with pytest.raises(broker.RecordTooLarge):
        write(log, "small", "x" * 11)
