"""Compaction: the last record of every key stays, at its offset; nobody reads anything else."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from faulty_storage import Died, FaultyStorage, Fuse
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import broker
from broker import TopicPartition
from broker.cli import app
from broker.maintenance import compaction
from broker.maintenance.compaction import LastRows, Survivors
from broker.maintenance.keeping import Round
from broker.maintenance.sealing import Stopped
from broker.partitioner import murmur2
from broker.reader import TopicReader
from broker.storage import LocalStorage, Storage, open_storage
from broker.topic import Topic

pytestmark = pytest.mark.any_store

NAME = "users"
PLACE = TopicPartition(NAME, 0)
DAY_MS = 86_400_000
CONFIG = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": 0,
    "segment.bytes": 3000,
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
}

Row = tuple[int, bytes | None, bytes | None]


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return time.time_ns() + self.ahead_ms * 1_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(root: Path | str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Storage:
    made = open_storage(root)
    monkeypatch.setattr(made, "clock", clock)
    return made


@pytest.fixture
def log(storage: Storage) -> broker.Log:
    made = broker.Log(storage)
    made.create_topic(NAME, 1, config=CONFIG)
    return made


def send(log: broker.Log, *pairs: tuple[bytes | None, bytes | None], at_ms: int = 0) -> None:
    with log.producer() as producer:
        for key, value in pairs:
            producer.send(NAME, value, key=key, partition=0, timestamp_ms=at_ms or None)


def rows(log: broker.Log) -> list[Row]:
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return [(record.offset, record.key, record.value) for record in consumer]


def table(found: list[Row]) -> dict[bytes | None, bytes]:
    """Return the map that a reader of all these records builds."""
    built: dict[bytes | None, bytes] = {}
    for _, key, value in found:
        if value is None:
            built.pop(key, None)
        else:
            built[key] = value
    return built


def compact(log: broker.Log) -> int:
    """Seal all and compact it; return how many records went."""
    (done,) = log.maintain(NAME, seal=True)
    return done.compacted_records


def many(count: int, key_count: int, seed: int = 1) -> Iterator[tuple[bytes, bytes | None]]:
    rng = random.Random(seed)
    for number in range(count):
        value = None if rng.random() < 0.1 else b"value %d %d" % (seed, number)
        yield b"key %d" % rng.randrange(key_count), value


# What stays.


@pytest.mark.every_store
def test_the_last_record_of_every_key_stays_at_its_offset(log: broker.Log) -> None:
    send(log, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"a", b"3"), (b"b", b"2"))
    assert compact(log) == 3
    assert rows(log) == [(3, b"c", b"1"), (4, b"a", b"3"), (5, b"b", b"2")]
    described = log.describe_topic(NAME).partitions[0]
    assert (described.start_offset, described.end_offset) == (0, 6)


def test_a_reader_from_the_beginning_builds_the_same_map_as_before(log: broker.Log) -> None:
    log.create_partitions(NAME, 3)
    with log.producer() as producer:
        for key, value in many(3000, 200):
            producer.send(NAME, value, key=key)
    before = rows(log)
    assert compact(log) > 2000
    after = rows(log)
    assert table(after) == table(before) and len(table(after)) > 150
    assert {(key, value) for _, key, value in after} <= {row[1:] for row in before}


def test_what_is_not_sealed_is_never_touched(log: broker.Log) -> None:
    send(log, *[(b"a", b"%d" % number) for number in range(10)])
    compact(log)
    send(log, *[(b"a", b"new %d" % number) for number in range(10)])
    assert log.maintain(NAME)[0].compacted_records == 0
    assert [row[0] for row in rows(log)] == [9, *range(10, 20)]


def test_compaction_again_and_again_gives_the_same_map(log: broker.Log) -> None:
    everything: list[Row] = []
    for seed in range(6):
        send(log, *many(300, 50, seed))
        everything += [row for row in rows(log) if not everything or row[0] > everything[-1][0]]
        compact(log)
        assert table(rows(log)) == table(everything)
    assert len(rows(log)) <= 51


def test_records_without_a_key_from_before_stay(log: broker.Log) -> None:
    log.alter_topic(NAME, {"cleanup.policy": "delete"})
    send(log, (None, b"1"), (b"a", b"1"), (None, None), (b"a", b"2"))
    log.alter_topic(NAME, {"cleanup.policy": "compact"})
    assert compact(log) == 1
    assert rows(log) == [(0, None, b"1"), (2, None, None), (3, b"a", b"2")]
    with pytest.raises(broker.InvalidRecord, match="key"):
        send(log, (None, b"3"))


def test_an_empty_key_is_a_key(log: broker.Log) -> None:
    send(log, (b"", b"1"), (b"", b"2"))
    compact(log)
    assert rows(log) == [(1, b"", b"2")]


def test_headers_and_both_sorts_of_timestamp_stay_as_they_were(log: broker.Log) -> None:
    with log.producer() as producer:
        producer.send(NAME, b"old", key=b"a", headers=[("h", b"0")]).result()
        producer.send(NAME, b"1", key=b"a", headers=[("h", b"1"), ("h", None)]).result()
    log.alter_topic(NAME, {"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        producer.send(NAME, b"2", key=b"b")
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        before = list(consumer)
    compact(log)
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        assert list(consumer) == before[1:]


def test_only_a_topic_with_that_policy_is_compacted(log: broker.Log) -> None:
    log.alter_topic(NAME, {"cleanup.policy": "delete"})
    send(log, (b"a", b"1"), (b"a", b"2"))
    assert compact(log) == 0 and len(rows(log)) == 2


# Tombstones.


@pytest.mark.every_store
def test_a_tombstone_goes_when_it_is_old_and_was_compacted_before(
    log: broker.Log, clock: Clock
) -> None:
    send(log, (b"a", b"1"), (b"a", None), (b"b", b"1"))
    compact(log)
    assert rows(log) == [(1, b"a", None), (2, b"b", b"1")], "readers shall see it for a day"
    send(log, (b"c", b"1"))
    compact(log)
    assert (1, b"a", None) in rows(log), "compacted before, but too young"
    clock.ahead_ms = DAY_MS + 60_000
    send(log, (b"d", None), at_ms=1)
    compact(log)
    assert rows(log) == [(2, b"b", b"1"), (3, b"c", b"1"), (4, b"d", None)]
    send(log, (b"e", b"1"))
    compact(log)
    assert [row[0] for row in rows(log)] == [2, 3, 5], "old all along, but seen once"


def test_tombstones_of_no_life_go_with_the_second_compaction(log: broker.Log) -> None:
    log.alter_topic(NAME, {"delete.retention.ms": 0})
    for first in (b"1", b"2"):
        send(log, (b"a", first), (b"a", None))
        compact(log)
    assert rows(log) == [(3, b"a", None)]


def test_absurd_settings_keep_everything_or_nothing_more_than_they_may(log: broker.Log) -> None:
    absurd = {"delete.retention.ms": 10**18, "min.compaction.lag.ms": 10**18}
    log.alter_topic(NAME, absurd)
    send(log, (b"a", b"1"), (b"a", None))
    assert compact(log) == 0
    log.alter_topic(NAME, {"min.compaction.lag.ms": 0})
    assert compact(log) == 1
    send(log, (b"b", b"1"))
    assert compact(log) == 0 and [row[0] for row in rows(log)] == [1, 2]


def test_a_clock_set_back_keeps_tombstones_and_does_not_stop_compaction(
    log: broker.Log, clock: Clock
) -> None:
    send(log, (b"a", b"1"), (b"a", None), at_ms=int(time.time() * 1000))
    compact(log)
    clock.ahead_ms = -30 * DAY_MS
    send(log, (b"b", b"1"), (b"b", b"2"))
    assert compact(log) == 1
    assert rows(log) == [(1, b"a", None), (3, b"b", b"2")]


# When it is due.


def test_what_is_younger_than_the_lag_takes_no_part(log: broker.Log, clock: Clock) -> None:
    log.alter_topic(NAME, {"min.compaction.lag.ms": DAY_MS})
    now = int(time.time() * 1000)
    send(log, (b"a", b"1"), (b"a", b"2"), at_ms=now - 2 * DAY_MS)
    log.maintain(NAME, seal=True)
    send(log, (b"a", b"3"), (b"a", b"4"), at_ms=now)
    compact(log)
    assert [row[0] for row in rows(log)] == [1, 2, 3]
    clock.ahead_ms = 2 * DAY_MS
    assert compact(log) == 2
    assert [row[0] for row in rows(log)] == [3]


def test_an_old_file_behind_a_young_one_takes_no_part(log: broker.Log) -> None:
    log.alter_topic(NAME, {"min.compaction.lag.ms": DAY_MS})
    now = int(time.time() * 1000)
    for stamp in (now, now - 2 * DAY_MS):
        send(log, (b"a", b"1"), (b"a", b"2"), at_ms=stamp)
        assert compact(log) == 0
    assert len(rows(log)) == 4


def test_little_that_is_new_is_not_worth_it(log: broker.Log) -> None:
    log.alter_topic(NAME, {"min.cleanable.dirty.ratio": 0.5})
    send(log, *many(2000, 1000))
    assert compact(log) > 0
    before = rows(log)
    send(log, *many(20, 1000, 2))
    assert compact(log) == 0
    assert len(rows(log)) == len(before) + 20
    log.alter_topic(NAME, {"min.cleanable.dirty.ratio": 0})
    assert compact(log) > 0


def test_nothing_new_is_not_compacted_again(log: broker.Log) -> None:
    send(log, *many(100, 10))
    assert compact(log) > 0
    (done,) = log.maintain(NAME, seal=True)
    assert done.compacted_files == 0


def test_merging_leaves_the_border_of_what_is_compacted(log: broker.Log, storage: Storage) -> None:
    send(log, *many(100, 10))
    compact(log)
    log.alter_topic(NAME, {"min.cleanable.dirty.ratio": 1})
    for seed in range(20):
        send(log, *many(5, 10, seed))
        log.maintain(NAME, seal=True)
    state = Topic(storage, NAME, 1).state
    assert state.cleaned_ends == [100]
    assert 100 in {file.start for file in state.sealed}
    assert len(state.sealed) < 10, "small files were merged"
    before = table(rows(log))
    log.alter_topic(NAME, {"min.cleanable.dirty.ratio": 0})
    compact(log)
    assert table(rows(log)) == before and len(rows(log)) <= 10


# With retention.


@pytest.mark.parametrize("policy", ["compact,delete", "delete,compact"])
def test_both_policies_together(log: broker.Log, policy: str) -> None:
    now = int(time.time() * 1000)
    log.alter_topic(NAME, {"cleanup.policy": policy, "retention.ms": DAY_MS})
    send(log, (b"a", b"1"), (b"old", b"1"), at_ms=now - 2 * DAY_MS)
    log.alter_topic(NAME, {"retention.ms": -1})
    compact(log)
    log.alter_topic(NAME, {"retention.ms": DAY_MS})
    send(log, (b"b", b"1"), (b"b", b"2"), at_ms=now)
    assert compact(log) == 1
    assert rows(log) == [(3, b"b", b"2")]
    assert log.describe_topic(NAME).partitions[0].start_offset == 2


def test_compaction_alone_has_no_retention(log: broker.Log) -> None:
    log.alter_topic(NAME, {"retention.ms": 0, "retention.bytes": 0})
    send(log, (b"a", b"1"), (b"b", b"1"), at_ms=1)
    compact(log)
    log.maintain(NAME)
    assert len(rows(log)) == 2


def test_records_below_the_log_start_supersede_nothing(log: broker.Log) -> None:
    send(log, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", b"2"), (b"a", b"3"))
    log.alter_topic(NAME, {"cleanup.policy": "delete"})
    log.maintain(NAME, seal=True)
    log.alter_topic(NAME, {"cleanup.policy": "compact"})
    log.delete_records({PLACE: 2})
    compact(log)
    assert rows(log) == [(3, b"b", b"2"), (4, b"a", b"3")]


# Gaps, for those who read.


@pytest.fixture
def gaps(log: broker.Log) -> broker.Log:
    """Sealed offsets 0 to 99, of which 40 and 41 are left; then 100 and 101, not sealed."""
    send(log, *[(b"x", b"%d" % number) for number in range(41)], (b"y", b"41"), at_ms=1000)
    send(log, *[(b"z", b"%d" % number) for number in range(57)], at_ms=2000)
    log.alter_topic(NAME, {"delete.retention.ms": 0})
    send(log, (b"z", None), at_ms=2000)
    compact(log)
    send(log, (b"w", b"1"), at_ms=3000)
    compact(log)  # Takes the tombstone at 99 away.
    log.alter_topic(NAME, {"cleanup.policy": "delete", "retention.ms": -1})
    send(log, (b"v", b"101"), at_ms=4000)
    assert [row[0] for row in rows(log)] == [40, 41, 100, 101]
    return log


@pytest.mark.every_store
def test_polls_go_over_gaps(gaps: broker.Log) -> None:
    with gaps.consumer(NAME, auto_offset_reset="earliest") as consumer:
        seen = []
        while polled := consumer.poll(0, max_records=1):
            (record,) = polled[PLACE]
            seen.append((record.offset, consumer.position(PLACE)))
    assert [offset for offset, _ in seen] == [40, 41, 100, 101]
    assert all(offset < position <= 102 for offset, position in seen)
    assert seen[-1][1] == 102


def test_batches_have_the_offsets_that_are_left(gaps: broker.Log) -> None:
    with gaps.consumer(NAME, auto_offset_reset="earliest") as consumer:
        offsets: list[int] = []
        while polled := consumer.poll_batches(0):
            offsets += polled[PLACE].column("offset").to_pylist()
        assert consumer.position(PLACE) == 102
    assert offsets == [40, 41, 100, 101]


@pytest.mark.parametrize(
    ("start", "first"), [(0, 40), (39, 40), (41, 41), (42, 100), (99, 100), (101, 101)]
)
def test_a_seek_into_a_gap_goes_on_behind_it(gaps: broker.Log, start: int, first: int) -> None:
    with gaps.consumer(NAME, consumer_timeout_ms=0) as consumer:
        consumer.seek(PLACE, start)
        assert consumer.position(PLACE) == start
        assert next(consumer).offset == first
        assert consumer.position(PLACE) == first + 1


def test_the_end_is_reached_when_nothing_is_left_before_it(log: broker.Log) -> None:
    log.alter_topic(NAME, {"delete.retention.ms": 0})
    send(log, (b"a", b"1"), (b"a", None), at_ms=1)
    compact(log)
    send(log, (b"b", None), at_ms=1)
    compact(log)
    log.alter_topic(NAME, {"min.cleanable.dirty.ratio": 0.0})
    send(log, (b"c", None), at_ms=1)
    compact(log)
    log.delete_records({PLACE: 3})
    log.maintain(NAME, seal=True)
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        assert [record.offset for record in consumer] == [3]
        assert consumer.position(PLACE) == 4
        assert consumer.poll(0) == {} and consumer.poll_batches(0) == {}


def empty(log: broker.Log, storage: Storage) -> None:
    """Make a topic whose sealed files have no record any more."""
    send(log, (b"a", b"1"), (b"a", None), (b"b", None), at_ms=1)
    log.alter_topic(NAME, {"delete.retention.ms": 0})
    compact(log)
    topic = Topic(storage, NAME, 1, write=True)
    reader = TopicReader(storage, NAME, 1)
    (file,) = reader.state.sealed
    unit = compaction.CompactionUnit(0, 0, 3, (file,), 3, 1 << 60)
    assert topic.seal(compaction.write(reader, unit), unit.removed, {0: 3})
    reader.close()
    topic.close()


def test_a_topic_may_be_compacted_to_nothing(log: broker.Log, storage: Storage) -> None:
    empty(log, storage)
    (file,) = Topic(storage, NAME, 1).state.sealed
    assert (file.record_count, file.min_timestamp, file.max_timestamp) == (0, -1, -1)
    assert rows(log) == []
    with log.consumer(NAME, auto_offset_reset="earliest") as consumer:
        assert consumer.poll(0) == {} and consumer.position(PLACE) == 3
        assert consumer.offsets_for_times({PLACE: 0}) == {PLACE: None}
    for seed in range(20):  # Merged, sealed and compacted again.
        send(log, (b"c", b"%d" % seed))
        compact(log)
    assert rows(log) == [(22, b"c", b"19")]


def test_times_are_looked_up_over_gaps(gaps: broker.Log) -> None:
    with gaps.consumer(NAME) as consumer:
        found = [consumer.offsets_for_times({PLACE: time})[PLACE] for time in range(0, 6000, 1000)]
    assert found == [(40, 1000), (40, 1000), (100, 3000), (100, 3000), (101, 4000), None]


def test_slices_give_the_records_that_are_left(gaps: broker.Log) -> None:
    reader = gaps.reader(NAME)
    for start, end, left in [(0, 102, [40, 41, 100, 101]), (41, 100, [41]), (50, 60, [])]:
        plan = broker.plan_slices(reader, {0: (start, end)})
        for task_count in (1, 7):
            tasks = broker.pack_slices(plan, reader, task_count=task_count)
            offsets: list[int] = []
            for task in tasks:
                for piece in broker.read_slices(gaps.root, task):
                    count = piece.batch.num_rows
                    some = piece.offsets
                    if some is None:
                        some = np.arange(piece.base_offset, piece.base_offset + count)
                    assert len(some) == count
                    offsets += some.tolist()
            assert offsets == left
    reader.close()


@pytest.mark.on_disk  # A store keeps what a plan names for an hour at least.
def test_a_plan_of_before_compaction_reads_what_is_left(log: broker.Log) -> None:
    send(log, *[(b"%d" % (number % 7), b"%d" % number) for number in range(200)])
    log.alter_topic(NAME, {"cleanup.policy": "delete"})
    reader = log.reader(NAME)
    plans = [broker.plan_slices(reader, {0: (10, 198)})]
    log.maintain(NAME, seal=True)
    reader.refresh()
    plans.append(broker.plan_slices(reader, {0: (10, 198)}))
    log.alter_topic(NAME, {"cleanup.policy": "compact"})
    compact(log)
    reader.close()
    for plan in plans:
        offsets = [
            piece.offsets.tolist()
            if piece.offsets is not None
            else list(range(piece.base_offset, piece.base_offset + piece.batch.num_rows))
            for piece in broker.read_slices(log.root, plan)
        ]
        assert sum(offsets, []) == [193, 194, 195, 196, 197]


@pytest.mark.on_disk  # A command takes no log in memory.
@pytest.mark.parametrize("to_nothing", [False, True])
def test_the_command_line_consumes_to_the_end(
    log: broker.Log,
    storage: Storage,
    to_nothing: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if to_nothing:
        empty(log, storage)
    else:
        send(log, *[(b"%d" % (number % 3), b"%d" % number) for number in range(90)])
        compact(log)
    begun = time.monotonic()
    assert app.run(["--log", log.root, "consume", NAME, "--from-beginning"]) == 0
    assert capfd.readouterr().out.split() == ([] if to_nothing else ["87", "88", "89"])
    assert time.monotonic() - begun < 20


# Bounded memory.


def test_more_keys_than_fit_take_several_passes(log: broker.Log, storage: Storage) -> None:
    log.alter_topic(NAME, {"cleanup.policy": "delete", "segment.bytes": 1 << 20})
    rng = np.random.default_rng(5)
    keys = [b"key %d" % number for number in rng.integers(0, 30_000, 100_000)]
    batch = pa.table({"key": keys, "value": [b"%d" % number for number in range(len(keys))]})
    with log.producer() as producer:
        producer.send_batch(NAME, batch)
    before = rows(log)
    log.maintain(NAME, seal=True)
    log.alter_topic(NAME, {"cleanup.policy": "compact", "seal.bytes": 200_000})
    reader = TopicReader(storage, NAME, 1)
    (unit,) = compaction.plan(reader.state, 0)
    passes = []

    def count(_rows: int) -> None:
        passes.append(1)

    written = compaction.write(reader, unit, count, key_bytes_max=100_000)
    assert len(passes) > 8, "each pass says so at least once"
    topic = Topic(storage, NAME, 1, write=True)
    assert topic.seal(written, unit.removed, {0: unit.end})
    topic.close()
    reader.close()
    last = {key: (offset, key, value) for offset, key, value in before}
    assert rows(log) == sorted(last.values())


def test_a_pass_holds_no_more_keys_than_it_may() -> None:
    start, passes, found = 0, 0, []
    keys = [b"k%d" % number for number in range(20_000)]
    while start < 1 << 32:
        last = LastRows(start, key_bytes_max=50_000)
        for first in range(0, len(keys), 500):
            chunk = pa.array(keys[first : first + 500], pa.binary())
            last.add(chunk, np.arange(first, first + 500))
            assert last._byte_count <= 50_000
        found += last.rows().tolist()
        start = last.end
        passes += 1
    assert passes > 4
    assert sorted(found) == list(range(20_000))


def test_keys_of_one_hash_are_not_taken_for_one() -> None:
    one, other = same_hash()
    last = LastRows(0, key_bytes_max=1)
    keys = pa.array([one, other, one], pa.binary())
    last.add(keys, np.arange(3))
    found: list[int] = []
    while True:
        found += last.rows().tolist()
        if last.end >= 1 << 32:
            break
        last = LastRows(last.end, key_bytes_max=1)
        last.add(keys, np.arange(3))
    assert sorted(found) == [1, 2]


def same_hash() -> tuple[bytes, bytes]:
    """Return two keys of the same hash: there are some among a few hundred thousand."""
    keys = [b"%x" % number for number in range(300_000)]
    hashes = murmur2(pa.array(keys, pa.binary()))
    order = np.argsort(hashes, kind="stable")
    twin = int(np.flatnonzero(np.diff(hashes[order].astype(np.int64)) == 0)[0])
    return keys[order[twin]], keys[order[twin + 1]]


def test_survivors_are_bits() -> None:
    survivors = Survivors(1000)
    kept = np.array([0, 7, 8, 9, 500, 999])
    survivors.keep(kept)
    for start in (0, 1, 7, 8, 13, 500, 999):
        for count in (0, 1, 3, 8, 100):
            some = survivors.of(start, min(count, 1000 - start))
            wanted = [row in kept for row in range(start, min(start + count, 1000))]
            assert some.tolist() == wanted


# Counting.


def test_only_the_records_that_are_left_are_counted(log: broker.Log) -> None:
    send(log, *many(200, 20))
    compact(log)
    left = len(rows(log))
    assert left <= 20 and log.describe_topic(NAME).record_count == left
    send(log, *many(30, 20, 2))
    (partition,) = log.describe_topic(NAME).partitions
    assert (partition.end_offset, partition.record_count) == (230, left + 30)
    (done,) = log.maintain(NAME, seal=True)
    assert done.sealed_records == 30
    assert log.describe_topic(NAME).record_count == len(rows(log)) <= 20


def test_a_log_start_within_a_compacted_file_is_counted_when_it_is_written_anew(
    log: broker.Log,
) -> None:
    send(log, *many(200, 20))
    compact(log)
    found = rows(log)
    start = found[len(found) // 2][0]
    log.delete_records({PLACE: start})
    left = len(rows(log))
    assert left < log.describe_topic(NAME).record_count <= min(len(found), 200 - start)
    log.maintain(NAME)
    assert log.describe_topic(NAME).record_count == left


def test_records_that_retention_takes_from_compacted_files_are_counted(log: broker.Log) -> None:
    send(log, *many(200, 20), at_ms=1000)
    compact(log)
    left = len(rows(log))
    log.alter_topic(NAME, {"cleanup.policy": "compact,delete", "retention.ms": DAY_MS})
    send(log, *many(5, 5))
    (done,) = log.maintain(NAME)
    assert done.removed_records == left
    assert log.describe_topic(NAME).record_count == 5


def test_slices_count_the_records_that_are_left(log: broker.Log) -> None:
    send(log, *many(200, 20))
    compact(log)
    send(log, *many(30, 20, 2))
    left = rows(log)
    reader = log.reader(NAME)
    slices = broker.plan_slices(reader, {0: (0, 230)})
    assert sum(piece.offset_count for piece in slices) == 230
    assert sum(piece.record_count for piece in slices) == len(left)
    for start in range(0, 230, 10):
        (part, *_) = broker.plan_slices(reader, {0: (start, start + 10)})
        inside = [row for row in left if start <= row[0] < start + 10]
        assert len(inside) <= part.record_count <= part.offset_count == 10
    tasks = broker.pack_slices(slices, reader, task_count=3, records_max=7)
    for task in tasks:
        found = sum(part.batch.num_rows for part in broker.read_slices(log.root, task))
        assert found <= sum(piece.record_count for piece in task) <= 7
    reader.close()


# Others, and crashes.


def prepared(storage: Storage, log: broker.Log) -> tuple[Topic, TopicReader]:
    log.alter_topic(NAME, {"cleanup.policy": "delete"})
    send(log, *many(200, 20))
    log.maintain(NAME, seal=True)
    log.alter_topic(NAME, {"cleanup.policy": "compact"})
    return Topic(storage, NAME, 1, write=True), TopicReader(storage, NAME, 1)


def test_a_compactor_that_wakes_too_late_changes_nothing(log: broker.Log, storage: Storage) -> None:
    topic, reader = prepared(storage, log)
    before = table(rows(log))
    (unit,) = compaction.plan(reader.state, 0)
    written = compaction.write(reader, unit)
    compact(log)
    send(log, *many(100, 20, 2))
    compact(log)
    now = rows(log)
    assert not topic.seal(written, unit.removed, {0: unit.end})
    assert rows(log) == now and table(now) != before
    topic.close()
    reader.close()


@pytest.mark.parametrize("change", ["truncate", "policy", "grown"])
def test_compaction_fits_only_what_it_was_made_from(
    log: broker.Log, storage: Storage, change: str
) -> None:
    topic, reader = prepared(storage, log)
    (unit,) = compaction.plan(reader.state, 0)
    written = compaction.write(reader, unit)
    if change == "truncate":
        log.delete_records({PLACE: 5})
    elif change == "policy":
        log.alter_topic(NAME, {"cleanup.policy": "delete"})
    else:
        send(log, *many(100, 20, 2))
    before = table(rows(log))
    assert topic.seal(written, unit.removed, {0: unit.end}) == (change == "grown")
    assert table(rows(log)) == before
    topic.close()
    reader.close()


@pytest.mark.every_store
def test_a_file_that_another_compactor_took_away_is_no_error(
    log: broker.Log, storage: Storage
) -> None:
    topic, reader = prepared(storage, log)
    (unit,) = compaction.plan(reader.state, 0)
    compact(log)
    with pytest.raises(broker.MissingFile):
        compaction.write(reader, unit)
    late = Round(storage, NAME, 1)
    late._do(topic, reader, [unit])
    assert late.done.compacted_files == 0
    topic.close()
    reader.close()


class Impatient:
    """Ends whatever has begun."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int) -> None:
        raise Stopped


