"""A power cut takes away any pages that were not synced, in any order; the rest is a prefix.

A log is built once, part of it synced. Copies of it lose parts of what was not synced and are
opened under another boot id. What must survive is known from the bytes alone: all commits before
the first one of which any byte is gone.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_storage import Died, DroppingExecutor, FaultyStorage, Fuse, open_writer

from broker.batch import encode_records
from broker.commit import Author, Kind, results
from broker.errors import CorruptLog, OutcomeUnknown
from broker.home import topic_home
from broker.journal import Journal
from broker.ledger import new_token
from broker.log import Log
from broker.reader import TopicReader
from broker.state import TopicState
from broker.storage import LocalStorage
from broker.synced import Synced
from broker.topic import Topic

NAME = "orders"
DIRECTORY = f"topics/{NAME}/1"
PARTITIONS = 2
PAGE = 4096
BEFORE, AFTER = "the boot before", "another boot"
LONG_CONFIG = {"segment.bytes": 1_000_000, "retention.bytes": 1_000_000, "retention.ms": 1_000_000}


@dataclass(frozen=True)
class Place:
    """Where a commit lies, and where each partition ends after it."""

    kind: Kind
    file: str
    start: int
    end: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Built:
    """A log as it was when the power went, and all that is known about it."""

    root: Path
    values: tuple[tuple[bytes, ...], ...]
    commits: tuple[Place, ...]
    synced: Synced
    durable_ends: tuple[int, ...]

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / DIRECTORY / "journal").iterdir())

    def is_synced(self, file: str, position: int) -> bool:
        return (int(file[:20]), position) < self.synced.place

    def survivors(self, root: Path) -> int:
        """Return how many commits from the first on have kept all their bytes."""
        held: dict[str, tuple[bytes, bytes]] = {}
        for number, commit in enumerate(self.commits):
            if commit.file not in held:
                now = root / DIRECTORY / "journal" / commit.file
                then = self.root / DIRECTORY / "journal" / commit.file
                held[commit.file] = (then.read_bytes(), now.read_bytes() if now.exists() else b"")
            then_bytes, now_bytes = held[commit.file]
            if then_bytes[commit.start : commit.end] != now_bytes[commit.start : commit.end]:
                return number
        return len(self.commits)


class Writer:
    """Appends random records and remembers what it was told."""

    def __init__(self, topic: Topic, rng: random.Random) -> None:
        self.topic = topic
        self.rng = rng
        self.values: list[list[bytes]] = [[] for _ in range(PARTITIONS)]

    def append(self, *, durable: bool = False) -> None:
        partition = self.rng.randrange(PARTITIONS)
        count = self.rng.choice([1, 1, 2, 5])
        values = [self.rng.randbytes(self.rng.choice([10, 700, 5000])) for _ in range(count)]
        frame = encode_records([None] * count, list(values), None, [1_000_000] * count)
        appended = self.topic.append([(partition, frame)], Author(new_token()), durable=durable)
        first = len(self.values[partition])
        assert results(appended.table) == {partition: (first, count)}
        self.values[partition] += values


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Synced: two files and a part of the third, by rolls and `durable`. Not synced: the rest."""
    root = tmp_path_factory.mktemp("power") / "log"
    storage = LocalStorage(str(root), boot_id=BEFORE)
    Log(storage).create_topic(NAME, PARTITIONS, {"segment.bytes": 40_000, "checkpoint.commits": 5})
    topic = open_writer(storage, NAME, 1)
    writer = Writer(topic, random.Random(7))
    while len(topic.state.files) < 2 or topic.state.position < 9_000:
        writer.append()
    writer.append(durable=True)
    durable_ends = tuple(topic.state.ends)
    topic._finisher = DroppingExecutor()  # type: ignore[assignment]
    while len(topic.state.files) < 6 or topic.state.position < 15_000:
        writer.append()
    topic.close()
    hint = Synced.read(storage, DIRECTORY)
    assert hint is not None and 0 < hint.position < 40_000
    values = tuple(tuple(one) for one in writer.values)
    return Built(root, values, places(storage), hint, durable_ends)


