"""Verification: all damage is listed, nothing else is, and nothing is changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import broker
from broker import batch, checkpoint, commit, index
from broker.commit import Author, Kind
from broker.data_file import DataFile
from broker.ledger import new_token
from broker.maintenance import sealing
from broker.storage import LocalStorage
from broker.synced import Synced

JOURNAL = "topics/orders/1/journal"


@pytest.fixture
def rolled(log: broker.Log, root: Path) -> broker.Log:
    """A topic of several complete journal files with indexes and checkpoints, and an open one."""
    log.create_topic("orders", 2, config={"segment.bytes": 1500, "checkpoint.commits": 4})
    with log.producer() as producer:
        for number in range(24):
            key = b"key" if number % 3 else None
            headers = [("name", b"x")] if number % 5 == 0 else None
            producer.send("orders", b"value %d" % number, key, headers).result()
    return log


def journal_files(root: Path) -> list[Path]:
    return sorted((root / JOURNAL).iterdir())


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def damaged(report: broker.VerifyReport) -> set[str]:
    return {Path(damage.path).name for damage in report.damage}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


def pack(frames: list, *, number: int, position: int, kind: Kind = Kind.APPEND, **more) -> bytes:
    parts, _length, *_ = commit.pack(
        kind, Author(new_token()), incarnation=1, number=number, position=position,
        time=time.time_ns() // 1_000_000, frames=frames, **more,
    )  # fmt: skip
    return b"".join(bytes(part) for part in parts)


def append_raw(root: Path, make: Callable[[int, int], bytes]) -> None:
    """Write bytes behind the last commit of the topic, past everything that would refuse them."""
    state = broker.open(root)._open_reader("orders").state
    path = root / JOURNAL / f"{state.file_number:020d}.log"
    with path.open("ab") as file:
        file.write(make(state.number, state.position))


def frame_of(*values: bytes, stamp: int = 1_000) -> batch.Frame:
    return batch.encode_records([None] * len(values), list(values), None, [stamp] * len(values))


# A sound log.


def test_a_sound_topic_is_counted_and_found_sound(rolled: broker.Log, root: Path) -> None:
    report = rolled.verify("orders")
    described = rolled.describe_topic("orders")
    assert report.is_sound and report.damage == () and report.notes == ()
    assert report.record_count == 24
    assert report.frame_count == 24
    assert report.commit_count == described.commit_count
    assert report.byte_count == sum(path.stat().st_size for path in journal_files(root))
    assert len(journal_files(root)) > 3


def test_all_topics_are_verified_when_none_is_named(rolled: broker.Log) -> None:
    rolled.create_topic("others")
    report = rolled.verify()
    assert [topic.topic for topic in report.topics] == ["orders", "others"]
    assert report.is_sound


def test_every_sort_of_commit_is_found_sound(log: broker.Log) -> None:
    log.create_topic("orders", 2, config={"segment.bytes": 3000, "checkpoint.commits": 3})
    for codec in broker.config.CODECS:
        with log.producer(compression_type=codec, transactional_id="t") as producer:
            for _ in range(3):
                with producer.transaction():
                    for number in range(5):
                        producer.send("orders", b"%d" % number, partition=number % 2)
    log.create_partitions("orders", 3)
    log.alter_topic("orders", {"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        producer.send("orders", b"late", timestamp_ms=1, partition=2)
    log.delete_records({broker.TopicPartition("orders", 0): 4})
    report = log.verify("orders")
    assert report.damage == ()
    assert report.record_count == 5 * 3 * 5 + 1


def test_a_log_that_recovered_from_a_power_cut_is_sound(rolled: broker.Log, root: Path) -> None:
    after_boot = broker.Log(LocalStorage(str(root), boot_id="another boot"))
    with after_boot.producer() as producer:
        producer.send("orders", b"after")
    assert after_boot.verify("orders").damage == ()


def test_damage_that_a_power_cut_explains_is_listed_and_explained(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        producer.send("orders", b"not synced")
    (path,) = journal_files(root)
    flip(path, path.stat().st_size - 20)
    report = broker.Log(LocalStorage(str(root), boot_id="another boot")).verify("orders")
    assert damaged(report) == {path.name}
    assert "power cut" in report.notes[0]


def test_verifying_changes_no_file(rolled: broker.Log, root: Path) -> None:
    flip(journal_files(root)[0], 300)
    before = tree(root)
    assert not broker.open(root, create=False).verify().is_sound
    assert tree(root) == before


def test_a_topic_that_is_unknown_deleted_or_misnamed_is_refused(log: broker.Log) -> None:
    with pytest.raises(broker.UnknownTopic):
        log.verify("orders")
    log.create_topic("orders")
    log.delete_topic("orders")
    with pytest.raises(broker.UnknownTopic):
        log.verify("orders")
    with pytest.raises(broker.InvalidTopicName):
        log.verify("a/b")
    assert log.verify().topics == ()


def test_a_topic_whose_delete_was_committed_is_left_out(log: broker.Log) -> None:
    log.create_topic("orders")
    writer = log._open_writer("orders")
    writer._change(Kind.DELETE, lambda state: {})
    writer.close()
    assert log.verify().topics == ()


# Damage in the journal.


def test_a_changed_bit_is_found_wherever_it_is(rolled: broker.Log, root: Path) -> None:
    path = journal_files(root)[1]
    whole = path.read_bytes()
    for position in range(0, len(whole), 5):
        flip(path, position)
        assert path.name in damaged(rolled.verify("orders")), f"byte {position}"
        path.write_bytes(whole)
    assert rolled.verify("orders").is_sound


@pytest.mark.parametrize("back", [1, 60, 130, 200, 500])
def test_a_changed_bit_in_the_growing_file_is_found(log: broker.Log, root: Path, back: int) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        for _ in range(3):
            producer.send("orders", b"x" * 80).result()
    (path,) = journal_files(root)
    flip(path, path.stat().st_size - back)
    assert damaged(log.verify("orders")) == {path.name}


def test_damage_in_several_places_is_listed_place_by_place(rolled: broker.Log, root: Path) -> None:
    first, second, third = journal_files(root)[:3]
    flip(first, 4)  # a header
    flip(first, first.stat().st_size - 150)  # the last frame, behind it
    flip(second, commit.HEADER.size + 2)  # a table
    flip(third, commit.HEADER.size + commit.ROW.size + 50)  # a frame
    found = [(Path(one.path).name, one.what) for one in rolled.verify("orders").damage]
    assert [name for name, _ in found] == [first.name, first.name, second.name, third.name]
    assert "header" in found[0][1]
    assert "table" in found[2][1]
    assert "frame" in found[3][1]


def test_damage_names_the_byte_where_the_commit_or_frame_begins(
    rolled: broker.Log, root: Path
) -> None:
    path = journal_files(root)[2]
    start = commit.HEADER.size + commit.ROW.size
    flip(path, start + 60)
    (damage,) = rolled.verify("orders").damage
    assert (damage.path, damage.position) == (str(path), start)
    assert str(damage) == f"{path} at byte {start}: a frame's checksum does not match"


def test_records_after_damage_are_still_counted(rolled: broker.Log, root: Path) -> None:
    flip(journal_files(root)[0], 4)
    report = rolled.verify("orders")
    # The damaged commit made the topic; all of the records lie behind it.
    assert report.record_count == 24
    assert len(report.damage) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_missing_journal_file_is_found_and_the_next_is_read(
    rolled: broker.Log, root: Path, place: int
) -> None:
    path = journal_files(root)[place]
    path.unlink()
    report = rolled.verify("orders")
    assert [(one.path, one.what) for one in report.damage] == [(str(path), "the file is missing")]
    assert 12 < report.record_count < 24


def test_a_topic_without_any_journal_file_is_found(rolled: broker.Log, root: Path) -> None:
    shutil.rmtree(root / JOURNAL)
    report = rolled.verify()
    assert f"{0:020d}.log" in damaged(report)
    assert not rolled.verify("orders").is_sound


def test_a_complete_file_cut_short_is_found(rolled: broker.Log, root: Path) -> None:
    path = journal_files(root)[1]
    for length in (path.stat().st_size - 96, path.stat().st_size - 120, 0):
        path.write_bytes(path.read_bytes()[:length])
        assert path.name in damaged(rolled.verify("orders"))


def test_a_file_of_another_topic_is_not_believed(rolled: broker.Log, root: Path) -> None:
    rolled.delete_topic("orders")
    rolled.create_topic("orders", 2)
    path = root / "topics/orders/2/journal" / f"{0:020d}.log"
    good = path.read_bytes()
    rolled.create_topic("others", 2)
    path.write_bytes((root / "topics/others/1/journal" / f"{0:020d}.log").read_bytes())
    (damage,) = rolled.verify("orders").damage
    assert "incarnation 2 is expected here" in damage.what
    path.write_bytes(good)


def test_bytes_after_an_end_of_file_commit_are_found(rolled: broker.Log, root: Path) -> None:
    path = journal_files(root)[1]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more")
    (damage,) = rolled.verify("orders").damage
    assert (damage.path, damage.position) == (str(path), size)
    assert "4 bytes follow" in damage.what


def test_what_a_killed_writer_left_is_a_note_and_no_damage(rolled: broker.Log, root: Path) -> None:
    for length in (1, 50, 100, 160, 250):
        whole = journal_files(root)[-1].read_bytes()
        append_raw(
            root,
            lambda number, position, length=length: pack(
                [(0, 0, frame_of(b"x" * 200))], number=number, position=position
            )[:length],
        )
        report = rolled.verify("orders")
        assert report.is_sound
        assert f"{length} bytes of an unfinished commit" in report.notes[0]
        journal_files(root)[-1].write_bytes(whole)


def test_a_cut_tail_kept_aside_is_a_note(rolled: broker.Log, root: Path) -> None:
    with journal_files(root)[-1].open("ab") as file:
        file.write(b"SLC1 and no more")
    with rolled.producer() as producer:
        producer.send("orders", b"next")
    report = rolled.verify("orders")
    assert report.is_sound
    assert report.notes == ("orders: aside/ keeps 1 pieces that were cut off the journal's end",)


def test_offsets_that_do_not_follow_are_found(rolled: broker.Log, root: Path) -> None:
    append_raw(
        root,
        lambda number, position: pack([(0, 999, frame_of(b"x"))], number=number, position=position),
    )
    (damage,) = rolled.verify("orders").damage
    assert "partition 0 goes on at offset 999 instead of" in damage.what


def test_a_partition_that_the_topic_does_not_have_is_found(rolled: broker.Log, root: Path) -> None:
    append_raw(
        root,
        lambda number, position: pack([(7, 0, frame_of(b"x"))], number=number, position=position),
    )
    (damage,) = rolled.verify("orders").damage
    assert "names partition 7 of 2" in damage.what


def test_time_bounds_that_are_not_those_of_the_records_are_found(
    rolled: broker.Log, root: Path
) -> None:
    end = rolled.describe_topic("orders").partitions[0].end_offset
    frame = frame_of(b"x", stamp=5_000)
    lying = frame._replace(min_timestamp=1)
    append_raw(
        root,
        lambda number, position: pack([(0, end, lying)], number=number, position=position),
    )
    (damage,) = rolled.verify("orders").damage
    assert "other time bounds" in damage.what


def test_a_commit_that_is_there_twice_is_found(rolled: broker.Log, root: Path) -> None:
    with rolled.producer() as producer:
        producer.send("orders", b"once", partition=0).result()
    state = rolled._open_reader("orders").state
    producer_id, last = next(reversed(state.producers.items()))
    author = Author(last.token, producer_id, last.sequence, last.epoch)

    def again(number: int, position: int) -> bytes:
        parts, *_ = commit.pack(
            Kind.APPEND, author, incarnation=1, number=number, position=position,
            time=state.time, frames=[(0, state.ends[0], frame_of(b"once"))],
        )  # fmt: skip
        return b"".join(bytes(part) for part in parts)

    append_raw(root, again)
    (damage,) = rolled.verify("orders").damage
    assert "repeats a commit" in damage.what


# Frames in files of their own.


@pytest.fixture
def referring(log: broker.Log, storage: LocalStorage) -> Iterator[Path]:
    """A topic with one commit that names frames in a file under `data/`; yields that file."""
    log.create_topic("orders")
    topic = log._open_writer("orders")
    data_file = DataFile(storage, topic.directory)
    places = [(0, data_file.add(frame_of(b"far %d" % number))) for number in range(3)]
    data_file.finish()
    topic.append(places, Author(new_token()))
    topic.close()
    yield Path(storage.root, topic.directory, "data", places[0][1].file)


def test_frames_by_reference_are_read(log: broker.Log, referring: Path) -> None:
    report = log.verify("orders")
    assert report.is_sound
    assert (report.frame_count, report.record_count) == (3, 3)


def test_every_changed_byte_of_a_data_file_is_found(log: broker.Log, referring: Path) -> None:
    whole = referring.read_bytes()
    for position in range(0, len(whole), 41):
        flip(referring, position)
        assert damaged(log.verify("orders")) == {referring.name}
        referring.write_bytes(whole)


def test_each_frame_of_a_missing_or_short_data_file_is_listed(
    log: broker.Log, referring: Path
) -> None:
    whole = referring.read_bytes()
    referring.write_bytes(whole[: len(whole) // 2])
    assert len(log.verify("orders").damage) == 2
    referring.unlink()
    damage = log.verify("orders").damage
    assert len(damage) == 3
    assert damage[0].path == str(referring)
    assert "the file is missing" in damage[0].what


def test_a_data_file_that_no_commit_names_is_a_note(log: broker.Log, referring: Path) -> None:
    (referring.parent / "unnamed.frames").write_bytes(b"in the making")
    report = log.verify("orders")
    assert report.is_sound
    assert "1 files that no commit names" in report.notes[0]


# Files beside the journal.


def test_a_damaged_index_is_found_and_a_missing_one_noted(rolled: broker.Log, root: Path) -> None:
    first, second = sorted((root / "topics/orders/1/index").iterdir())[:2]
    flip(first, 50)
    second.unlink()
    report = rolled.verify("orders")
    assert [damage.path for damage in report.damage] == [str(first)]
    assert any(f"index/{second.name} is not there" in note for note in report.notes)


def test_an_index_that_says_otherwise_is_found(rolled: broker.Log, root: Path) -> None:
    first, second = sorted((root / "topics/orders/1/index").iterdir())[:2]
    first.write_bytes(second.read_bytes())
    (damage,) = rolled.verify("orders").damage
    assert (damage.path, damage.what) == (str(first), "the journal file holds other frames")


def test_an_index_of_a_file_that_still_grows_is_found(rolled: broker.Log, root: Path) -> None:
    path = root / "topics/orders/1/index" / journal_files(root)[-1].with_suffix(".arrow").name
    path.write_bytes(index.FileIndex(index.np.zeros(0, commit.ROW_TYPE), {}).encode())
    (damage,) = rolled.verify("orders").damage
    assert damage.path == str(path)


def test_a_damaged_checkpoint_is_found(rolled: broker.Log, root: Path) -> None:
    paths = list((root / "topics/orders/1/checkpoint").iterdir())
    assert {path.name.count(".") for path in paths} == {1, 2}
    for path in paths:
        flip(path, 100)
    assert damaged(rolled.verify("orders")) == {path.name for path in paths}


@pytest.mark.parametrize("field", ["ends", "producers", "time", "files"])
def test_a_checkpoint_that_says_otherwise_is_found(
    rolled: broker.Log, root: Path, field: str
) -> None:
    path = min((root / "topics/orders/1/checkpoint").glob("?" * 20 + ".arrow"))
    state, boot_id = checkpoint.decode(path.read_bytes(), str(path))
    changed = {"ends": [0, 1], "producers": {}, "time": 1, "files": []}[field]
    setattr(state, field, changed)
    path.write_bytes(checkpoint.encode(state, boot_id))
    (damage,) = rolled.verify("orders").damage
    assert (damage.path, damage.what) == (str(path), f"the journal says otherwise: {field}")


def test_a_checkpoint_beyond_the_journal_is_found(rolled: broker.Log, root: Path) -> None:
    path = max((root / "topics/orders/1/checkpoint").glob("?" * 20 + ".arrow"))
    state, _ = checkpoint.decode(path.read_bytes(), str(path))
    state.number = 5000
    beyond = path.with_name(f"{5000:020d}.arrow")
    beyond.write_bytes(checkpoint.encode(state, ""))
    (damage,) = rolled.verify("orders").damage
    assert damage.path == str(beyond)
    assert "5000 commits" in damage.what


def test_a_checkpoint_under_another_number_is_found(rolled: broker.Log, root: Path) -> None:
    path = max((root / "topics/orders/1/checkpoint").glob("?" * 20 + ".arrow"))
    path.rename(path.with_name(f"{3:020d}.arrow"))
    (damage,) = rolled.verify("orders").damage
    assert "another checkpoint than its name says" in damage.what


def test_a_hint_that_is_damaged_or_missing_is_found(rolled: broker.Log, root: Path) -> None:
    path = root / "topics/orders/1/synced"
    flip(path, 12)
    assert damaged(rolled.verify("orders")) == {"synced"}
    path.unlink()
    assert damaged(rolled.verify("orders")) == {"synced"}


def test_synced_commits_that_are_gone_are_found(
    rolled: broker.Log, root: Path, storage: LocalStorage
) -> None:
    path = journal_files(root)[-1]
    position = path.stat().st_size
    Synced(int(path.name[:20]), position + 8, storage.boot_id).write(storage, "topics/orders/1")
    (damage,) = rolled.verify("orders").damage
    assert (damage.path, damage.position) == (str(path), position)
    path.unlink()
    assert path.name in damaged(rolled.verify("orders"))


def test_a_damaged_mark_of_the_log_is_found(log: broker.Log, root: Path) -> None:
    mark = root / "_log.json"
    for wrong in ("", "{}", '{"format": 1, "cluster_id": "another"}', '{"format": 9}'):
        mark.write_text(wrong)
        assert damaged(log.verify()) == {"_log.json"}


# Beside writers.

WRITER = """
import sys, broker
log = broker.open(sys.argv[1])
with log.producer() as producer:
    print("ready", flush=True)
    for number in range(10**9):
        producer.send("orders", b"x" * (number * 37 % 3000)).result()