@pytest.mark.on_disk
def test_a_stopped_compaction_leaves_nothing(log: broker.Log, storage: Storage, root: Path) -> None:
    topic, reader = prepared(storage, log)
    files = sorted((root / "topics" / NAME / "1" / "sealed").rglob("*"))
    done = Round(storage, NAME, 1, progress=Impatient()).run()
    assert done.compacted_files == 0
    assert sorted((root / "topics" / NAME / "1" / "sealed").rglob("*")) == files
    topic.close()
    reader.close()


@pytest.mark.on_disk
@pytest.mark.parametrize("manner", ["before", "after", "fail"])
def test_a_compactor_killed_at_any_change_or_out_of_room_loses_nothing(
    tmp_path: Path, manner: str
) -> None:
    made = tmp_path / "prepared"
    log = broker.open(made)
    log.create_topic(NAME, 1, config=CONFIG)
    send(log, *many(100, 20))
    compact(log)
    send(log, *many(100, 20, 2))
    before = table(rows(log))
    whole = Fuse()
    run(made, tmp_path / "whole", whole)
    assert len(whole.trace) > 20
    for at in range(1, len(whole.trace) + 1):
        trial = tmp_path / str(at)
        run(made, trial, Fuse(at, manner))
        left = broker.open(trial)
        assert table(rows(left)) == before, at
        compact(left)
        found = rows(left)
        assert table(found) == before and len(found) == len({row[1] for row in found}), at
        shutil.rmtree(trial)


