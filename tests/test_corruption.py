"""Damage: any changed bit, cut or missing file gives the right records or an error, never others.

One small log is built with everything a topic's directory can hold. Then its files are damaged one
at a time, in place, and read in every way there is. Three shapes of the log are damaged: as it was
written; without checkpoints and indexes, so that every commit is read from the journal itself; and
with its older records sealed and their journal files removed.
The ordinary run takes a sample of the bytes with a fixed seed; `torture` takes every byte.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import broker
from broker import ConsumerRecord, LogError, OffsetAndTimestamp, TopicPartition
from broker.batch import encode_records
from broker.commit import Author
from broker.config import CODECS
from broker.data_file import DataFile
from broker.ledger import new_token

TOPIC = "t"
TOPIC_DIRECTORY = f"topics/{TOPIC}/1"
SECONDS_PER_CASE = 20
SAMPLE = 320
WRITER_SAMPLE = 10
SEALED_SAMPLE = 40
SEED = 20260101

Records = dict[int, list[ConsumerRecord]]


@dataclass
class Seen:
    """All that a reader got, and what stopped it, if anything did."""

    records: Records = field(default_factory=dict)
    times: dict[tuple[int, int], OffsetAndTimestamp | None] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    error: LogError | None = None


@dataclass(frozen=True)
class Sample:
    """A built log, what is in it, and the offsets at which some commit left each partition."""

    root: Path
    expected: Records
    commit_ends: frozenset[tuple[int, ...]]

    def files(self, region: str) -> list[Path]:
        journals = sorted((self.root / TOPIC_DIRECTORY / "journal").iterdir())
        found = {
            "rolled": journals[:-1],
            "last": journals[-1:],
            "mark": [self.root / "_log.json"],
            "synced": [self.root / TOPIC_DIRECTORY / "synced"],
            "lock": sorted((self.root / "locks").iterdir()),
        }.get(region)
        if found is None:
            folder = self.root / TOPIC_DIRECTORY / region
            found = sorted(path for path in folder.rglob("*") if path.is_file())
        assert found
        return found


class Builder:
    """Writes a topic with all kinds of commits, and remembers what it sent."""

    def __init__(self, root: Path, *, is_new: bool = True) -> None:
        self.log = broker.open(root)
        if is_new:
            # No retention: the records' timestamps are of 1970, and a test may run long enough
            # for a writer's own maintenance to be due.
            self.log.create_topic(
                TOPIC,
                partitions=2,
                config={"segment.bytes": 2200, "checkpoint.commits": 5, "retention.ms": -1},
            )
        self.sent: dict[int, list[bytes | None]] = {0: [], 1: [], 2: []}
        self.commit_ends: set[tuple[int, ...]] = set()
        self._stamp = 1_000_000

    def send(self, codec: str, partition_count: int, records: int) -> None:
        """Commit some records to each partition, with keys, headers and nulls among them."""
        with self.log.producer(compression_type=codec, linger_ms=10_000) as producer:
            for number in range(records * partition_count):
                value = None if number == 3 else f"{codec} {self._stamp}".encode()
                producer.send(
                    TOPIC,
                    value,
                    key=None if number % 2 else b"key",
                    headers=[("h", b"1"), ("ü", None)] if number == 2 else None,
                    partition=number % partition_count,
                    timestamp_ms=self._next_stamp(),
                )
                self.sent[number % partition_count].append(value)
        self.note_commit()

    def send_by_reference(self, partition_count: int) -> None:
        """Commit frames that lie in a file of their own, as large transactions do."""
        topic = self.log._open_writer(TOPIC)
        data = DataFile(topic.storage, topic.directory)
        placed = []
        for partition in range(partition_count):
            values: list[bytes | None] = [b"elsewhere %d" % number for number in range(3)]
            stamps = [self._next_stamp() * 1000 for _ in values]
            frame = encode_records([None] * 3, values, None, stamps, "none")
            placed.append((partition, data.add(frame)))
            self.sent[partition] += values
        data.finish()
        topic.append(placed, Author(new_token()))
        topic.close()
        self.note_commit()

    def note_commit(self) -> None:
        described = self.log.describe_topic(TOPIC)
        self.commit_ends.add(tuple(part.end_offset for part in described.partitions))

    def _next_stamp(self) -> int:
        """Times go up by and large, with steps back, as producers' clocks do."""
        self._stamp += 700 if self._stamp % 3 else -500
        return self._stamp