"""


def test_a_log_that_others_write_is_sound_at_any_moment(log: broker.Log, root: Path) -> None:
    log.create_topic("orders", 2, config={"segment.bytes": 100_000, "checkpoint.commits": 10})
    command = [sys.executable, "-c", WRITER, str(root)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        reports = []
        end = time.monotonic() + 3
        while time.monotonic() < end:
            reports.append(log.verify("orders"))
            assert reports[-1].damage == ()
        assert reports[-1].record_count > reports[0].record_count > 0
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    report = log.verify("orders")
    assert report.damage == ()
    assert report.record_count == log.describe_topic("orders").record_count


# Sealed files, and a journal whose first files are gone.

SEALED = "topics/orders/1/sealed"


def fill(log: broker.Log, count: int, first: int = 0) -> None:
    with log.producer() as producer:
        for number in range(first, first + count):
            producer.send(
                "orders", b"value %d" % number, b"key %d" % (number % 7), timestamp_ms=1000 + number
            )
            if number % 5 == 4:
                producer.flush()


@pytest.fixture
def sealed(log: broker.Log) -> broker.Log:
    """A topic with sealed files, a journal that was trimmed, and records that are not sealed."""
    config = {"segment.bytes": 1500, "checkpoint.commits": 4, "retention.ms": -1}
    log.create_topic("orders", 2, config=config | {"file.delete.delay.ms": 0})
    for first in (0, 40):
        fill(log, 40, first)
        log.maintain("orders", seal=True)
    log.delete_records({broker.TopicPartition("orders", 0): 3})
    fill(log, 20, 80)
    return log


def sealed_files(root: Path) -> list[Path]:
    return sorted((root / SEALED).rglob("*.parquet"))


def test_a_trimmed_topic_is_sound(sealed: broker.Log, root: Path) -> None:
    assert int(journal_files(root)[0].name[:20]) > 0
    report = sealed.verify("orders")
    assert report.damage == ()
    assert report.sealed_file_count == len(sealed_files(root)) == 4
    assert report.sealed_record_count == 80
    assert report.record_count >= 20
    (note,) = report.notes
    assert "sealed or removed" in note


def test_a_compacted_topic_is_sound(sealed: broker.Log) -> None:
    sealed.alter_topic("orders", {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0})
    sealed.maintain("orders", seal=True)
    report = sealed.verify("orders")
    assert report.damage == ()
    assert report.sealed_record_count == 7


def test_a_topic_after_any_maintenance_is_sound(sealed: broker.Log) -> None:
    for first in range(100, 300, 10):
        fill(sealed, 10, first)
        sealed.maintain("orders", seal=first % 20 == 0)
        assert sealed.verify("orders").damage == ()


def test_a_trimmed_topic_of_another_boot_is_sound(sealed: broker.Log, root: Path) -> None:
    after = broker.Log(LocalStorage(str(root), boot_id="another boot"))
    assert after.verify("orders").damage == ()
    fill(after, 10, 100)
    assert after.verify("orders").damage == ()


def test_a_lost_first_file_of_a_trimmed_journal_is_found(sealed: broker.Log, root: Path) -> None:
    sealed.maintain("orders", seal=True)
    fill(sealed, 40, 100)
    first = journal_files(root)[0]
    first.unlink()
    damage = sealed.verify("orders").damage
    assert [(one.path, one.what) for one in damage] == [(str(first), "the file is missing")]


def test_files_that_a_killed_cleaner_left_are_no_damage(
    log: broker.Log, root: Path, tmp_path: Path
) -> None:
    """In any order, since removals are not synced; and their data files may be gone before."""
    config = {"segment.bytes": 1500, "retention.ms": -1, "file.delete.delay.ms": 0}
    log.create_topic("orders", 2, config=config)
    fill(log, 60)
    before = tmp_path / "before"
    shutil.copytree(root / JOURNAL, before)
    log.maintain("orders", seal=True)
    kept = {path.name for path in journal_files(root)}
    left = sorted(path for path in before.iterdir() if path.name not in kept)
    assert len(left) > 3
    for choice in (left, left[1:], left[::2], left[:1]):
        for path in choice:
            shutil.copy(path, root / JOURNAL / path.name)
        assert log.verify("orders").damage == ()
        flip(root / JOURNAL / choice[0].name, 300)
        assert log.verify("orders").damage == (), "nobody reads it any more"
        for path in choice:
            (root / JOURNAL / path.name).unlink()


def test_lost_checkpoints_of_a_trimmed_topic_are_found(sealed: broker.Log, root: Path) -> None:
    paths = list((root / "topics/orders/1/checkpoint").iterdir())
    for path in paths:
        flip(path, 100)
    report = sealed.verify("orders")
    assert damaged(report) == {path.name for path in paths} | {"checkpoint"}
    with pytest.raises(broker.CorruptLog, match="checkpoint"):
        sealed.describe_topic("orders")
    for path in paths:
        path.unlink()
    assert damaged(sealed.verify("orders")) == {"checkpoint"}
    with pytest.raises(broker.CorruptLog, match="checkpoint"):
        sealed.describe_topic("orders")


def test_one_lost_checkpoint_of_a_trimmed_topic_is_not_missed(
    sealed: broker.Log, root: Path
) -> None:
    before = sealed.describe_topic("orders")
    for path in sorted((root / "topics/orders/1/checkpoint").iterdir()):
        data = path.read_bytes()
        path.unlink()
        assert sealed.verify("orders").damage == ()
        assert sealed.describe_topic("orders") == before
        path.write_bytes(data)


def test_every_changed_byte_of_a_sealed_file_is_found(sealed: broker.Log, root: Path) -> None:
    path = sealed_files(root)[1]
    whole = path.read_bytes()
    for position in range(0, len(whole), 13):
        flip(path, position)
        assert damaged(sealed.verify("orders")) == {path.name}, position
        path.write_bytes(whole)
    assert sealed.verify("orders").is_sound


def test_a_short_or_missing_sealed_file_is_found(sealed: broker.Log, root: Path) -> None:
    path = sealed_files(root)[1]
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 0):
        path.write_bytes(whole[:length])
        (damage,) = sealed.verify("orders").damage
        assert damage.path == str(path) and f"has {length} bytes instead of" in damage.what
    path.unlink()
    (damage,) = sealed.verify("orders").damage
    assert damage.path == str(path) and "offsets" in damage.what


def test_a_sealed_file_that_no_commit_names_is_a_note(sealed: broker.Log, root: Path) -> None:
    path = sealed_files(root)[0]
    shutil.copy(path, path.with_name("unnamed.parquet"))
    report = sealed.verify("orders")
    assert report.damage == ()
    assert any("1 files that no commit names" in note for note in report.notes)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"start": 1}, "offsets"),
        ({"end": 5}, "offsets"),
        ({"record_count": 3}, "records instead of 3"),
        ({"min_timestamp": 1}, "times"),
        ({"max_timestamp": 1 << 50}, "times"),
        ({"crc": 1}, "checksum"),
        ({"footer_crc": 1}, "footer"),
    ],
)
def test_a_seal_that_says_otherwise_than_its_file_is_found(
    log: broker.Log, root: Path, change: dict[str, int], what: str
) -> None:
    log.create_topic("orders", 1, config={"retention.ms": -1})
    fill(log, 20)
    writer = log._open_writer("orders")
    writer.end_file()
    reader = log.reader("orders")
    (unit,) = sealing.plan(reader.refresh(), 0, is_forced=True)
    (file,) = sealing.write(reader, unit)
    reader.close()
    writer.close()
    wrong = list(file._replace(**change))
    append_raw(
        root,
        lambda number, position: pack(
            [], number=number, position=position, kind=Kind.SEAL, details={"added": [wrong]}
        ),
    )
    damage = log.verify("orders").damage
    assert any(what in one.what for one in damage), damage


MAINTAINER = """
import sys, broker
log = broker.open(sys.argv[1])
print("ready", flush=True)
while True:
    log.maintain("orders", seal=True)
"""


def test_a_log_that_others_write_and_maintain_is_sound_at_any_moment(
    log: broker.Log, root: Path
) -> None:
    config = {"segment.bytes": 30_000, "checkpoint.commits": 10, "table.delete.delay.ms": 0}
    log.create_topic("orders", 2, config=config | {"file.delete.delay.ms": 0, "retention.ms": -1})
    commands = [[sys.executable, "-c", code, str(root)] for code in (WRITER, MAINTAINER)]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert log.verify("orders").damage == ()
    finally:
        for other in others:
            other.kill()
            other.communicate()
    report = log.verify("orders")
    assert report.damage == ()
    assert report.sealed_record_count > 0