def places(storage: LocalStorage) -> tuple[Place, ...]:
    journal = Journal(storage, topic_home(NAME, 1))
    state = TopicState(1)
    found = []
    for commit in journal.read_new():
        file = f"{state.file_number:020d}.log"
        state.apply(commit, "")
        end = commit.position + commit.length
        found.append(Place(commit.kind, file, commit.position, end, tuple(state.ends)))
    journal.close()
    return tuple(found)


def read_values(reader: TopicReader) -> list[list[bytes]]:
    """Return every record of each partition; offsets must be dense from 0."""
    found: list[list[bytes]] = []
    for partition, end in enumerate(reader.state.ends):
        values: list[bytes] = []
        while len(values) < end:
            for one in reader.fetch(partition, len(values), 1 << 20):
                assert one.base_offset == len(values)
                values += one.batch.column(1).to_pylist()
        found.append(values)
    return found


def up_to(built: Built, ends: tuple[int, ...]) -> list[list[bytes]]:
    return [list(values[:end]) for values, end in zip(built.values, ends, strict=True)]


def check_recovery(built: Built, root: Path) -> None:
    """Open what is left, first as a reader, then as a writer, then again."""
    survivors = built.survivors(root)
    ends = built.commits[survivors - 1].ends
    assert all(end >= durable for end, durable in zip(ends, built.durable_ends, strict=True))
    lost = unsound_bytes(built, root, survivors)
    early = TopicReader(LocalStorage(str(root), boot_id=AFTER), NAME, 1)
    assert tuple(early.refresh().ends) == ends
    assert read_values(early) == up_to(built, ends)
    topic = Topic(LocalStorage(str(root), boot_id=AFTER), NAME, 1, write=True)
    state = topic.state
    assert tuple(state.ends) == ends
    assert state.epoch == 1 and state.epochs == [(1, ends)]
    assert [state.end_of_epoch(0, partition) for partition in range(PARTITIONS)] == list(ends)
    assert kept_aside(root) == lost
    check_it_goes_on(built, topic, ends, early)
    early.close()
    topic.close()


def check_it_goes_on(built: Built, topic: Topic, ends: tuple[int, ...], early: TopicReader) -> None:
    """Append, and read with a reader that came before recovery and with one that came after."""
    expected = up_to(built, ends)
    for number in range(12):
        value = b"after %d" % number + b"." * 8000
        frame = encode_records([None], [value], None, [1_000_000])
        topic.append([(1, frame)], Author(new_token()))
        expected[1].append(value)
    late = TopicReader(topic.storage, NAME, 1)
    for reader in (early, late):
        assert reader.refresh().epoch == topic.state.epoch
        assert read_values(reader) == expected
    late.close()


def unsound_bytes(built: Built, root: Path, survivors: int) -> list[bytes]:
    """Return what follows the last surviving commit: the rest of its file, and later files."""
    last = built.commits[survivors - 1]
    file, position = last.file, last.end
    if last.kind is Kind.END_OF_FILE:
        file, position = f"{survivors:020d}.log", 0
    lost = []
    for path in sorted((root / DIRECTORY / "journal").iterdir()):
        if path.name == file:
            lost.append(path.read_bytes()[position:])
        elif path.name > file:
            lost.append(path.read_bytes())
    return sorted(piece for piece in lost if piece)


def kept_aside(root: Path) -> list[bytes]:
    aside = root / DIRECTORY / "aside"
    pieces = [path.read_bytes() for path in aside.iterdir()] if aside.exists() else []
    return sorted(piece for piece in pieces if piece)


def copy(built: Built, root: Path) -> Path:
    shutil.copytree(built.root, root)
    return root


def journal_file(root: Path, name: str) -> Path:
    return root / DIRECTORY / "journal" / name


def zero_pages(built: Built, path: Path, rng: random.Random, share: float) -> None:
    """Lose pages of a file, except for bytes that were synced."""
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), PAGE):
        if rng.random() < share:
            first = start
            if built.is_synced(path.name, start):
                first = max(start, min(start + PAGE, synced_in(built, path.name)))
            end = min(start + PAGE, len(data))
            data[first:end] = bytes(max(0, end - first))
    path.write_bytes(data)


