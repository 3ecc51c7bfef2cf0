"""A process killed at any change it makes leaves a log that is legal, and loses nothing.

A scripted workload knows what the log must hold after each of its steps. It is killed at every
single change, before it and half-way; then the log is opened again. It must be exactly as before
the step that was in flight, or as after it, and doing that step again must not do it twice.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import Died, FaultyStorage, Fuse, open_writer
from faulty_store import DyingStore, fresh_store

from broker import LogError, OutcomeUnknown, TopicExists, UnknownTopic, sending
from broker.batch import encode_records
from broker.commit import HEADER, ROW, Author, Placeable, results
from broker.data_file import DataFile
from broker.log import Log
from broker.partitioner import PartitionChooser
from broker.reader import TopicReader
from broker.records import TopicPartition
from broker.sending import RecordBuffer, TransactionUnit
from broker.storage import LocalStorage, RemoteStorage, Storage
from broker.storage.hdfs import HdfsStore
from broker.storage.s3 import S3Store
from broker.storage.store import ObjectStore
from broker.topic import Topic
from servers import HdfsCluster, S3Server

NAME = "orders"
CONFIG = {"segment.bytes": 900, "checkpoint.commits": 2}
TRANSACTIONAL_ID = 7


@dataclass(frozen=True)
class Content:
    """What the topic holds: the oracle. A topic that is gone keeps its incarnation, negative."""

    incarnation: int = 0
    config: tuple[tuple[str, int], ...] = ()
    starts: tuple[int, ...] = ()
    values: tuple[tuple[bytes, ...], ...] = ()

    def add(self, *placed: tuple[int, list[bytes]]) -> Content:
        values = [list(one) for one in self.values]
        for partition, added in placed:
            values[partition] += added
        return replace(self, values=tuple(tuple(one) for one in values))


class Session:
    """One process that works on the log."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._log: Log | None = None
        self._topic: Topic | None = None
        self.owner: Author | None = None
        self.tried: Author | None = None

    @property
    def log(self) -> Log:
        if self._log is None:
            self._log = Log(self.storage)
        return self._log

    def topic(self) -> Topic:
        if self._topic is None:
            self._topic = open_writer(self.storage, NAME, self.log._existing(NAME))
        return self._topic

    def forget_topic(self) -> None:
        if self._topic is not None:
            self._topic.close()
            self._topic = None


@dataclass(frozen=True)
class Step:
    """What to do, and what the topic holds then."""

    name: str
    act: Callable[[Session, Content], None]
    effect: Callable[[Content], Content]


def frame(values: list[bytes]) -> Placeable:
    return encode_records([None] * len(values), list(values), None, [1_000_000] * len(values))


def author(producer: int, sequence: int) -> Author:
    return Author(bytes([producer, sequence]) * 8, producer, sequence)


def append(producer: int, sequence: int, *placed: tuple[int, list[bytes]], **how: Any) -> Step:
    """Append frames to some partitions; the answer must be the place right after the last."""

    def act(session: Session, before: Content) -> None:
        frames = [(partition, frame(values)) for partition, values in placed]
        appended = session.topic().append(frames, author(producer, sequence), **how)
        check_answer(appended.table, before, placed)

    return Step(f"append {producer}/{sequence}", act, lambda content: content.add(*placed))


def check_answer(
    table: bytes, before: Content, placed: tuple[tuple[int, list[bytes]], ...]
) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for partition, values in placed:
        first, count = expected.get(partition, (len(before.values[partition]), 0))
        expected[partition] = (first, count + len(values))
    assert results(table) == expected


def repeat(producer: int, sequence: int, *placed: tuple[int, list[bytes]]) -> Step:
    """Repeat the producer's last commit: it gets the same answer, and nothing is added."""

    def act(session: Session, before: Content) -> None:
        frames = [(partition, frame(values)) for partition, values in placed]
        number = session.topic().refresh().number
        appended = session.topic().append(frames, author(producer, sequence))
        for partition, (first, count) in results(appended.table).items():
            held = before.values[partition][first : first + count]
            assert list(held) == dict(placed)[partition]
        assert session.topic().refresh().number == number

    return Step(f"repeat {producer}/{sequence}", act, lambda content: content)