def run(made: Path, trial: Path, fuse: Fuse) -> None:
    shutil.copytree(made, trial)
    storage = FaultyStorage(str(trial), fuse)
    try:
        Round(storage, NAME, 1).run(is_forced=True)
    except (Died, broker.LogError):
        pass
    storage.bury()


# Anything, in any order.


class CompactedTopic(RuleBasedStateMachine):
    """A compacted topic beside a list of all that was sent; readers must build the same map."""

    @initialize(seal_bytes=st.sampled_from([1, 2000, 1 << 20]), retention=st.sampled_from([0, 1]))
    def open(self, seal_bytes: int, retention: int) -> None:
        self.root = tempfile.mkdtemp(prefix="compacted-")
        self.clock = Clock()
        self.log = broker.Log(LocalStorage(self.root, clock=self.clock))
        config = CONFIG | {"seal.bytes": seal_bytes, "delete.retention.ms": retention * DAY_MS}
        self.log.create_topic(NAME, 1, config=config)
        self.sent: list[Row] = []
        self.start = 0

    @rule(
        pairs=st.lists(
            st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b""]), st.none() | st.binary()),
            min_size=1,
            max_size=8,
        )
    )
    def send(self, pairs: list[tuple[bytes, bytes | None]]) -> None:
        now = self.clock() // 1_000_000
        send(self.log, *pairs, at_ms=now)
        for key, value in pairs:
            self.sent.append((len(self.sent), key, value))

    @rule(is_forced=st.booleans())
    def maintain(self, is_forced: bool) -> None:
        self.log.maintain(NAME, seal=is_forced)
        assert self.log.describe_topic(NAME).record_count == len(rows(self.log))

    @rule(hours=st.integers(1, 30))
    def wait(self, hours: int) -> None:
        self.clock.ahead_ms += hours * 3_600_000

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        self.start = max(self.start, data.draw(st.integers(0, len(self.sent))))
        self.log.delete_records({PLACE: self.start})

    @rule(policy=st.sampled_from(["compact", "delete"]))
    def change_the_policy(self, policy: str) -> None:
        self.log.alter_topic(NAME, {"cleanup.policy": policy, "retention.ms": -1})

    @rule(offset=st.integers(0, 40))
    def read_from(self, offset: int) -> None:
        """From any offset on: what is left, in order, up to the end."""
        offset = min(max(offset, self.start), len(self.sent))
        with self.log.consumer(NAME, consumer_timeout_ms=0) as consumer:
            consumer.seek(PLACE, offset)
            found = [(record.offset, record.key, record.value) for record in consumer]
            assert consumer.position(PLACE) == len(self.sent)
        assert found == [row for row in rows(self.log) if row[0] >= offset]

    @invariant()
    def readers_build_the_same_map(self) -> None:
        if not hasattr(self, "sent"):
            return
        found = rows(self.log)
        assert len(found) <= self.log.describe_topic(NAME).record_count
        assert set(found) <= set(self.sent[self.start :])
        assert [row[0] for row in found] == sorted({row[0] for row in found})
        assert table(found) == table(self.sent[self.start :])

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


TestCompactedTopic = CompactedTopic.TestCase
TestCompactedTopic.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