def synced_in(built: Built, file: str) -> int:
    """Return how many bytes of a file are synced."""
    number, position = built.synced.place
    if int(file[:20]) < number:
        return 1 << 62
    return position if int(file[:20]) == number else 0


def lose_at_random(built: Built, root: Path, rng: random.Random) -> None:
    """Do to each file what a power cut may do."""
    for name in built.files:
        certain = synced_in(built, name)
        path = journal_file(root, name)
        size = path.stat().st_size
        if certain >= size:
            continue
        fate = rng.choice(["keep", "keep", "zero", "zero", "zero all", "cut", "drop", "empty"])
        if fate.startswith("zero"):
            zero_pages(built, path, rng, 1.0 if fate == "zero all" else rng.choice([0.05, 0.3]))
        elif fate == "cut":
            with path.open("r+b") as file:
                file.truncate(rng.randint(certain, size - 1))
        elif fate == "drop" and certain == 0:
            path.unlink()
        elif fate == "empty" and certain == 0:
            path.write_bytes(b"")
    lose_hints(root, rng)


def lose_hints(root: Path, rng: random.Random) -> None:
    """The hint and soft checkpoints are never synced: they may be there, old, torn or gone."""
    hint = root / DIRECTORY / "synced"
    fate = rng.choice(["keep", "keep", "old", "torn", "empty", "gone"])
    if fate == "old":
        hint.write_bytes(Synced(0, 0, BEFORE).encode())
    elif fate == "torn":
        hint.write_bytes(hint.read_bytes()[:20] + bytes(44))
    elif fate == "empty":
        hint.write_bytes(b"")
    elif fate == "gone":
        hint.unlink()
    for path in (root / DIRECTORY / "checkpoint").glob("*.soft.arrow"):
        fate = rng.choice(["keep", "empty", "gone"])
        if fate == "empty":
            path.write_bytes(b"")
        elif fate == "gone":
            path.unlink()


def test_the_log_has_synced_and_unsynced_files(built: Built) -> None:
    assert len(built.files) == 7
    synced_files = [name for name in built.files if synced_in(built, name)]
    assert len(synced_files) == 3
    checkpoints = [path.name for path in (built.root / DIRECTORY / "checkpoint").iterdir()]
    assert len([name for name in checkpoints if ".soft." in name]) == 2
    assert len([name for name in checkpoints if ".soft." not in name]) == 2


@pytest.mark.parametrize("seed", range(60))
def test_lost_pages_and_files_leave_the_commits_before_the_first_loss(
    built: Built, tmp_path: Path, seed: int
) -> None:
    root = copy(built, tmp_path / "log")
    lose_at_random(built, root, random.Random(seed))
    check_recovery(built, root)


def test_a_power_cut_that_took_nothing_still_begins_an_epoch(built: Built, tmp_path: Path) -> None:
    root = copy(built, tmp_path / "log")
    check_recovery(built, root)
    assert kept_aside(root) == []


def unsynced_commits(built: Built, kind: Kind) -> list[Place]:
    return [
        commit
        for commit in built.commits
        if commit.kind is kind and not built.is_synced(commit.file, commit.start)
    ]


@pytest.mark.parametrize("rest", [0, 50, 95])
def test_a_lost_end_of_file_commit_takes_the_later_files_with_it(
    built: Built, tmp_path: Path, rest: int
) -> None:
    root = copy(built, tmp_path / "log")
    end = unsynced_commits(built, Kind.END_OF_FILE)[0]
    with journal_file(root, end.file).open("r+b") as file:
        file.truncate(end.start + rest)
    check_recovery(built, root)


@pytest.mark.parametrize("successor", ["missing", "empty"])
@pytest.mark.parametrize("later", ["kept", "gone"])
def test_a_lost_successor_leaves_all_of_the_file_before_it(
    built: Built, tmp_path: Path, successor: str, later: str
) -> None:
    root = copy(built, tmp_path / "log")
    lost = built.files[4]
    if successor == "missing":
        journal_file(root, lost).unlink()
    else:
        journal_file(root, lost).write_bytes(b"")
    if later == "gone":
        for name in built.files[5:]:
            journal_file(root, name).unlink()
    check_recovery(built, root)