def transaction(sequence: int, *placed: tuple[int, list[bytes]]) -> Step:
    """Commit a transaction; what is over the inline limit is written to a file before."""

    def act(session: Session, before: Content) -> None:
        topic = session.topic()
        if session.tried is None and session.owner is None:
            session.owner = topic.fence(TRANSACTIONAL_ID)
        spill = DataFile(session.storage, topic.directory)
        unit = TransactionUnit(NAME, topic.incarnation, spill)
        for partition, values in placed:
            buffer = RecordBuffer(NAME)
            buffer.values, buffer.keys = list(values), [None] * len(values)
            buffer.timestamps = [1_000_000] * len(values)
            buffer.given = dict.fromkeys(range(len(values)), partition)
            unit.add(buffer, PartitionChooser("sticky"), len(before.values), "none")
        frames = unit.encode(PartitionChooser("sticky"), len(before.values), "none")
        if session.tried is None:
            assert session.owner is not None
            token = sequence.to_bytes(16, "little")
            next_sequence = session.owner.sequence + 1
            session.tried = session.owner._replace(token=token, sequence=next_sequence)
        appended = topic.append(frames, session.tried)
        session.owner, session.tried = session.tried, None
        check_answer(appended.table, before, placed)

    return Step(f"transaction {sequence}", act, lambda content: content.add(*placed))


def create(partitions: int) -> Step:
    def effect(content: Content) -> Content:
        next_incarnation = abs(content.incarnation) + 1
        return Content(
            next_incarnation, tuple(CONFIG.items()), (0,) * partitions, ((),) * partitions
        )

    def act(session: Session, before: Content) -> None:
        session.log.create_topic(NAME, partitions, CONFIG)

    return Step("create", act, effect)


def delete() -> Step:
    def act(session: Session, before: Content) -> None:
        session.forget_topic()
        session.log.delete_topic(NAME)

    return Step("delete", act, lambda content: Content(-content.incarnation))


def alter(**config: int) -> Step:
    given = {name.replace("_", "."): value for name, value in config.items()}

    def effect(content: Content) -> Content:
        return replace(content, config=tuple({**dict(content.config), **given}.items()))

    return Step("alter", lambda session, _: session.log.alter_topic(NAME, given), effect)


def grow(partitions: int) -> Step:
    def effect(content: Content) -> Content:
        added = partitions - len(content.values)
        return replace(
            content, starts=content.starts + (0,) * added, values=content.values + ((),) * added
        )

    def act(session: Session, before: Content) -> None:
        session.log.create_partitions(NAME, partitions)

    return Step("grow", act, effect)


def cut(partition: int, start: int) -> Step:
    def effect(content: Content) -> Content:
        starts = list(content.starts)
        starts[partition] = start
        return replace(content, starts=tuple(starts))

    def act(session: Session, before: Content) -> None:
        session.log.delete_records({TopicPartition(NAME, partition): start})

    return Step("delete records", act, effect)