def build(root: Path) -> Sample:
    made = Builder(root)
    for codec in CODECS:
        made.send(codec, partition_count=2, records=3)
        made.send(codec, partition_count=2, records=1)
    made.send_by_reference(partition_count=2)
    made.log.create_partitions(TOPIC, 3)
    made.log.delete_records({TopicPartition(TOPIC, 0): 4})
    made.log.alter_topic(TOPIC, {"message.timestamp.type": "LogAppendTime"})
    made.send("zstd", partition_count=3, records=2)
    made.log.alter_topic(TOPIC, {"message.timestamp.type": None})
    while len(list((root / TOPIC_DIRECTORY / "journal").iterdir())) < 6:
        made.send("lz4", partition_count=3, records=1)
    made.send("none", partition_count=3, records=2)
    made.send_by_reference(partition_count=3)
    made.send("gzip", partition_count=3, records=1)
    seen = read_everything(root)
    assert seen.error is None
    for partition, start in ((0, 4), (1, 0), (2, 0)):
        values = [record.value for record in seen.records[partition]]
        assert values == made.sent[partition][start:]
        assert [record.offset for record in seen.records[partition]] == list(
            range(start, start + len(values))
        )
    return Sample(root, seen.records, frozenset(made.commit_ends))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The log as it was written."""
    sample = build(tmp_path_factory.mktemp("whole") / "log")
    for region, at_least in (("rolled", 5), ("index", 5), ("checkpoint", 4), ("data", 2)):
        assert len(sample.files(region)) >= at_least
    names = [path.name for path in sample.files("checkpoint")]
    assert any(name.endswith(".soft.arrow") for name in names)
    assert any(not name.endswith(".soft.arrow") for name in names)
    return sample


@pytest.fixture(scope="module")
def bare(whole: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The same without what only saves time: all is read from the journal."""
    root = tmp_path_factory.mktemp("bare") / "log"
    shutil.copytree(whole.root, root)
    for name in ("checkpoint", "index"):
        shutil.rmtree(root / TOPIC_DIRECTORY / name)
    sample = Sample(root, whole.expected, whole.commit_ends)
    judge(read_everything(root), sample, may_be_short=False)
    return sample


