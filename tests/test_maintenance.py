"""Sealing, retention and the removal of files: readers notice nothing, no crash loses anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from faulty_storage import Died, FaultyStorage, Fuse

import broker
from broker import CorruptLog, MissingFile, OffsetOutOfRange, TopicPartition
from broker.maintenance import keeping, sealing
from broker.maintenance.keeping import Round
from broker.maintenance.units import AnyUnit, Progress, Written, write_here
from broker.naming import GARBAGE_AFTER_MS, NAMED_WITHIN_MS
from broker.reader import TopicReader
from broker.storage import AppendFile, Storage, open_storage
from broker.topic import Topic

pytestmark = pytest.mark.any_store

NAME = "orders"
PARTITIONS = 2
CONFIG = {"segment.bytes": 2000, "retention.ms": -1, "file.delete.delay.ms": 0}
DAY_MS = 86_400_000

Values = dict[int, list[tuple[int, bytes | None, bytes | None, int, int]]]


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
    made.create_topic(NAME, PARTITIONS, config=CONFIG)
    return made


def fill(log: broker.Log, count: int, *, first: int = 0, time_ms: int = 1_700_000_000_000) -> None:
    with log.producer() as producer:
        for number in range(first, first + count):
            headers = [("h", b"%d" % number)] if number % 5 == 0 else None
            producer.send(
                NAME,
                None if number % 7 == 0 else b"value %d" % number,
                key=b"k%d" % (number % 10),
                headers=headers,
                partition=number % PARTITIONS,
                timestamp_ms=time_ms + number,
            )
            if number % 10 == 9:
                producer.flush()


def read(log: broker.Log, name: str = NAME) -> Values:
    """Return all that a consumer sees, partition by partition."""
    found: Values = {}
    with log.consumer(name, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        for record in consumer:
            row = (record.offset, record.key, record.value, record.timestamp, len(record.headers))
            found.setdefault(record.partition, []).append(row)
    return found


def in_table(log: broker.Log, version: int | None = None) -> Values:
    """Return all that a reader of the Delta table sees, partition by partition."""
    table = DeltaTable(log.table_path(NAME), version=version).to_pyarrow_table()
    found: Values = {}
    for row in table.sort_by("offset").to_pylist():
        stamp = int(row["timestamp"].timestamp() * 1000 + 0.5)
        values = (row["offset"], row["key"], row["value"], stamp, len(row["headers"] or ()))
        found.setdefault(row["partition"], []).append(values)
    return found


def files(root: Path, folder: str) -> list[Path]:
    return sorted(path for path in (root / "topics" / NAME / "1" / folder).rglob("*.*"))


# Sealing.


@pytest.mark.on_disk
def test_sealed_records_are_the_same_records(log: broker.Log, root: Path) -> None:
    fill(log, 200)
    before = read(log)
    (done,) = log.maintain(NAME, seal=True)
    assert done.sealed_records == 200 and done.sealed_files == PARTITIONS
    assert read(log) == before
    assert log.describe_topic(NAME).sealed_ends == (100, 100)
    assert len(files(root, "journal")) == 1, "all records are sealed, so the files are free"


@pytest.mark.on_disk
def test_a_sealed_file_is_plain_parquet(log: broker.Log, root: Path) -> None:
    fill(log, 50)
    log.maintain(NAME, seal=True)
    path = files(root, "sealed/partition=1")[0]
    table = pq.read_table(path, partitioning=None)
    assert table.column_names == ["key", "value", "headers", "timestamp", "timestampType", "offset"]
    assert table.column("offset").to_pylist() == list(range(25))
    assert table.column("value").to_pylist()[:4] == [b"value 1", b"value 3", b"value 5", None]


def test_new_records_follow_sealed_ones(log: broker.Log) -> None:
    for first in range(0, 300, 60):
        fill(log, 60, first=first)
        log.maintain(NAME, seal=True)
    found = read(log)
    assert [row[0] for row in found[0]] == list(range(150))
    assert [row[3] for row in found[1]] == [1_700_000_000_001 + 2 * n for n in range(150)]


def test_little_is_sealed_only_when_it_is_old(
    log: broker.Log, storage: Storage, clock: Clock
) -> None:
    fill(log, 20)
    assert log.maintain(NAME)[0].sealed_records == 0
    clock.ahead_ms = 2 * 3_600_000
    assert log.maintain(NAME)[0].sealed_records == 20


def test_much_is_sealed_at_once(log: broker.Log) -> None:
    log.alter_topic(NAME, {"seal.bytes": 5000})
    fill(log, 500)  # Its producer has perhaps begun with it.
    log.maintain(NAME)
    assert sum(log.describe_topic(NAME).sealed_ends) > 300


@pytest.mark.on_disk
def test_small_files_become_larger_ones(log: broker.Log, root: Path) -> None:
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    for first in range(0, 16 * 10, 10):
        fill(log, 10, first=first)
        log.maintain(NAME, seal=True)
    assert log.describe_topic(NAME).sealed_file_count == PARTITIONS
    assert [row[0] for row in read(log)[1]] == list(range(80))
    assert len(files(root, "sealed")) == PARTITIONS


def test_all_timestamp_types_and_codecs_are_kept(log: broker.Log) -> None:
    for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd")):
        kind = "LogAppendTime" if number % 2 else "CreateTime"
        log.alter_topic(NAME, {"message.timestamp.type": kind})
        with log.producer(compression_type=codec) as producer:
            for one in range(20):
                producer.send(NAME, b"%d" % one, partition=0)
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        before = list(consumer)
    log.maintain(NAME, seal=True)
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        assert list(consumer) == before
    assert {record.timestamp_type for record in before} == {0, 1}


def test_look_ups_by_time_give_the_same_answers(log: broker.Log) -> None:
    fill(log, 300)
    place = TopicPartition(NAME, 0)
    times = [0, 1_700_000_000_000, 1_700_000_000_101, 1_700_000_000_298, 1_700_000_000_299]
    with log.consumer() as consumer:
        consumer.assign([place])
        before = [consumer.offsets_for_times({place: one}) for one in times]
        log.maintain(NAME, seal=True)
        assert [consumer.offsets_for_times({place: one}) for one in times] == before


def test_a_look_up_by_time_opens_one_row_group_of_one_sealed_file(
    log: broker.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("long", 1, config={"segment.bytes": 1 << 20, "retention.ms": -1})
    count = 150_000  # More than one row group has.
    for first in (0, count):
        times = pa.array(range(first, first + count), pa.int64())
        with log.producer() as producer:
            producer.send_batch("long", pa.table({"value": pa.nulls(count), "timestamp": times}))
        log.maintain("long", seal=True)
    assert log.describe_topic("long").sealed_file_count == 2
    opened: list[object] = []
    groups: list[object] = []
    open_file, read_group = pq.ParquetFile.__init__, pq.ParquetFile.read_row_group

    def count_open(self: pq.ParquetFile, *given: object, **options: object) -> None:
        opened.append(given)
        open_file(self, *given, **options)

    def count_read(self: pq.ParquetFile, group: int, **options: object) -> pa.Table:
        groups.append(group)
        return read_group(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", count_open)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", count_read)
    place = TopicPartition("long", 0)
    for time_ms in (0, 140_000, count, 2 * count - 1, 2 * count):
        del opened[:], groups[:]
        with log.consumer() as consumer:
            found = consumer.offsets_for_times({place: time_ms})[place]
        assert (found is None) == (time_ms == 2 * count)
        assert found is None or found.offset == time_ms
        assert len(opened) <= 1 and len(groups) <= 1, time_ms


@pytest.mark.every_store
def test_a_consumer_goes_on_over_sealing_and_trimming(log: broker.Log) -> None:
    fill(log, 100)
    with log.consumer(NAME, auto_offset_reset="earliest") as consumer:
        seen = sum(map(len, consumer.poll(1000, max_records=30).values()))
        fill(log, 100, first=100)
        log.maintain(NAME, seal=True)
        fill(log, 100, first=200)
        log.maintain(NAME, seal=True)
        while records := consumer.poll(0):
            seen += sum(map(len, records.values()))
    assert seen == 300


def test_a_reader_that_slept_over_a_trim_goes_on_from_a_checkpoint(
    log: broker.Log, storage: Storage
) -> None:
    fill(log, 20)
    sleeper = Topic(storage, NAME, 1)
    for first in range(20, 220, 50):
        fill(log, 50, first=first)
        log.maintain(NAME, seal=True)
    assert sleeper.refresh() == Topic(storage, NAME, 1).state
    sleeper.close()


def test_an_old_plan_is_read_from_the_new_place(log: broker.Log, storage: Storage) -> None:
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    fill(log, 300)
    reader = log.reader(NAME)
    plans = [broker.plan_slices(reader, {0: (10, 140), 1: (0, 150)})]
    log.maintain(NAME, seal=True)
    reader.refresh()
    plans.append(broker.plan_slices(reader, {0: (10, 140), 1: (0, 150)}))
    for first in range(300, 300 + 16 * 10, 10):
        fill(log, 10, first=first)
        log.maintain(NAME, seal=True)
    reader.close()
    for plan in plans:
        values: dict[int, list[bytes | None]] = {0: [], 1: []}
        for piece in broker.read_slices(log.root, plan):
            values[piece.partition] += piece.batch.column("value").to_pylist()
        assert values[0] == [None if n % 7 == 0 else b"value %d" % n for n in range(20, 280, 2)]
        assert len(values[1]) == 150


@pytest.mark.on_disk  # A store keeps what a plan names for an hour at least.
def test_an_old_plan_of_removed_records_fails(log: broker.Log) -> None:
    fill(log, 300)
    reader = log.reader(NAME)
    plan = broker.plan_slices(reader, {0: (10, 140)})
    reader.close()
    log.delete_records({TopicPartition(NAME, 0): -1, TopicPartition(NAME, 1): -1})
    log.maintain(NAME, seal=True)
    with pytest.raises(OffsetOutOfRange):
        list(broker.read_slices(log.root, plan))


@pytest.mark.on_disk
def test_what_does_not_fit_any_more_is_dropped(
    log: broker.Log, storage: Storage, root: Path
) -> None:
    """Two maintainers at once: one is paused after writing its files, and wakes up too late."""
    fill(log, 100)
    log.maintain(NAME, seal=True)
    fill(log, 100, first=100)
    topic = Topic(storage, NAME, 1, write=True)
    topic.end_file()
    reader = TopicReader(storage, NAME, 1)
    units = sealing.plan(reader.refresh(), 0, is_forced=True)
    paused = [sealing.write(reader, unit) for unit in units]
    log.maintain(NAME, seal=True)
    before = read(log)
    for unit, written in zip(units, paused, strict=True):
        assert not topic.seal(written, unit.removed, {})
    assert read(log) == before
    reader.close()
    topic.close()


@pytest.mark.on_disk
def test_files_that_took_too_long_to_be_named_are_dropped_and_made_again(
    log: broker.Log, storage: Storage, root: Path, clock: Clock
) -> None:
    fill(log, 100)
    before = read(log)

    def write_slowly(
        reader: TopicReader, units: Sequence[AnyUnit], progress: Progress
    ) -> Iterator[tuple[AnyUnit, Written]]:
        for unit, written in write_here(reader, units, progress):
            clock.ahead_ms = NAMED_WITHIN_MS + 1000
            yield unit, written

    done = Round(storage, NAME, 1, write=write_slowly).run(is_forced=True)
    assert done.dropped_units == 1 and files(root, "sealed/partition=0") == []
    assert log.describe_topic(NAME).sealed_ends == (0, 50), "the second was begun late"
    assert read(log) == before
    log.maintain(NAME, seal=True)
    assert log.describe_topic(NAME).sealed_ends == (50, 50) and read(log) == before


@pytest.mark.every_store
def test_only_one_maintains_at_a_time(log: broker.Log, storage: Storage) -> None:
    fill(log, 50)
    with keeping.hold(storage, NAME) as is_ours:
        assert is_ours and log.maintain(NAME, seal=True)[0].is_held
    assert not log.maintain(NAME, seal=True)[0].is_held


FORKER = """
import os, sys, time, broker
from broker.maintenance import keeping
log = broker.open(sys.argv[1])
with keeping.hold(log._storage, "orders") as is_ours:
    if os.fork() == 0:
        print(is_ours, flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os._exit(0)
"""


@pytest.mark.on_disk
def test_a_forked_child_of_a_dead_maintainer_does_not_keep_others_away(
    log: broker.Log, root: Path
) -> None:
    fill(log, 20)
    command = [sys.executable, "-c", FORKER, str(root)]
    # The child keeps the pipe open: it is ended by closing its group.
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"True\n"
            process.wait(60)
            assert not log.maintain(NAME, seal=True)[0].is_held
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.on_disk
@pytest.mark.parametrize("part", ["footer", "page"])
def test_damage_to_a_sealed_file_is_named(log: broker.Log, root: Path, part: str) -> None:
    fill(log, 100)
    log.maintain(NAME, seal=True)
    path = files(root, "sealed/partition=0")[0]
    data = bytearray(path.read_bytes())
    data[len(data) - 60 if part == "footer" else 100] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match=path.name):
        read(log)


@pytest.mark.on_disk
def test_a_missing_sealed_file_is_named(log: broker.Log, root: Path) -> None:
    fill(log, 100)
    log.maintain(NAME, seal=True)
    path = files(root, "sealed/partition=0")[0]
    path.unlink()
    with pytest.raises(MissingFile, match=path.name):
        read(log)


def test_a_reader_finds_records_however_often_they_move(
    log: broker.Log, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a reader's look at the state and its opening of the file, again and again."""
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    fill(log, 100)
    log.maintain(NAME, seal=True)
    reader = TopicReader(storage, NAME, 1)
    moves = [10, 20, 30]
    open_file = storage.open_file

    def open_late(path: str, **options: bool) -> AppendFile | None:
        if "/sealed/partition=0/" in path and moves:
            monkeypatch.undo()
            log.delete_records({TopicPartition(NAME, 0): moves.pop(0)})
            log.maintain(NAME)
            monkeypatch.setattr(storage, "open_file", open_late)
        return open_file(path, **options)

    monkeypatch.setattr(storage, "open_file", open_late)
    assert reader.fetch(0, 40, 1000)[0].base_offset == 40
    assert not moves
    reader.close()


def damage_first_sealed_file(root: Path) -> Path:
    path = files(root, "sealed/partition=0")[0]
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.on_disk
def test_damage_in_one_partition_does_not_keep_the_others_from_being_maintained(
    log: broker.Log, root: Path
) -> None:
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    for first in range(0, 16 * 10, 10):
        fill(log, 10, first=first)
        if first == 150:
            path = damage_first_sealed_file(root)
            with pytest.raises(CorruptLog, match=path.name):
                log.maintain(NAME, seal=True)
        else:
            log.maintain(NAME, seal=True)
    assert len(files(root, "sealed/partition=0")) == 16, "not merged, and all is still there"
    assert len(files(root, "sealed/partition=1")) == 1
    assert log.describe_topic(NAME).sealed_ends == (80, 80)
    assert len(files(root, "journal")) == 1


@pytest.mark.on_disk
def test_damage_in_one_topic_does_not_keep_the_others_and_groups_from_being_maintained(
    log: broker.Log, root: Path, clock: Clock
) -> None:
    log.create_topic("zebras", 1, config=CONFIG)
    with log.producer() as producer:
        producer.send("zebras", b"z")
    log.alter_group("g", {"offsets.retention.minutes": 5})
    log.publish_positions("g", {TopicPartition("zebras", 0): 1})
    fill(log, 100)
    journal = files(root, "journal")[0]
    data = bytearray(journal.read_bytes())
    data[500::100] = bytes(byte ^ 4 for byte in data[500::100])
    journal.write_bytes(data)
    clock.ahead_ms = 6 * 60_000
    with pytest.raises(broker.MaintenanceFailed, match=f"topic 'orders': .*{journal.name}") as told:
        log.maintain(seal=True)
    assert list(told.value.failures) == ["topic 'orders'"]
    assert [done.topic for done in told.value.done] == ["zebras"]
    assert log.describe_topic("zebras").sealed_ends == (1,)
    assert log.group_positions("g") == {}


class Meanwhile:
    """Progress that lets something happen just before the first files are written."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.acts = [act]

    def begin(self, what: str, total: int) -> None:
        if self.acts:
            self.acts.pop()()

    def advance(self, count: int) -> None: ...


@pytest.mark.on_disk
def test_a_topic_deleted_during_maintenance_stays_deleted(
    log: broker.Log, storage: Storage, root: Path
) -> None:
    fill(log, 100)
    round_ = Round(storage, NAME, 1, progress=Meanwhile(lambda: log.delete_topic(NAME)))
    with pytest.raises(broker.UnknownTopic):
        round_.run(is_forced=True)
    assert log.topics() == [] and files(root, "sealed") == []
    log.create_topic(NAME, PARTITIONS)
    assert read(log) == {} and log.describe_topic(NAME).incarnation == 2
    assert not (root / "topics" / NAME / "1").exists()


def test_partitions_and_records_added_during_maintenance_are_left_for_the_next(
    log: broker.Log, storage: Storage
) -> None:
    fill(log, 100)

    def grow() -> None:
        log.create_partitions(NAME, 4)
        fill(log, 100, first=100)
        with log.producer() as producer:
            producer.send(NAME, b"new", partition=3)

    Round(storage, NAME, 1, progress=Meanwhile(grow)).run(is_forced=True)
    assert log.describe_topic(NAME).sealed_ends == (50, 50, 0, 0)
    before = read(log)
    log.maintain(NAME, seal=True)
    assert log.describe_topic(NAME).sealed_ends == (100, 100, 0, 1)
    assert read(log) == before and [len(before[part]) for part in (0, 1, 3)] == [100, 100, 1]


@pytest.mark.on_disk
def test_a_disk_that_is_full_at_the_seal_has_its_room_back(log: broker.Log, root: Path) -> None:
    fill(log, 100)
    log.maintain(NAME, seal=True)
    before = files(root, "sealed/partition=0")
    fill(log, 100, first=100)
    fuse = Fuse(manner="fail")

    def fill_up() -> None:
        """From here on: the new file and its folder, and then the commit, which fails."""
        fuse.at = len(fuse.trace) + 4

    storage = FaultyStorage(str(root), fuse)
    with pytest.raises(broker.DiskFull):
        Round(storage, NAME, 1, progress=Meanwhile(fill_up)).run(is_forced=True)
    assert fuse.at is not None and fuse.trace[fuse.at - 1][0] == "append", fuse.trace
    storage.bury()
    assert files(root, "sealed/partition=0") == before
    assert log.describe_topic(NAME).sealed_ends == (50, 100), "the other had room"


def test_many_partitions_are_sealed_and_trimmed(log: broker.Log) -> None:
    count = 120
    log.create_topic("wide", count, config=CONFIG)
    numbers = [number % count for number in range(3 * count)]
    with log.producer() as producer:
        producer.send_batch(
            "wide", pa.table({"value": [b"v"] * len(numbers), "partition": numbers})
        )
    before = read(log, "wide")
    log.maintain("wide", seal=True)
    assert log.describe_topic("wide").sealed_ends == (3,) * count
    assert read(log, "wide") == before
    assert log.verify("wide").damage == ()


def test_a_clock_set_back_does_not_stop_sealing(log: broker.Log, clock: Clock) -> None:
    fill(log, 100)
    clock.ahead_ms = -30 * DAY_MS
    assert log.maintain(NAME, seal=True)[0].sealed_records == 100
    assert [len(rows) for rows in read(log).values()] == [50, 50]


# Retention.


@pytest.mark.every_store
def test_old_records_go_file_by_file(log: broker.Log, clock: Clock) -> None:
    now = int(time.time() * 1000)
    log.alter_topic(NAME, {"retention.ms": DAY_MS, "seal.ms": 1 << 60})
    fill(log, 200, time_ms=now - 2 * DAY_MS)
    fill(log, 100, first=200, time_ms=now)
    (done,) = log.maintain(NAME)
    starts = [one.start_offset for one in log.describe_topic(NAME).partitions]
    assert done.removed_records == sum(starts) and all(80 <= start <= 100 for start in starts)
    assert [row[0] for row in read(log)[0]] == list(range(starts[0], 150))


@pytest.mark.on_disk
def test_old_sealed_records_go_too(log: broker.Log, root: Path, clock: Clock) -> None:
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    fill(log, 100)
    log.maintain(NAME, seal=True)
    fill(log, 100, first=100, time_ms=int(time.time() * 1000))
    log.alter_topic(NAME, {"retention.ms": DAY_MS})
    log.maintain(NAME, seal=True)
    assert [one.start_offset for one in log.describe_topic(NAME).partitions] == [50, 50]
    assert len(files(root, "sealed")) == PARTITIONS
    with log.consumer(NAME) as consumer:
        consumer.seek(TopicPartition(NAME, 0), 10)
        with pytest.raises(OffsetOutOfRange):
            consumer.poll(0)


def test_a_topic_that_is_all_old_becomes_empty(log: broker.Log) -> None:
    fill(log, 55)
    log.alter_topic(NAME, {"retention.ms": 0})
    log.maintain(NAME)
    assert read(log) == {}
    fill(log, 10, first=55)
    assert sum(map(len, read(log).values())) == 10


@pytest.mark.every_store
def test_too_many_bytes_go_oldest_first(log: broker.Log) -> None:
    fill(log, 400)
    log.maintain(NAME, seal=True)
    fill(log, 400, first=400)
    log.alter_topic(NAME, {"retention.bytes": 10_000})
    log.maintain(NAME)
    description = log.describe_topic(NAME)
    assert all(200 <= one.start_offset < 380 for one in description.partitions)


def test_absurd_limits_remove_all_or_nothing(log: broker.Log) -> None:
    fill(log, 50)
    log.alter_topic(NAME, {"retention.ms": 10**18, "retention.bytes": 10**18})
    assert log.maintain(NAME)[0].removed_records == 0
    log.alter_topic(NAME, {"retention.bytes": 0})
    log.maintain(NAME, seal=True)
    assert read(log) == {}


def test_a_clock_set_back_removes_nothing(log: broker.Log, clock: Clock) -> None:
    fill(log, 100, time_ms=int(time.time() * 1000))
    log.alter_topic(NAME, {"retention.ms": DAY_MS})
    clock.ahead_ms = -30 * DAY_MS
    before = read(log)
    log.maintain(NAME, seal=True)
    assert read(log) == before


@pytest.mark.on_disk
def test_records_deleted_within_a_file_leave_it_at_the_next_round(
    log: broker.Log, root: Path
) -> None:
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    fill(log, 100)
    log.maintain(NAME, seal=True)
    log.delete_records({TopicPartition(NAME, 0): 20})
    log.maintain(NAME)
    (path,) = files(root, "sealed/partition=0")
    assert pq.read_table(path, partitioning=None).column("offset").to_pylist() == list(
        range(20, 50)
    )
    assert [row[0] for row in read(log)[0]] == list(range(20, 50))


# Garbage.


@pytest.mark.on_disk
def test_staged_files_that_nobody_committed_go_after_days(
    log: broker.Log, root: Path, clock: Clock
) -> None:
    import pyarrow as pa

    stages = [log.stage(NAME) for _ in range(2)]
    staged = []
    for stage in stages:
        stage.write(pa.table({"value": [b"v"]}))
        staged.append(stage.finish())
        stage.close()
    log.commit_staged(NAME, staged[:1])
    clock.ahead_ms = NAMED_WITHIN_MS + 1000
    with pytest.raises(broker.InvalidRecord, match="three days"):
        log.commit_staged(NAME, staged[1:])
    fill(log, 1)
    log.alter_topic(NAME, {"seal.ms": 1 << 60})
    log.maintain(NAME)
    assert len(files(root, "data")) == 2
    clock.ahead_ms = GARBAGE_AFTER_MS + 1000
    fill(log, 1)
    log.maintain(NAME)
    assert len(files(root, "data")) == 1
    assert (0, None, b"v") in {row[:3] for rows in read(log).values() for row in rows}


@pytest.mark.on_disk
def test_half_made_files_of_the_dead_go_after_days(log: broker.Log, root: Path) -> None:
    fill(log, 100)
    log.maintain(NAME, seal=True)
    old, young = (
        root / "topics" / NAME / "1" / "sealed" / "partition=0" / f".tmp-{name}"
        for name in ("old", "young")
    )
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = time.time() - GARBAGE_AFTER_MS / 1000 - 60
    os.utime(old, (long_ago, long_ago))
    assert "sealed/partition=0/.tmp-old" in log.maintain(NAME)[0].removed_files
    assert young.exists() and not old.exists()


# Crashes.


def run_round(storage: Storage) -> None:
    Round(storage, NAME, 1).run(is_forced=True)


@pytest.mark.on_disk
def test_a_maintainer_killed_at_any_change_loses_nothing(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    made = broker.open(prepared)
    # The round that is killed seals, merges that with what was sealed, and removes the old files.
    settings = CONFIG | {"table.delete.delay.ms": 0, "seal.bytes": 4000}
    made.create_topic(NAME, PARTITIONS, config=settings)
    for first in (0, 10):
        fill(made, 10, first=first)
        made.maintain(NAME, seal=True)
    fill(made, 100, first=20)
    made.delete_records({TopicPartition(NAME, 0): 3})
    before = read(made)
    whole = Fuse()
    kill(prepared, tmp_path / "whole", whole)
    assert {name for name, _ in whole.trace} >= {"create", "append", "remove", "lock", "link"}
    for at in range(1, len(whole.trace) + 1):
        for manner in ("before", "after"):
            trial = tmp_path / f"{at}-{manner}"
            kill(prepared, trial, Fuse(at, manner))
            log = broker.open(trial)
            assert read(log) == before, (at, manner)
            assert all(map(os.path.exists, table_files(log))), (at, manner)
            log.maintain(NAME, seal=True)
            assert read(log) == before, (at, manner)
            assert in_table(log) == before, (at, manner)
            assert log.describe_topic(NAME).sealed_ends == (60, 60)
            shutil.rmtree(trial)


def table_files(log: broker.Log) -> list[str]:
    """Return the files that the Delta log names."""
    paths = [
        url2pathname(urlparse(uri).path) for uri in DeltaTable(log.table_path(NAME)).file_uris()
    ]
    assert paths
    return paths


def kill(prepared: Path, trial: Path, fuse: Fuse) -> None:
    """Run a round in a copy of the log until the fuse blows."""
    shutil.copytree(prepared, trial)
    storage = FaultyStorage(str(trial), fuse)
    try:
        run_round(storage)
    except Died:
        pass
    storage.bury()


@pytest.mark.on_disk
def test_a_full_disk_while_sealing_changes_nothing(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    made = broker.open(prepared)
    made.create_topic(NAME, PARTITIONS, config=CONFIG)
    fill(made, 100)
    before = read(made)
    whole = Fuse()
    kill(prepared, tmp_path / "whole", whole)
    for at in range(1, len(whole.trace) + 1):
        trial = tmp_path / f"full-{at}"
        # Only a hint, or a file that stays until the next round, may fail without a word.
        may_be_silent = whole.trace[at - 1][0] in ("overwrite", "remove")
        has_failed = fails(lambda trial=trial, at=at: kill(prepared, trial, Fuse(at, "fail")))
        assert has_failed or may_be_silent, whole.trace[at - 1]
        log = broker.open(trial)
        assert read(log) == before, at
        log.maintain(NAME, seal=True)
        assert read(log) == before, at
        shutil.rmtree(trial)


def fails(act: Callable[[], None]) -> bool:
    try:
        act()
    except broker.LogError:
        return True
    return False