def test_a_lost_page_inside_a_frame_is_found_although_the_commit_around_it_is_whole(
    built: Built, tmp_path: Path
) -> None:
    root = copy(built, tmp_path / "log")
    commit = next(
        one for one in unsynced_commits(built, Kind.APPEND) if one.end - one.start > 3 * PAGE
    )
    path = journal_file(root, commit.file)
    data = bytearray(path.read_bytes())
    page = (commit.start // PAGE + 1) * PAGE
    data[page : page + PAGE] = bytes(PAGE)
    path.write_bytes(data)
    check_recovery(built, root)


def test_soft_checkpoints_of_the_boot_before_are_not_believed(built: Built, tmp_path: Path) -> None:
    root = copy(built, tmp_path / "log")
    for name in built.files[3:]:
        journal_file(root, name).unlink()
    assert list((root / DIRECTORY / "checkpoint").glob("*.soft.arrow"))
    check_recovery(built, root)
    for path in (root / DIRECTORY / "checkpoint").glob("*.soft.arrow"):
        assert int(path.name[:20]) > built.survivors(root)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in (root / "topics").rglob("*")
        if path.is_file()
    }


def in_last_synced_file(built: Built) -> list[Place]:
    name = f"{built.synced.file_number:020d}.log"
    return [one for one in built.commits if one.file == name and one.end <= built.synced.position]