WORKLOAD = [
    create(2),
    append(1, 0, (0, [b"a0"])),
    append(1, 1, (1, [b"b0", b"b1"])),
    append(2, 0, (0, [b"a1"]), (1, [b"b2"]), (0, [b"a2", b"a3"])),
    repeat(2, 0, (1, [b"b2"]), (0, [b"a1", b"a2", b"a3"])),
    append(1, 2, (0, [b"a4" * 40]), durable=True),
    append(1, 3, (1, [b"b3" * 200])),
    append(2, 1, (0, [b"a5"])),
    transaction(1, (0, [b"x0"]), (1, [b"y0", b"y1"])),
    transaction(2, (1, [b"y2" * 20]), (0, [b"x1" * 150, b"x2"]), (1, [b"y3" * 150])),
    append(2, 2, (1, [b"b4"])),
    alter(segment_bytes=500),
    append(2, 3, (0, [b"a6" * 100])),
    grow(3),
    append(1, 4, (2, [b"c0"]), (0, [b"a7"])),
    cut(0, 4),
    append(1, 5, (2, [b"c1" * 200]), durable=True),
    repeat(1, 5, (2, [b"c1" * 200])),
    delete(),
    create(1),
    append(3, 0, (0, [b"new"])),
    append(3, 1, (0, [b"new" * 200])),
]