@pytest.fixture(scope="module")
def sealed(whole: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The same with all but the last records in sealed files only."""
    root = tmp_path_factory.mktemp("sealed") / "log"
    shutil.copytree(whole.root, root)
    log = broker.open(root)
    log.alter_topic(TOPIC, {"retention.ms": -1, "file.delete.delay.ms": 0, "seal.bytes": 1})
    log.maintain(TOPIC, seal=True)
    made = Builder(root, is_new=False)
    made.send("none", partition_count=3, records=2)
    made.send("zstd", partition_count=3, records=1)
    seen = read_everything(root)
    assert seen.error is None and seen.ends in made.commit_ends
    for partition, records in whole.expected.items():
        assert seen.records[partition][: len(records)] == records
    sample = Sample(root, seen.records, whole.commit_ends | frozenset(made.commit_ends))
    assert len(sample.files("sealed")) >= 3
    assert sample.files("rolled")[0].name > f"{0:020d}.log"
    return sample


TIMES = (0, 1_000_000, 1_001_500, 1_004_000, 1_009_000, 1 << 45)


def read_everything(root: Path) -> Seen:
    """Describe the topic, read every partition from its start, and look up times."""
    seen = Seen()
    try:
        log = broker.open(root, create=False)
        described = log.describe_topic(TOPIC)
        seen.ends = tuple(part.end_offset for part in described.partitions)
        with log.consumer(auto_offset_reset="earliest") as consumer:
            places = [TopicPartition(TOPIC, part.partition) for part in described.partitions]
            consumer.assign(places)
            for place in places:
                seen.records[place.partition] = []
            while polled := consumer.poll(0):
                for place, records in polled.items():
                    seen.records[place.partition] += records
            for time in TIMES:
                for place in places:
                    found = consumer.offsets_for_times({place: time})[place]
                    seen.times[place.partition, time] = found
    except LogError as error:
        seen.error = error
    return seen


def judge(seen: Seen, sample: Sample, *, may_be_short: bool) -> None:
    """Hold what was seen against what is in the log."""
    for partition, records in seen.records.items():
        assert records == sample.expected[partition][: len(records)]
    if seen.ends:
        ends = (*seen.ends, 0, 0)[:3]
        full = tuple(
            records[-1].offset + 1 if records else 0 for records in sample.expected.values()
        )
        assert seen.ends == full or (
            may_be_short
            and ends in {(*known, 0, 0)[:3] for known in sample.commit_ends} | {(0,) * 3}
        )
    if seen.error is None:
        for partition, end in enumerate(seen.ends):
            records = seen.records[partition]
            assert (records[-1].offset + 1 if records else 0) == end or not records
            assert len(records) == len(
                [one for one in sample.expected[partition] if one.offset < end]
            )
    for (partition, time), found in seen.times.items():
        assert found == first_at(seen.records[partition], time)


def first_at(records: list[ConsumerRecord], time: int) -> OffsetAndTimestamp | None:
    for record in records:
        if record.timestamp >= time:
            return OffsetAndTimestamp(record.offset, record.timestamp)
    return None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail instead of hanging; the test's own timer goes on afterwards."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"a read took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def changed_bit(path: Path, position: int) -> Iterator[None]:
    """Turn one bit of one byte; a different one in each neighbour."""
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, position)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), position)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), bytes([byte]), position)


@contextmanager
def cut(path: Path, length: int) -> Iterator[None]:
    data = path.read_bytes()
    os.truncate(path, length)
    try:
        yield
    finally:
        path.write_bytes(data)


@contextmanager
def removed(path: Path) -> Iterator[None]:
    data = path.read_bytes()
    path.unlink()
    try:
        yield
    finally:
        path.write_bytes(data)


def positions(paths: list[Path], count: int | None) -> list[tuple[Path, int]]:
    """Return every byte of these files, or `count` of them, the same in every run."""
    every = [(path, at) for path in paths for at in range(path.stat().st_size)]
    if count is None or count >= len(every):
        return every
    return random.Random(SEED).sample(every, count)


def check_damage(
    sample: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    *,
    may_be_short: bool = False,
) -> None:
    for path, at in positions(sample.files(region), count):
        with damage(path, at), time_limit(SECONDS_PER_CASE):  # type: ignore[attr-defined]
            seen = read_everything(sample.root)
        try:
            judge(seen, sample, may_be_short=may_be_short)
        except AssertionError as error:
            error.add_note(f"{damage.__name__} at byte {at} of {path.name}")
            raise
    judge(read_everything(sample.root), sample, may_be_short=False)


amounts = pytest.mark.parametrize(
    "count",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(None, id="all", marks=[pytest.mark.torture, pytest.mark.timeout(3600)]),
    ],
)
all_regions = pytest.mark.parametrize(
    "region", ["rolled", "last", "index", "checkpoint", "data", "synced", "mark"]
)
journal_regions = pytest.mark.parametrize("region", ["rolled", "last"])


@amounts
@all_regions
def test_a_changed_bit_never_changes_the_records(
    whole: Sample, region: str, count: int | None
) -> None:
    check_damage(whole, region, changed_bit, count)


@amounts
@journal_regions
def test_a_changed_bit_in_a_journal_without_checkpoints_never_changes_the_records(
    bare: Sample, region: str, count: int | None
) -> None:
    check_damage(bare, region, changed_bit, count)


@amounts
@all_regions
def test_a_cut_file_shortens_the_log_only_if_it_is_the_last_of_the_journal(
    whole: Sample, region: str, count: int | None
) -> None:
    check_damage(whole, region, cut, count, may_be_short=region == "last")


@amounts
@journal_regions
def test_a_cut_journal_without_checkpoints_is_short_only_at_its_last_file(
    bare: Sample, region: str, count: int | None
) -> None:
    check_damage(bare, region, cut, count, may_be_short=region == "last")


def test_a_journal_cut_between_two_commits_of_a_rolled_file_is_an_error(bare: Sample) -> None:
    for path in bare.files("rolled"):
        starts = commit_starts(path)
        for position in starts:
            with cut(path, position):
                assert isinstance(read_everything(bare.root).error, broker.CorruptLog)


@all_regions
def test_a_missing_file_never_changes_the_records(whole: Sample, region: str) -> None:
    for path in whole.files(region):
        with removed(path), time_limit(SECONDS_PER_CASE):
            judge(read_everything(whole.root), whole, may_be_short=region == "last")


@journal_regions
def test_a_missing_file_of_a_journal_without_checkpoints_never_changes_the_records(
    bare: Sample, region: str
) -> None:
    for path in bare.files(region):
        with removed(path), time_limit(SECONDS_PER_CASE):
            judge(read_everything(bare.root), bare, may_be_short=region == "last")


def test_lost_indexes_checkpoints_and_locks_are_not_missed(whole: Sample) -> None:
    for region in ("index", "checkpoint", "synced", "lock"):
        for path in whole.files(region):
            with removed(path):
                assert read_everything(whole.root).error is None


sealed_regions = pytest.mark.parametrize("region", ["sealed", "checkpoint", "rolled", "last"])


@amounts
@sealed_regions
def test_a_changed_bit_in_a_sealed_and_trimmed_topic_never_changes_the_records(
    sealed: Sample, region: str, count: int | None
) -> None:
    check_damage(sealed, region, changed_bit, count and SEALED_SAMPLE)


@amounts
@sealed_regions
def test_a_cut_file_of_a_sealed_and_trimmed_topic_never_changes_the_records(
    sealed: Sample, region: str, count: int | None
) -> None:
    check_damage(sealed, region, cut, count and SEALED_SAMPLE, may_be_short=region == "last")


@sealed_regions
def test_a_missing_file_of_a_sealed_and_trimmed_topic_never_changes_the_records(
    sealed: Sample, region: str
) -> None:
    for path in sealed.files(region):
        with removed(path), time_limit(SECONDS_PER_CASE):
            seen = read_everything(sealed.root)
        judge(seen, sealed, may_be_short=region == "last")
        assert (seen.error is None) == (region in ("checkpoint", "last"))


def test_without_any_checkpoint_a_trimmed_topic_is_refused(sealed: Sample, tmp_path: Path) -> None:
    for damage in ("removed", "damaged"):
        root = tmp_path / damage
        shutil.copytree(sealed.root, root)
        for path in (root / TOPIC_DIRECTORY / "checkpoint").iterdir():
            path.write_bytes(path.read_bytes()[:-9])
            if damage == "removed":
                path.unlink()
        for error in (read_everything(root).error, write_one(root)):
            assert isinstance(error, broker.MissingFile)
            assert "no checkpoint can be read" in str(error)


def commit_starts(path: Path) -> list[int]:
    """Return where the commits of a journal file begin: their lengths are at byte 32 of each."""
    data, starts, position = path.read_bytes(), [], 0
    while position < len(data):
        starts.append(position)
        position += int.from_bytes(data[position + 32 : position + 36], "little")
    return starts


def write_one(root: Path) -> LogError | None:
    try:
        with broker.open(root, create=False).producer(delivery_timeout_ms=10_000) as producer:
            producer.send(TOPIC, b"new", partition=1, timestamp_ms=5_000_000).result(20)
    except LogError as error:
        return error
    return None


def check_writer(sample: Sample, root: Path, *, may_be_short: bool) -> None:
    """Write over damage; what readers saw before is what they see after it, and the new record."""
    before = read_everything(root)
    judge(before, sample, may_be_short=may_be_short)
    refused = write_one(root)
    after = read_everything(root)
    if refused is None and after.error is None:
        new = after.records[1].pop()
        assert (new.value, new.timestamp) == (b"new", 5_000_000)
        assert new.offset == after.ends[1] - 1
        expected = before.records if before.error is None else sample.expected
        assert after.records == expected
    elif after.error is None:
        judge(after, sample, may_be_short=may_be_short)
        assert before.error is not None or after.records == before.records
    else:
        assert before.error is not None or refused is not None
        for partition, records in after.records.items():
            whole = [one for one in records if one.value != b"new"]
            assert whole == sample.expected[partition][: len(whole)]


def check_writers(
    sample: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    tmp_path: Path,
) -> None:
    chosen = positions(sample.files(region), WRITER_SAMPLE if count else 40 * WRITER_SAMPLE)
    for number, (path, at) in enumerate(chosen):
        root = tmp_path / str(number)
        shutil.copytree(sample.root, root)
        copied = root / path.relative_to(sample.root)
        if damage is changed_bit:
            data = bytearray(copied.read_bytes())
            data[at] ^= 1 << at % 8
            copied.write_bytes(data)
        else:
            os.truncate(copied, at)
        with time_limit(2 * SECONDS_PER_CASE):
            try:
                check_writer(sample, root, may_be_short=(region, damage) == ("last", cut))
            except AssertionError as error:
                error.add_note(f"{damage.__name__} at byte {at} of {path.name}")
                raise
        shutil.rmtree(root)


damages = pytest.mark.parametrize("damage", [changed_bit, cut])


@amounts
@damages
@all_regions
def test_a_writer_over_damage_goes_on_rightly_or_refuses(
    whole: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    tmp_path: Path,
) -> None:
    check_writers(whole, region, damage, count, tmp_path)


@amounts
@damages
@journal_regions
def test_a_writer_over_a_damaged_journal_without_checkpoints_goes_on_rightly_or_refuses(
    bare: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    tmp_path: Path,
) -> None:
    check_writers(bare, region, damage, count, tmp_path)


@amounts
@damages
@sealed_regions
def test_a_writer_over_damage_in_a_sealed_and_trimmed_topic_goes_on_rightly_or_refuses(
    sealed: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    tmp_path: Path,
) -> None:
    check_writers(sealed, region, damage, count, tmp_path)


@amounts
@damages
@sealed_regions
def test_maintenance_over_damage_keeps_the_records_or_refuses(
    sealed: Sample,
    region: str,
    damage: Callable[[Path, int], object],
    count: int | None,
    tmp_path: Path,
) -> None:
    """Merging and sealing read what is there; what is damaged must not become something else."""
    chosen = positions(sealed.files(region), WRITER_SAMPLE if count else 40 * WRITER_SAMPLE)
    for number, (path, at) in enumerate(chosen):
        root = tmp_path / str(number)
        shutil.copytree(sealed.root, root)
        with damage(root / path.relative_to(sealed.root), at):  # type: ignore[attr-defined]
            before = read_everything(root)
            with time_limit(2 * SECONDS_PER_CASE):
                maintain(root)
            after = read_everything(root)
            may_be_short = (region, damage) == ("last", cut)
            judge(after, sealed, may_be_short=may_be_short)
            assert before.error is not None or after.records == before.records
        shutil.rmtree(root)


def maintain(root: Path) -> None:
    try:
        log = broker.open(root, create=False)
        log.alter_topic(TOPIC, {"seal.bytes": 1 << 20, "table.delete.delay.ms": 0})
        log.maintain(TOPIC, seal=True)
    except LogError:
        pass


@pytest.mark.parametrize("region", ["rolled", "last", "index", "checkpoint", "data", "synced"])
def test_a_writer_with_a_file_missing_goes_on_rightly_or_refuses(
    whole: Sample, region: str, tmp_path: Path
) -> None:
    for number, path in enumerate(whole.files(region)):
        root = tmp_path / str(number)
        shutil.copytree(whole.root, root)
        (root / path.relative_to(whole.root)).unlink()
        check_writer(whole, root, may_be_short=region == "last")


def test_a_writer_does_not_go_on_in_the_middle_of_a_cut_journal(
    bare: Sample, tmp_path: Path
) -> None:
    for number, path in enumerate(bare.files("rolled")):
        starts = commit_starts(path)
        root = tmp_path / str(number)
        shutil.copytree(bare.root, root)
        copied = root / path.relative_to(bare.root)
        os.truncate(copied, starts[-1])
        assert isinstance(write_one(root), broker.CorruptLog)
        assert copied.stat().st_size == starts[-1]


def test_an_error_of_damage_names_the_file_and_the_place(whole: Sample) -> None:
    path = whole.files("data")[0]
    with changed_bit(path, 60):
        error = read_everything(whole.root).error
    assert isinstance(error, broker.CorruptLog)
    assert error.path == str(path)
    assert str(path) in str(error)