def flip_header(built: Built, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[in_last_synced_file(built)[2].start + 40] ^= 1
    path.write_bytes(data)


def zero_a_page(built: Built, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE : 2 * PAGE] = bytes(PAGE)
    path.write_bytes(data)


def cut_short(built: Built, path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(in_last_synced_file(built)[-1].start + 10)


def empty(built: Built, path: Path) -> None:
    path.write_bytes(b"")


def remove(built: Built, path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip_header, zero_a_page, cut_short, empty, remove])
def test_damage_in_the_synced_part_is_reported_and_nothing_is_cut(
    built: Built, tmp_path: Path, damage: Callable[[Built, Path], None]
) -> None:
    root = copy(built, tmp_path / "log")
    damage(built, journal_file(root, f"{built.synced.file_number:020d}.log"))
    before = tree(root)
    for write in (False, True):
        with pytest.raises(CorruptLog, match=f"{built.synced.file_number:020d}"):
            Topic(LocalStorage(str(root), boot_id=AFTER), NAME, 1, write=write)
    assert tree(root) == before


def test_recovery_killed_at_any_change_and_done_again_ends_in_the_same_place(
    built: Built, tmp_path: Path
) -> None:
    damaged = copy(built, tmp_path / "damaged")
    first_lost = unsynced_commits(built, Kind.APPEND)[3]
    with journal_file(damaged, first_lost.file).open("r+b") as file:
        file.seek(first_lost.start + 30)
        file.write(bytes(200))
    whole = Fuse()
    trial = tmp_path / "trial"
    shutil.copytree(damaged, trial)
    Topic(FaultyStorage(str(trial), whole, AFTER), NAME, 1, write=True).close()
    assert {"truncate", "rename", "remove", "append", "overwrite"} <= {op for op, _ in whole.trace}
    deaths = [Fuse(at) for at in range(1, len(whole.trace) + 1)]
    deaths += [
        Fuse(at, "half", 20)
        for at, (name, _) in enumerate(whole.trace, start=1)
        if name in ("create", "append", "overwrite")
    ]
    for fuse in deaths:
        root = tmp_path / f"{fuse.at} {fuse.manner}"
        shutil.copytree(damaged, root)
        check_recovery_after_death(built, root, fuse)
        shutil.rmtree(root)


def check_recovery_after_death(built: Built, root: Path, fuse: Fuse) -> None:
    ends = built.commits[built.survivors(root) - 1].ends
    storage = FaultyStorage(str(root), fuse, AFTER)
    with pytest.raises(Died):
        Topic(storage, NAME, 1, write=True)
    storage.bury()
    early = TopicReader(LocalStorage(str(root), boot_id=AFTER), NAME, 1)
    assert tuple(early.refresh().ends) == ends
    assert read_values(early) == up_to(built, ends)
    topic = Topic(LocalStorage(str(root), boot_id=AFTER), NAME, 1, write=True)
    assert tuple(topic.state.ends) == ends
    assert 1 <= topic.state.epoch <= 2
    assert topic.state.end_of_epoch(0, 0) == ends[0]
    check_it_goes_on(built, topic, ends, early)
    early.close()
    topic.close()


def test_a_power_cut_during_the_epoch_after_a_power_cut_begins_a_third(
    built: Built, tmp_path: Path
) -> None:
    root = copy(built, tmp_path / "log")
    check_recovery(built, root)
    topic = Topic(LocalStorage(str(root), boot_id="a third boot"), NAME, 1, write=True)
    epochs = topic.state.epochs
    assert [epoch for epoch, _ in epochs] == [1, 2]
    assert topic.state.end_of_epoch(0, 1) == epochs[0][1][1] < epochs[1][1][1]
    assert topic.state.end_of_epoch(1, 1) == epochs[1][1][1]
    topic.close()


def test_no_epoch_begins_in_the_same_boot(built: Built, tmp_path: Path) -> None:
    root = copy(built, tmp_path / "log")
    for _ in range(3):
        topic = Topic(LocalStorage(str(root), boot_id=BEFORE), NAME, 1, write=True)
        frame = encode_records([None], [b"more"], None, [1_000_000])
        topic.append([(0, frame)], Author(new_token()))
        topic.close()
    reopened = Topic(LocalStorage(str(root), boot_id=BEFORE), NAME, 1)
    assert (reopened.state.epoch, reopened.state.epochs) == (0, [])
    assert reopened.state.number == len(built.commits) + 3
    reopened.close()


def test_one_boot_has_one_recovery_however_many_open(built: Built, tmp_path: Path) -> None:
    root = copy(built, tmp_path / "log")
    topics = [Topic(LocalStorage(str(root), boot_id=AFTER), NAME, 1, write=True) for _ in range(3)]
    for topic in topics:
        assert topic.refresh().epoch == 1
        topic.close()


def test_a_create_that_a_power_cut_stopped_can_be_done_again_and_survives(tmp_path: Path) -> None:
    root = tmp_path / "log"
    fuse = Fuse()
    Log(FaultyStorage(str(tmp_path / "whole"), fuse, BEFORE)).create_topic(NAME, 1, LONG_CONFIG)
    for at in range(1, len(fuse.trace) + 1):
        storage = FaultyStorage(str(root / str(at)), Fuse(at), BEFORE)
        with pytest.raises(Died):
            Log(storage).create_topic(NAME, 1, LONG_CONFIG)
        log = Log(LocalStorage(storage.root, boot_id=AFTER))
        if not log.topics():
            log.create_topic(NAME, 1)
        log = Log(LocalStorage(storage.root, boot_id="a third boot"))
        log.alter_topic(NAME, {"retention.ms": 7})
        assert log.describe_topic(NAME).config["retention.ms"] == 7


def test_a_writer_whose_sync_failed_never_acknowledges_again(tmp_path: Path) -> None:
    root = str(tmp_path / "log")
    Log(LocalStorage(root)).create_topic(NAME)
    trial = Fuse()
    append_durably(FaultyStorage(root, trial))
    at = [name for name, _ in trial.trace].index("sync") + 1
    storage = FaultyStorage(root, Fuse(at, "fail"))
    topic = open_writer(storage, NAME, 1)
    frame = encode_records([None], [b"v"], None, [1_000_000])
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            topic.append([(0, frame)], Author(new_token()), durable=True)
    topic.close()
    append_durably(LocalStorage(root))


def append_durably(storage: LocalStorage) -> None:
    topic = open_writer(storage, NAME, 1)
    frame = encode_records([None], [b"v"], None, [1_000_000])
    topic.append([(0, frame)], Author(new_token()), durable=True)
    topic.close()
