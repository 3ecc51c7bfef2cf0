"""The Delta table of a topic: what outsiders see of it, and what they cannot do to the log."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, write_deltalake
from test_maintenance import CONFIG, NAME, PARTITIONS, Clock, fill, in_table, read, table_files
from test_processes import SmallDisk

import broker
from broker import TopicPartition
from broker.maintenance import delta_log, delta_view, garbage, sealing
from broker.reader import TopicReader
from broker.storage import LocalStorage
from broker.topic import Topic

COLUMNS = ["key", "value", "headers", "timestamp", "timestampType", "offset", "partition"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(root: Path, clock: Clock) -> LocalStorage:
    return LocalStorage(str(root), clock=clock)


@pytest.fixture
def log(storage: LocalStorage) -> Iterator[broker.Log]:
    """A log that is sound when the test is over, whatever was done to its table."""
    made = broker.Log(storage)
    made.create_topic(NAME, PARTITIONS, config=CONFIG)
    yield made
    assert made.verify().damage == ()


@pytest.fixture
def sealed(log: broker.Log) -> broker.Log:
    """A topic sealed in two rounds: two files in each partition, two versions of the table."""
    for first in (0, 60):
        fill(log, 60, first=first)
        log.maintain(NAME, seal=True)
    return log


def version(log: broker.Log) -> int:
    return DeltaTable(log.table_path(NAME)).version()


def delta_files(log: broker.Log) -> Path:
    return Path(log.table_path(NAME), "_delta_log")


def last_commit(log: broker.Log) -> list[dict[str, dict[str, object]]]:
    path = delta_files(log) / f"{version(log):020d}.json"
    return [json.loads(line) for line in path.read_text().splitlines()]


# What others see.


def test_delta_readers_see_the_sealed_records(sealed: broker.Log) -> None:
    table = DeltaTable(sealed.table_path(NAME))
    assert [field.name for field in table.schema().fields] == COLUMNS
    assert table.metadata().partition_columns == ["partition"]
    assert in_table(sealed) == read(sealed)


def test_plain_parquet_readers_see_them_too(sealed: broker.Log) -> None:
    found = ds.dataset(sealed.table_path(NAME), partitioning="hive").to_table()
    assert found.num_rows == 120 and set(found.column_names) == set(COLUMNS)
    assert pc.sum(found.column("offset")).as_py() == 2 * sum(range(60))


def test_the_files_are_there_once(sealed: broker.Log, root: Path) -> None:
    for path in table_files(sealed):
        other = root / "topics" / NAME / "1" / "sealed" / Path(path).relative_to(
            sealed.table_path(NAME)
        )  # fmt: skip
        assert os.path.samefile(path, other)


def test_unsealed_records_are_not_in_the_table_yet(sealed: broker.Log) -> None:
    before = in_table(sealed)
    fill(sealed, 20, first=120)
    sealed.maintain(NAME)
    assert in_table(sealed) == before


def test_earlier_versions_can_be_read(sealed: broker.Log) -> None:
    fill(sealed, 60, first=120)
    sealed.maintain(NAME, seal=True)
    rows = [sum(map(len, in_table(sealed, number).values())) for number in range(3)]
    assert rows == [60, 120, 180]


def test_files_carry_bounds_of_offset_and_time(sealed: broker.Log) -> None:
    actions = pa.table(DeltaTable(sealed.table_path(NAME)).get_add_actions(flatten=True))
    rows = sorted(actions.to_pylist(), key=lambda row: (row["partition.partition"], row["path"]))
    assert [row["num_records"] for row in rows] == [30, 30, 30, 30]
    assert [(row["min.offset"], row["max.offset"]) for row in rows] == [(0, 29), (30, 59)] * 2
    assert [row["min.timestamp"].timestamp() for row in rows[:2]] == [
        1_700_000_000,
        1_700_000_000.06,
    ]
    assert rows[1]["max.timestamp"].timestamp() == 1_700_000_000.118


def test_times_that_no_calendar_has_are_left_out_of_the_bounds() -> None:
    assert delta_log._time_text(1 << 60) is None
    assert delta_log._time_text(-1) == "1969-12-31T23:59:59.999Z"


def test_records_below_the_start_leave_the_table(sealed: broker.Log) -> None:
    sealed.delete_records({TopicPartition(NAME, 0): 30, TopicPartition(NAME, 1): 10})
    sealed.maintain(NAME)
    assert in_table(sealed) == read(sealed)
    assert [rows[0][0] for _, rows in sorted(in_table(sealed).items())] == [30, 10]


def test_merged_files_replace_the_small_ones(sealed: broker.Log) -> None:
    sealed.alter_topic(NAME, {"seal.bytes": 4500, "table.delete.delay.ms": 0})
    fill(sealed, 60, first=120)
    sealed.maintain(NAME, seal=True)
    assert len(table_files(sealed)) == sealed.describe_topic(NAME).sealed_file_count < 6
    assert in_table(sealed) == read(sealed)


def test_a_compacted_topic_has_bounds_of_what_is_left(log: broker.Log) -> None:
    """Delta answers `min(offset)` from them, so they must be those of real records."""
    log.alter_topic(NAME, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0})
    fill(log, 100)
    log.maintain(NAME, seal=True)
    assert in_table(log) == read(log)
    for action in pa.table(
        DeltaTable(log.table_path(NAME)).get_add_actions(flatten=True)
    ).to_pylist():
        left = [row[0] for row in read(log)[action["partition.partition"]]]
        assert (action["min.offset"], action["max.offset"]) == (left[0], left[-1])
        assert action["num_records"] == len(left) < 50


def test_a_round_that_changes_nothing_leaves_the_delta_log_alone(
    sealed: broker.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed.maintain(NAME)
    stamps = [(path.name, path.stat().st_mtime_ns) for path in delta_files(sealed).iterdir()]
    opened = []
    monkeypatch.setattr(delta_view, "DeltaLog", opened.append)
    sealed.maintain(NAME)
    fill(sealed, 10, first=120)
    sealed.maintain(NAME)
    assert opened == [], "nothing has changed, so the Delta log is not even opened"
    assert stamps == [
        (path.name, path.stat().st_mtime_ns) for path in delta_files(sealed).iterdir()
    ]


def test_only_new_records_change_the_data(sealed: broker.Log) -> None:
    """A stream over the table takes the files that do: each record is in one of them."""
    sealed.alter_topic(NAME, {"seal.bytes": 4500})
    fill(sealed, 60, first=120)
    sealed.maintain(NAME, seal=True)
    changing: list[tuple[int, int]] = []
    for path in sorted(delta_files(sealed).glob("*.json")):
        for line in path.read_text().splitlines():
            action = json.loads(line)
            assert not action.get("remove", {}).get("dataChange")
            if action.get("add", {}).get("dataChange"):
                bounds = json.loads(action["add"]["stats"])
                changing.append((bounds["minValues"]["offset"], bounds["maxValues"]["offset"]))
    assert sorted(changing) == sorted([(0, 29), (30, 59), (60, 89)] * PARTITIONS)
    assert sum(map(len, in_table(sealed).values())) == 180


def test_what_was_merged_before_it_was_mirrored_says_so(
    sealed: broker.Log, storage: LocalStorage
) -> None:
    """Somebody without `deltalake` sealed and merged: a stream must not take records twice."""
    sealed.alter_topic(NAME, {"seal.bytes": 4500})
    fill(sealed, 60, first=120)
    topic = Topic(storage, NAME, 1, write=True)
    topic.end_file()
    topic.sync()
    reader = TopicReader(storage, NAME, 1)
    for unit in sealing.plan(reader.refresh(), 0, is_forced=True):
        assert topic.seal(sealing.write(reader, unit), unit.removed, {})
    for unit in sealing.plan_merges(reader.refresh()):
        assert topic.seal(sealing.write(reader, unit), unit.removed, {})
    assert delta_view.mirror(topic) is not None
    topic.close()
    reader.close()
    actions = last_commit(sealed)
    assert {one["add"]["dataChange"] for one in actions if "add" in one} == {True}
    assert {one["remove"]["dataChange"] for one in actions if "remove" in one} == {True}
    assert in_table(sealed) == read(sealed)


def test_a_new_incarnation_has_a_table_of_its_own(sealed: broker.Log) -> None:
    old = sealed.table_path(NAME)
    sealed.delete_topic(NAME)
    with pytest.raises(broker.UnknownTopic):
        sealed.table_path(NAME)
    assert not os.path.exists(old)
    sealed.create_topic(NAME, PARTITIONS, config=CONFIG)
    assert sealed.table_path(NAME) != old
    fill(sealed, 10)
    sealed.maintain(NAME, seal=True)
    assert in_table(sealed) == read(sealed) and version(sealed) == 0


def test_a_log_below_a_path_with_spaces_has_tables(tmp_path: Path) -> None:
    log = broker.open(tmp_path / "a b ü")
    log.create_topic(NAME, PARTITIONS, config=CONFIG)
    fill(log, 10)
    log.maintain(NAME, seal=True)
    assert in_table(log) == read(log)
    assert log.verify().damage == ()


def test_where_the_library_cannot_keep_a_table_the_log_is_kept_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = broker.open(tmp_path / "a%20b")
    log.create_topic(NAME, PARTITIONS, config=CONFIG | {"table.delete.delay.ms": 0})
    fill(log, 10)
    log.maintain(NAME, seal=True)
    assert "no Delta table is kept" in caplog.text
    log.delete_records({TopicPartition(NAME, 0): -1})
    assert len(log.maintain(NAME)[0].removed_files) == 1
    assert sum(map(len, read(log).values())) == 5
    assert log.verify().damage == ()


# What outsiders do.


def optimize(log: broker.Log) -> None:
    done = DeltaTable(log.table_path(NAME)).optimize.compact()
    assert done["numFilesRemoved"] == 4


def vacuum(log: broker.Log) -> None:
    DeltaTable(log.table_path(NAME)).vacuum(
        retention_hours=0, dry_run=False, enforce_retention_duration=False
    )


def optimize_and_vacuum(log: broker.Log) -> None:
    optimize(log)
    vacuum(log)
    assert len(list(Path(log.table_path(NAME)).glob("*/*.parquet"))) == PARTITIONS


def append(log: broker.Log) -> None:
    rows = DeltaTable(log.table_path(NAME)).to_pyarrow_table().slice(0, 5)
    write_deltalake(log.table_path(NAME), rows, mode="append")


def delete_rows(log: broker.Log) -> None:
    DeltaTable(log.table_path(NAME)).delete("offset < 10")


def overwrite(log: broker.Log) -> None:
    rows = DeltaTable(log.table_path(NAME)).to_pyarrow_table().slice(0, 5)
    write_deltalake(log.table_path(NAME), rows, mode="overwrite")


def restore(log: broker.Log) -> None:
    DeltaTable(log.table_path(NAME)).restore(0)


def change_schema(log: broker.Log) -> None:
    rows = pa.table({"partition": pa.array([0], pa.int32()), "other": ["x"]})
    write_deltalake(log.table_path(NAME), rows, mode="overwrite", schema_mode="overwrite",
                    partition_by=["partition"])  # fmt: skip


def lose_log(log: broker.Log) -> None:
    shutil.rmtree(delta_files(log))


def lose_table(log: broker.Log) -> None:
    shutil.rmtree(log.table_path(NAME))


def lose_links(log: broker.Log) -> None:
    for path in table_files(log):
        os.unlink(path)


def lose_first_commit(log: broker.Log) -> None:
    (delta_files(log) / f"{0:020d}.json").unlink()


def tear_last_commit(log: broker.Log) -> None:
    path = delta_files(log) / f"{version(log):020d}.json"
    os.truncate(path, path.stat().st_size // 2)


def empty_last_commit(log: broker.Log) -> None:
    os.truncate(delta_files(log) / f"{version(log):020d}.json", 0)


def garble_first_commit(log: broker.Log) -> None:
    path = delta_files(log) / f"{0:020d}.json"
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size)


def put_file_at(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"mine now")


def delta_log_is_a_file(log: broker.Log) -> None:
    put_file_at(delta_files(log))


def table_is_a_file(log: broker.Log) -> None:
    put_file_at(Path(log.table_path(NAME)))


def partition_is_a_file(log: broker.Log) -> None:
    put_file_at(Path(log.table_path(NAME), "partition=0"))


OUTSIDERS = [
    optimize,
    optimize_and_vacuum,
    vacuum,
    append,
    delete_rows,
    overwrite,
    restore,
    change_schema,
    lose_log,
    lose_table,
    lose_links,
    lose_first_commit,
    tear_last_commit,
    empty_last_commit,
    garble_first_commit,
    delta_log_is_a_file,
    table_is_a_file,
    partition_is_a_file,
]


@pytest.mark.parametrize("act", OUTSIDERS, ids=lambda act: act.__name__)
def test_what_outsiders_do_is_mended_and_never_reaches_the_log(
    sealed: broker.Log, act: Callable[[broker.Log], None]
) -> None:
    sealed.maintain(NAME)  # From here on only the hint says that nothing changed.
    before, table = read(sealed), in_table(sealed)
    assert table == before
    act(sealed)
    assert read(sealed) == before
    assert sealed.verify().damage == ()
    sealed.maintain(NAME)
    assert read(sealed) == before
    assert in_table(sealed) == table
    assert sealed.verify().damage == ()
    fill(sealed, 20, first=120)
    sealed.maintain(NAME, seal=True)
    assert in_table(sealed) == read(sealed)


def test_an_outsiders_optimize_does_not_send_records_to_streams_again(sealed: broker.Log) -> None:
    optimize(sealed)
    sealed.maintain(NAME)
    changes = [one["add"]["dataChange"] for one in last_commit(sealed) if "add" in one]
    assert changes == [False] * 4


def test_a_damaged_delta_log_is_put_aside_and_the_user_told(
    sealed: broker.Log, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    garble_first_commit(sealed)
    sealed.maintain(NAME)
    assert "begun anew" in caplog.text
    (kept,) = (root / "topics" / NAME / "1" / "aside").iterdir()
    assert kept.name.startswith("_delta_log-") and len(list(kept.iterdir())) == 2


class BrokenDisk:
    """A directory in which the Delta log cannot be written: full, or forbidden if not root's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._disk = SmallDisk(directory) if os.geteuid() == 0 else None
        self._forbidden: Path | None = None
        directory.mkdir(exist_ok=True)

    def break_down(self, table: Path) -> None:
        if self._disk is None:
            self._forbidden = table
            table.chmod(0o500)
            return
        with pytest.raises(OSError), (self.directory / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def mend(self) -> None:
        if self._forbidden is not None:
            self._forbidden.chmod(0o700)
        (self.directory / "rest").unlink(missing_ok=True)

    def close(self) -> None:
        self.mend()
        if self._disk is not None:
            self._disk.close()


@pytest.fixture
def broken_disk(tmp_path: Path) -> Iterator[BrokenDisk]:
    disk = BrokenDisk(tmp_path / "disk")
    yield disk
    disk.close()


def test_an_error_of_the_disk_below_the_table_is_no_damage_and_all_else_is_done(
    broken_disk: BrokenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    root = broken_disk.directory / "log"
    log = broker.open(root)
    log.create_topic(NAME, PARTITIONS, config=CONFIG)
    fill(log, 60)
    log.maintain(NAME, seal=True)
    lose_log(log)
    garbage_file = root / "topics" / NAME / "1" / "sealed" / "partition=0" / ".tmp-dead"
    garbage_file.write_bytes(bytes(100_000))
    os.utime(garbage_file, (0, 0))
    broken_disk.break_down(Path(log.table_path(NAME)))
    log.maintain(NAME)
    assert "is behind until the next maintenance" in caplog.text
    assert "begun anew" not in caplog.text
    assert not garbage_file.exists(), "there is room again"
    broken_disk.mend()
    fill(log, 20, first=60)
    log.maintain(NAME, seal=True)
    assert in_table(log) == read(log)
    assert log.verify().damage == ()


# Two at once, and files that go.


def test_two_who_mirror_at_once_collide(sealed: broker.Log, storage: LocalStorage) -> None:
    fill(sealed, 20, first=120)
    topic = Topic(storage, NAME, 1, write=True)
    late = delta_log.DeltaLog(sealed.table_path(NAME))
    sealed.maintain(NAME, seal=True)
    change = delta_log.Change(time=0, versions={delta_view._transaction(topic, 0): 70})
    with pytest.raises(delta_log.DeltaFailed):
        late.commit(change)
    topic.close()
    assert in_table(sealed) == read(sealed)


def test_a_file_that_the_delta_log_names_is_not_removed(
    sealed: broker.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Delta commit fails: then what it would have stopped naming must stay."""
    sealed.alter_topic(NAME, {"table.delete.delay.ms": 0})
    sealed.delete_records({TopicPartition(NAME, 0): 30})
    delta_files(sealed).chmod(0o500)
    monkeypatch.setattr(delta_log.DeltaLog, "commit", fail)
    sealed.maintain(NAME)
    assert all(map(os.path.exists, table_files(sealed)))
    monkeypatch.undo()
    delta_files(sealed).chmod(0o700)
    (done,) = sealed.maintain(NAME)
    assert len(done.removed_files) == 2
    assert in_table(sealed) == read(sealed)


def test_who_looked_at_the_state_long_ago_does_not_take_the_table_back(
    sealed: broker.Log, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept between its look at the state and its look at the Delta log."""
    sealed.alter_topic(NAME, {"table.delete.delay.ms": 0, "seal.bytes": 4500})
    (root / "topics" / NAME / "1" / "mirrored").unlink()
    topic = Topic(storage, NAME, 1, write=True)
    open_now = delta_view._open

    def open_late(topic: Topic, now: int) -> delta_log.DeltaLog | None:
        monkeypatch.setattr(delta_view, "_open", open_now)
        fill(sealed, 60, first=120)
        (done,) = sealed.maintain(NAME, seal=True)
        assert done.merged_files and done.removed_files
        return open_now(topic, now)

    monkeypatch.setattr(delta_view, "_open", open_late)
    assert delta_view.mirror(topic) is not None
    topic.close()
    assert in_table(sealed) == read(sealed)


def test_who_mirrored_long_ago_removes_nothing_that_the_table_names_since(
    sealed: broker.Log, storage: LocalStorage
) -> None:
    """Another one went on meanwhile, and died between a merge and its mirroring."""
    sealed.alter_topic(NAME, {"table.delete.delay.ms": 0})
    topic, reader = Topic(storage, NAME, 1, write=True), TopicReader(storage, NAME, 1)
    mirrored = delta_view.mirror(topic)
    fill(sealed, 60, first=120)
    sealed.maintain(NAME, seal=True)
    sealed.alter_topic(NAME, {"seal.bytes": 4500})
    other = Topic(storage, NAME, 1, write=True)
    for unit in sealing.plan_merges(reader.refresh()):
        assert other.seal(sealing.write(reader, unit), unit.removed, {})
    other.close()
    garbage.clean(topic, reader, int(time.time() * 1000) + 1000, mirrored)
    assert all(map(os.path.exists, table_files(sealed)))
    topic.close()
    reader.close()
    (done,) = sealed.maintain(NAME)
    assert len(done.removed_files) > PARTITIONS
    assert in_table(sealed) == read(sealed)


def fail(*_arguments: object) -> None:
    raise delta_log.DeltaFailed("no room")


def test_without_the_library_topics_are_sealed_and_it_is_said_once(
    log: broker.Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(delta_log, "_told", set())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deltalake" else find(name)
    )
    log.alter_topic(NAME, {"table.delete.delay.ms": 0})
    for first in (0, 60):
        fill(log, 60, first=first)
        (done,) = log.maintain(NAME, seal=True)
        assert done.sealed_records == 60
    log.delete_records({TopicPartition(NAME, 0): 30})
    (done,) = log.maintain(NAME)
    assert len(done.removed_files) == 1, "no table names it"
    assert not os.path.exists(log.table_path(NAME))
    assert caplog.text.count("deltalake") == 1
    monkeypatch.undo()
    log.maintain(NAME)
    assert in_table(log) == read(log)


def test_a_forked_child_leaves_the_table_to_others(sealed: broker.Log) -> None:
    """The library's threads do not survive a fork."""
    fill(sealed, 20, first=120)
    # Killed at the end of the tests, if it does not end.
    forked = multiprocessing.get_context("fork")
    child = forked.Process(target=seal_in_child, args=(sealed,), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert sealed.describe_topic(NAME).sealed_ends == (70, 70)
    assert sum(map(len, in_table(sealed).values())) == 120
    sealed.maintain(NAME)
    assert in_table(sealed) == read(sealed)


def seal_in_child(log: broker.Log) -> None:
    (done,) = log.maintain(NAME, seal=True)
    assert done.sealed_records == 20


# Kills. Delta's own writes do not go through our storage, so a real process dies.

_MAINTAINER = """
import sys, broker
log = broker.open(sys.argv[1])
while True:
    log.maintain("orders", seal=True)
"""


def kill_maintainers(root: Path, seconds: float, pauses: random.Random) -> None:
    """Seal, merge, truncate and remove in processes that are killed at random."""
    log = broker.open(root)
    settings = CONFIG | {"table.delete.delay.ms": 0, "seal.bytes": 6000}
    log.create_topic(NAME, PARTITIONS, config=settings)
    written, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        maintainer = subprocess.Popen([sys.executable, "-c", _MAINTAINER, str(root)])
        fill(log, 40, first=written)
        written += 40
        # To start takes half a second; then a round takes some tens of milliseconds.
        time.sleep(0.4 + pauses.random())
        maintainer.send_signal(signal.SIGKILL)
        maintainer.wait()
        starts = [one.start_offset for one in log.describe_topic(NAME).partitions]
        offsets = {number: [row[0] for row in rows] for number, rows in read(log).items()}
        assert offsets == {one: list(range(starts[one], written // 2)) for one in range(PARTITIONS)}
        if delta_files(log).exists():
            assert all(map(os.path.exists, table_files(log)))
        assert log.verify().damage == ()
        if pauses.random() < 0.3:
            log.delete_records({TopicPartition(NAME, 0): written // 2 - 15})
    log.maintain(NAME, seal=True)
    assert in_table(log) == read(log)
    assert log.verify().damage == ()


def test_a_maintainer_killed_at_random_leaves_a_whole_table(root: Path) -> None:
    kill_maintainers(root, 6, random.Random(5))


@pytest.mark.torture
def test_maintainers_killed_for_minutes_leave_a_whole_table(root: Path) -> None:
    kill_maintainers(root, 120, random.Random())