@pytest.fixture(autouse=True)
def small_inline_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions over a few hundred bytes go to `data/`."""
    monkeypatch.setattr(sending, "_INLINE_BYTES_MAX", 600)


@dataclass(frozen=True)
class Death:
    """The step a process died in, what the log held before it, and the transaction it tried."""

    place: int
    before: Content
    tried: Author | None


def run(root: Path, fuse: Fuse) -> Death:
    """Run the workload on a disk until the fuse goes off, or to its end."""
    storage = FaultyStorage(str(root), fuse)
    try:
        return run_steps(storage, WORKLOAD)
    finally:
        storage.bury()


def run_steps(storage: Storage, workload: Sequence[Step]) -> Death:
    session = Session(storage)
    content = Content()
    place = 0
    try:
        for step in workload:
            step.act(session, content)
            content = step.effect(content)
            place += 1
        session.forget_topic()
    except Died:
        pass
    return Death(place, content, session.tried)


def read(log: Log) -> Content:
    """Return what a reader finds, checking that offsets are dense."""
    try:
        incarnation = log._existing(NAME)
    except UnknownTopic:
        return Content()
    reader = TopicReader(log._storage, NAME, incarnation)
    try:
        state = reader.refresh()
        values = []
        for partition, (start, end) in enumerate(zip(state.starts, state.ends, strict=True)):
            found: list[bytes] = []
            while start + len(found) < end:
                for one in reader.fetch(partition, start + len(found), 1 << 20):
                    assert one.base_offset == start + len(found)
                    found += one.batch.column(1).to_pylist()
            values.append((*[b""] * start, *found))
        return Content(incarnation, tuple(state.given.items()), tuple(state.starts), tuple(values))
    finally:
        reader.close()


def visible(content: Content) -> Content:
    """What of it a reader can see: records below the start are gone, and so is a deleted topic."""
    if content.incarnation <= 0:
        return Content()
    values = tuple(
        (*[b""] * start, *values[start:])
        for start, values in zip(content.starts, content.values, strict=True)
    )
    return replace(content, values=values)


def check_after_death(storage: Storage, death: Death, workload: Sequence[Step]) -> None:
    """Open the log again, look at it, do the step again, and go on."""
    session = Session(storage)
    session.tried, before = death.tried, death.before
    if death.place == len(workload):
        assert read(session.log) == visible(before)
        return
    step = workload[death.place]
    after = step.effect(before)
    found = read(session.log)
    assert found in (visible(before), visible(after)), f"{step.name} is there in part"
    do_again(session, step, before, is_done=found == visible(after) and before != after)
    assert read(session.log) == visible(after), f"{step.name} done again is wrong"
    if after.incarnation > 0:
        later = (len(after.values) - 1, [b"later"])
        append(9, 0, later).act(session, after)
        after = after.add(later)
        assert read(session.log) == visible(after)
    for step in workload[death.place + 1 :]:
        step.act(session, after)
        after = step.effect(after)
    assert read(session.log) == visible(after), "the rest of the workload went wrong"
    session.forget_topic()


def do_again(session: Session, step: Step, before: Content, *, is_done: bool) -> None:
    """Repeat the step that was in flight; those without an identity say that they are done."""
    if not is_done or step.name.startswith(("append", "transaction")):
        step.act(session, before)
    elif step.name == "create":
        with pytest.raises(TopicExists):
            step.act(session, before)
    elif step.name == "delete":
        with pytest.raises(UnknownTopic):
            step.act(session, before)


def die_everywhere(
    tmp_path: Path, fuses: Callable[[list[tuple[str, int]]], list[Fuse]], at_least: int
) -> None:
    """Run the workload once to count its changes, then once for each fuse."""
    whole = Fuse()
    assert run(tmp_path / "whole", whole).place == len(WORKLOAD)
    chosen = fuses(whole.trace)
    assert len(chosen) >= at_least, "the workload no longer reaches what it was written for"
    for number, fuse in enumerate(chosen):
        root = tmp_path / str(number)
        death = run(root, fuse)
        assert fuse.is_dead, f"{fuse.at} was not reached: the workload is not deterministic"
        try:
            check_after_death(LocalStorage(str(root)), death, WORKLOAD)
        except BaseException as error:
            name, size = fuse.trace[-1]
            error.add_note(
                f"killed {fuse.manner} change {fuse.at} ({name} of {size} bytes, prefix "
                f"{fuse.prefix}), in step {death.place} of the workload; see {root}"
            )
            raise
        shutil.rmtree(root)


def test_the_workload_reaches_rolls_checkpoints_and_data_files(tmp_path: Path) -> None:
    root = tmp_path / "log"
    log_files: set[str] = set()

    class Spy(Fuse):
        def change(self, *args: Any, **how: Any) -> Any:
            log_files.update(str(path.relative_to(root)) for path in root.rglob("*.*"))
            return super().change(*args, **how)

    death = run(root, Spy())
    assert death.place == len(WORKLOAD)
    assert death.before.values == ((b"new", b"new" * 200),)
    names = [name.removeprefix(f"topics/{NAME}/1/") for name in log_files]
    assert len([name for name in names if name.startswith("journal/")]) >= 5
    assert len([name for name in names if name.endswith(".soft.arrow")]) >= 4
    assert [name for name in names if name.startswith("checkpoint/") and ".soft" not in name]
    assert [name for name in names if name.startswith("data/")]
    assert [name for name in names if name.startswith("index/")]


def test_a_process_killed_between_any_two_changes_leaves_a_legal_log(tmp_path: Path) -> None:
    die_everywhere(
        tmp_path,
        lambda trace: [Fuse(at) for at in range(1, len(trace) + 1)],
        at_least=140,
    )


def test_a_process_killed_after_its_last_change_has_lost_nothing(tmp_path: Path) -> None:
    die_everywhere(tmp_path, lambda trace: [Fuse(len(trace), "after")], at_least=1)


@pytest.mark.parametrize(
    "prefix",
    [1, HEADER.size - 1, HEADER.size, HEADER.size + ROW.size // 2, -1],
    ids=["1", "header-1", "header", "table", "len-1"],
)
def test_a_process_killed_while_it_appends_leaves_a_prefix_that_nobody_sees(
    tmp_path: Path, prefix: int
) -> None:
    die_everywhere(
        tmp_path,
        lambda trace: [
            Fuse(at, "half", prefix)
            for at, (name, size) in enumerate(trace, start=1)
            if name == "append" and abs(prefix) < size
        ],
        at_least=15,
    )


@pytest.mark.parametrize("operation", ["create", "overwrite", "remove_tree"])
def test_a_process_killed_half_way_through_a_change_leaves_a_legal_log(
    tmp_path: Path, operation: str
) -> None:
    die_everywhere(
        tmp_path,
        lambda trace: [
            Fuse(at, "half", 20) for at, (name, _) in enumerate(trace, start=1) if name == operation
        ],
        at_least=1 if operation == "remove_tree" else 5,
    )


def test_a_change_that_fails_is_not_acknowledged_and_an_acknowledged_step_is_whole(
    tmp_path: Path,
) -> None:
    whole = Fuse()
    run(tmp_path / "whole", whole)
    for at in range(1, len(whole.trace) + 1):
        root = tmp_path / str(at)
        try:
            run_through_failure(root, Fuse(at, "fail"))
        except BaseException as error:
            error.add_note(f"change {at} ({whole.trace[at - 1][0]}) failed; see {root}")
            raise
        shutil.rmtree(root)


def run_through_failure(root: Path, fuse: Fuse) -> None:
    """Run the workload in one process that goes on after a failed step by doing it again.

    A step that says it failed must not have happened, unless it says that it does not know.
    """
    storage = FaultyStorage(str(root), fuse)
    session = Session(storage)
    content = Content()
    for step in WORKLOAD:
        after = step.effect(content)
        try:
            step.act(session, content)
        except LogError as error:
            found = read(Log(LocalStorage(str(root))))
            is_done = found == visible(after) and after != content
            assert found == visible(content) or is_done
            assert not is_done or isinstance(error, OutcomeUnknown) or step.name == "delete"
            if isinstance(error, OutcomeUnknown):
                session.forget_topic()  # After a failed sync it never acknowledges again.
            do_again(session, step, content, is_done=is_done)
        content = after
    assert read(Log(LocalStorage(str(root)))) == visible(content)
    session.forget_topic()
    storage.bury()


# On stores of whole objects, where a request is carried out or not, but never by half.

SHORT_WORKLOAD = [
    create(2),
    append(1, 0, (0, [b"a0"]), (1, [b"b0" * 300])),
    transaction(2, (0, [b"x1" * 150, b"x2"]), (1, [b"y3" * 150])),
    append(1, 1, (1, [b"b1" * 100])),
    delete(),
]


def die_everywhere_on(
    make: Callable[[str], ObjectStore], workload: Sequence[Step], *, at_least: int, step: int = 1
) -> None:
    """Run the workload once to count its changes of a store, then die before them.

    After one of them is before the next one.
    """
    whole = Fuse()
    storage = RemoteStorage(DyingStore(make("whole"), whole))
    assert run_steps(storage, workload).place == len(workload)
    assert len(whole.trace) >= at_least, "the workload no longer reaches what it was written for"

    def die(at: int) -> None:
        fuse = Fuse(at)
        store = make(str(at))
        death = run_steps(RemoteStorage(DyingStore(store, fuse)), workload)
        assert fuse.is_dead, f"{at} was not reached: the workload is not deterministic"
        try:
            check_after_death(RemoteStorage(store), death, workload)
        except BaseException as error:
            error.add_note(f"killed before change {at} ({fuse.trace[-1][0]}); see {store.root}")
            raise

    # Most of the time they wait for the store.
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(die, range(1, len(whole.trace) + 1, step)))


def test_a_process_killed_between_any_two_changes_of_a_store_leaves_a_legal_log() -> None:
    name = uuid.uuid4().hex
    die_everywhere_on(lambda at: fresh_store(f"{name}/{at}"), WORKLOAD, at_least=50)


def test_a_process_killed_between_changes_of_a_real_hdfs_leaves_a_legal_log(
    hdfs_cluster: HdfsCluster,
) -> None:
    root = f"{hdfs_cluster.address}/{uuid.uuid4().hex}"
    die_everywhere_on(lambda at: HdfsStore(f"{root}/{at}", {}), SHORT_WORKLOAD, at_least=10, step=2)


def test_a_process_killed_between_changes_of_a_real_s3_store_leaves_a_legal_log(
    s3_server: S3Server,
) -> None:
    root = f"{s3_server.address}/{uuid.uuid4().hex}"
    options = {**s3_server.client_options, "poll.ms": "100"}
    die_everywhere_on(
        lambda at: S3Store(f"{root}/{at}", options), SHORT_WORKLOAD, at_least=10, step=3
    )
