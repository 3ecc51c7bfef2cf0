"""Verification of consumer groups: all damage is listed once, and nothing else is."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import InlineExecutor

import broker
from broker import TopicPartition, commit
from broker.cli import app
from broker.commit import Author, Kind
from broker.group import Position, checkpoint, group
from broker.group.group import Group
from broker.group.lease import Lease
from broker.group.state import KnownTopic, Member
from broker.ledger import new_token
from broker.storage import LocalStorage
from broker.synced import Synced

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)
JOURNAL = "groups/billing/1/journal"
CHECKPOINTS = "groups/billing/1/checkpoint"


def open_group(storage: LocalStorage) -> Group:
    opened = Group(storage, "billing", 1, write=True)
    opened._finisher = InlineExecutor()  # type: ignore[assignment]
    return opened


def member(name: str, instance: str | None = None) -> Member:
    return Member(name, "client", "host", instance, ("orders",), None, ("sticky",), 10_000)


def assign(opened: Group, members: dict[str, dict[str, list[int]]]) -> None:
    opened.assign(lambda state: ({"orders": KnownTopic(1, 2)}, members))


def commit_position(opened: Group, place: TopicPartition, offset: int, *, by: str) -> None:
    position = Position(offset, 1, 0, metadata=f"up to {offset}")
    generation = opened.state.generation
    opened.commit_positions({place: position}, member_id=by, generation=generation)


@pytest.fixture
def log(root: Path) -> broker.Log:
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    return log


@pytest.fixture
def busy(log: broker.Log, storage: LocalStorage) -> broker.Log:
    """A group that every sort of commit was made in, in one journal file, with two members."""
    log.publish_positions("billing", {FIRST: 1, SECOND: 2})
    log.alter_group("billing", {"offsets.retention.minutes": 60})
    opened = open_group(storage)
    opened.forget([SECOND])
    opened.join(member("a"))
    assign(opened, {"a": {"orders": [0, 1]}})
    commit_position(opened, FIRST, 3, by="a")
    opened.join(member("b", "static"))
    assign(opened, {"a": {"orders": [0]}, "b": {"orders": [1]}})
    opened.release("a", [SECOND])
    commit_position(opened, SECOND, 4, by="b")
    opened.join(member("c", "static"))
    commit_position(opened, SECOND, 5, by="c")
    opened.join(member("d"))
    opened.leave("d")
    opened.join(member("e"))
    opened.evict(["e"], by="a", is_dead=lambda _: True)
    for name in "ac":
        Lease(storage, opened.directory, name).renew()
    opened.close()
    return log


@pytest.fixture
def rolled(busy: broker.Log, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> broker.Log:
    """The same, much later: its first journal files were removed, and checkpoints cover them."""
    monkeypatch.setattr(group, "_FILE_BYTES_MAX", 2000)
    monkeypatch.setattr(group, "_CHECKPOINT_COMMITS", 7)
    opened = open_group(storage)
    for offset in range(30):
        commit_position(opened, FIRST, offset, by="a")
    opened.close()
    return busy


def files(root: Path, folder: str = JOURNAL) -> list[Path]:
    return sorted((root / folder).iterdir())


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def append_raw(root: Path, kind: Kind, details: dict[str, Any], **more: Any) -> None:
    """Write a commit behind the group's last, past everything that would refuse it."""
    opened = Group(LocalStorage(str(root)), "billing", 1)
    state = opened.state
    opened.close()
    parts, *_ = commit.pack(
        kind, Author(new_token()), incarnation=1, number=state.number, position=state.position,
        time=state.time, details=details, **more,
    )  # fmt: skip
    with (root / JOURNAL / f"{state.file_number:020d}.log").open("ab") as file:
        file.write(b"".join(bytes(part) for part in parts))


def only(report: broker.VerifyReport) -> broker.Damage:
    (damage,) = report.damage
    return damage


# A sound group.


def test_every_sort_of_commit_is_found_sound(busy: broker.Log, root: Path) -> None:
    report = busy.verify(group="billing")
    assert (report.damage, report.notes, report.topics) == ((), (), ())
    (found,) = report.groups
    assert (found.group, found.member_count, found.position_count) == ("billing", 2, 2)
    assert found.byte_count == files(root)[0].stat().st_size
    assert found.commit_count == 17


def test_a_group_whose_first_files_are_gone_is_sound(rolled: broker.Log, root: Path) -> None:
    assert files(root)[0].name > f"{0:020d}.log"
    report = rolled.verify()
    assert (report.damage, report.notes) == ((), ())
    assert [one.topic for one in report.topics] == ["orders"]
    assert [(one.group, one.position_count) for one in report.groups] == [("billing", 2)]


def test_a_group_that_recovered_from_a_power_cut_is_sound(rolled: broker.Log, root: Path) -> None:
    after = broker.Log(LocalStorage(str(root), boot_id="another boot"))
    opened = after._groups.open("billing", write=True)
    opened.leave("a")
    assert opened.state.epoch == 1
    opened.close()
    assert after.verify(group="billing").damage == ()


def test_a_group_is_verified_while_others_commit(
    busy: broker.Log, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_FILE_BYTES_MAX", 4000)
    monkeypatch.setattr(group, "_CHECKPOINT_COMMITS", 5)
    stop = threading.Event()

    def write() -> None:
        opened = Group(storage, "billing", 1, write=True)
        offset = 0
        while not stop.is_set():
            commit_position(opened, FIRST, offset, by="a")
            offset += 1
        opened.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            assert busy.verify(group="billing").damage == ()
    finally:
        stop.set()
        writer.join()


def test_a_group_that_is_unknown_or_deleted_is_refused(busy: broker.Log) -> None:
    with pytest.raises(broker.UnknownGroup, match="'nobody'"):
        busy.verify(group="nobody")
    busy.publish_positions("gone", {})
    busy.delete_group("gone")
    with pytest.raises(broker.UnknownGroup):
        busy.verify(group="gone")
    assert [one.group for one in busy.verify().groups] == ["billing"]


# Damage in the journal.


def test_a_changed_bit_is_one_finding_wherever_it_is(rolled: broker.Log, root: Path) -> None:
    path = files(root)[-2]
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flip(path, position)
        damage = only(rolled.verify(group="billing"))
        assert damage.path == str(path) and damage.position <= position, f"byte {position}"
        path.write_bytes(whole)
    assert rolled.verify().is_sound


def test_a_changed_bit_in_the_growing_file_is_one_finding(busy: broker.Log, root: Path) -> None:
    (path,) = files(root)
    whole = path.read_bytes()
    for position in range(0, len(whole), 181):  # Each is looked at for a while.
        flip(path, position)
        damage = only(busy.verify(group="billing"))
        assert damage.path == str(path) and damage.position <= position, f"byte {position}"
        path.write_bytes(whole)
    assert busy.verify().is_sound


def test_damage_in_two_commits_is_two_findings_at_their_places(
    busy: broker.Log, root: Path
) -> None:
    (path,) = files(root)
    data = path.read_bytes()
    starts = [at for at in range(0, len(data), 8) if data[at : at + 4] == commit.MAGIC]
    flip(path, starts[3] + 5)  # a header
    flip(path, starts[8] + commit.HEADER.size + 1)  # details
    found = busy.verify(group="billing").damage
    assert [one.position for one in found] == [starts[3], starts[8]]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_torn_tail_is_told_apart_from_a_file_cut_short(
    rolled: broker.Log, root: Path, is_last: bool
) -> None:
    path = files(root)[-1 if is_last else -2]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    report = rolled.verify(group="billing")
    if is_last:
        assert report.damage == ()
        assert "bytes of an unfinished commit" in report.notes[0]
    else:
        assert only(report).what == "the file ends inside a commit"


def test_commits_that_were_synced_and_are_gone_are_damage(rolled: broker.Log, root: Path) -> None:
    opened = Group(LocalStorage(str(root)), "billing", 1, write=True)
    opened.sync()
    opened.close()
    path = files(root)[-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    assert "commits are missing: `synced` says" in rolled.verify(group="billing").damage[0].what


def test_a_missing_journal_file_is_found(rolled: broker.Log, root: Path) -> None:
    path = files(root)[-2]
    path.unlink()
    damage = only(rolled.verify(group="billing"))
    assert (damage.path, damage.what) == (str(path), "the file is missing")


def test_a_group_without_any_journal_file_is_found(rolled: broker.Log, root: Path) -> None:
    shutil.rmtree(root / JOURNAL)
    assert rolled.groups() == ["billing"], "its checkpoints say that it was there"
    with pytest.raises(broker.CorruptLog, match="the file is missing"):
        rolled.describe_group("billing")
    report = rolled.verify()
    assert [one.group for one in report.groups] == ["billing"]
    assert not report.is_sound


def test_the_journal_of_another_group_is_not_believed(busy: broker.Log, root: Path) -> None:
    busy.publish_positions("other", {})
    shutil.copy(root / "groups/other/1/journal" / f"{0:020d}.log", files(root)[0])
    assert "commit 0 makes group 'other'" in only(busy.verify(group="billing")).what


@pytest.mark.parametrize(
    ("kind", "details", "what"),
    [
        (Kind.JOIN, member("a").details(), "lets a join, which is a member"),
        (Kind.JOIN, {**member("x", "y").details(), "replaces": "a"}, "replaces a, which is no"),
        (Kind.LEAVE, {"member": "x"}, "names x, which is no member"),
        (Kind.EVICT, {"members": ["a", "x"]}, "names x, which is no member"),
        (
            Kind.RELEASE,
            {"member": "a", "partitions": {"orders": [1]}},
            "is of a, which does not own orders-1",
        ),
        (
            Kind.ASSIGN,
            {"generation": 9, "topics": {}, "members": {}},
            "begins generation 9 after 2",
        ),
        (
            Kind.POSITION,
            {"positions": {"orders": [1, 0, {"0": 1}]}},
            "has positions from outside while the group has 2 members",
        ),
        (
            Kind.POSITION,
            {"member": "a", "generation": 2, "positions": {"orders": [1, 0, {"1": 1}]}},
            "is of a, which does not own orders-1",
        ),
        (
            Kind.POSITION,
            {"member": "c", "generation": 1, "positions": {"orders": [1, 0, {"1": 1}]}},
            "is of c, which does not own orders-1",
        ),
        (Kind.FORGET, {"positions": {}}, "has positions removed while the group has 2 members"),
        (Kind.RECOVER, {"epoch": 5}, "begins epoch 5 after 0"),
        (Kind.RELEASE, {"member": "a"}, "cannot be applied: KeyError('partitions')"),
        (Kind.TRUNCATE, {"starts": {}}, "a group has no TRUNCATE commit"),
    ],
)
def test_a_commit_that_nobody_could_make_is_found(
    busy: broker.Log, root: Path, kind: Kind, details: dict[str, Any], what: str
) -> None:
    append_raw(root, kind, details)
    damage = only(busy.verify(group="billing"))
    assert what in damage.what and "commit 17" in damage.what


# Files beside the journal.


def test_every_changed_byte_of_a_checkpoint_is_one_finding(rolled: broker.Log, root: Path) -> None:
    for path in files(root, CHECKPOINTS):
        whole = path.read_bytes()
        for position in range(0, len(whole), 397):
            flip(path, position)
            assert only(rolled.verify(group="billing")).path == str(path)
            path.write_bytes(whole)
    assert rolled.verify(group="billing").is_sound


def change_positions(state: Any) -> None:
    state.positions[FIRST] = state.positions[FIRST]._replace(offset=1)


def change_members(state: Any) -> None:
    state.members = dict(reversed(state.members.items()))


@pytest.mark.parametrize(
    ("change", "field"), [(change_positions, "positions"), (change_members, "members")]
)
def test_a_checkpoint_that_says_otherwise_is_found(
    rolled: broker.Log, root: Path, change: Callable[[Any], None], field: str
) -> None:
    path = files(root, CHECKPOINTS)[-1]
    state, boot_id = checkpoint.decode(path.read_bytes(), str(path))
    change(state)
    path.write_bytes(checkpoint.encode(state, boot_id))
    damage = only(rolled.verify(group="billing"))
    assert (damage.path, damage.what) == (str(path), f"the journal says otherwise: {field}")


def durable(root: Path) -> list[Path]:
    return [path for path in files(root, CHECKPOINTS) if ".soft." not in path.name]


def test_with_the_older_checkpoint_damaged_the_newer_is_compared(
    rolled: broker.Log, root: Path
) -> None:
    older, newer = durable(root)
    flip(older, 100)
    assert only(rolled.verify(group="billing")).path == str(older)
    state, boot_id = checkpoint.decode(newer.read_bytes(), str(newer))
    change_positions(state)
    newer.write_bytes(checkpoint.encode(state, boot_id))
    found = {Path(one.path).name: one.what for one in rolled.verify(group="billing").damage}
    assert found[newer.name] == "the journal says otherwise: positions"


def test_with_no_checkpoint_left_what_was_removed_is_lost(rolled: broker.Log, root: Path) -> None:
    for path in files(root, CHECKPOINTS):
        flip(path, 100)
    found = {Path(one.path).name: one.what for one in rolled.verify(group="billing").damage}
    assert "no checkpoint can be read that says what the commits" in found.pop("checkpoint")
    assert sorted(found) == [path.name for path in files(root, CHECKPOINTS)]


def test_one_checkpoint_less_is_no_damage(rolled: broker.Log, root: Path) -> None:
    durable(root)[0].unlink()
    assert rolled.verify(group="billing").is_sound


@pytest.mark.parametrize("is_there", [True, False])
def test_how_far_it_is_synced_is_checked(busy: broker.Log, root: Path, is_there: bool) -> None:
    path = root / "groups/billing/1/synced"
    flip(path, 20) if is_there else path.unlink()
    damage = only(busy.verify(group="billing"))
    what = "the file's checksum does not match" if is_there else "the file is missing"
    assert (damage.path, damage.what) == (str(path), what)
    assert Synced.read(LocalStorage(str(root)), "groups/billing/1") is None


def test_a_torn_lease_is_a_note(busy: broker.Log, root: Path) -> None:
    path = root / "groups/billing/1/leases/a"
    for data in (path.read_bytes()[:10], b""):
        path.write_bytes(data)
        report = busy.verify(group="billing")
        assert report.is_sound
        assert "group billing: leases/a cannot be read" in report.notes[0]


def test_a_folder_that_is_no_groups_is_a_note(busy: broker.Log, root: Path) -> None:
    (root / "groups/a b").mkdir()
    assert "groups/a b is not what a group's folder is named" in busy.verify().notes


# The command.


def test_the_command_verifies_groups(
    busy: broker.Log,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPARK_LOG_ROOT", str(root))
    assert app.run(["verify"]) == 0
    out = capfd.readouterr().out
    assert "orders" in out and "billing" in out
    flip(files(root)[0], 200)
    assert app.run(["verify", "orders"]) == 0
    capfd.readouterr()
    assert app.run(["verify", "--group", "billing", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert [(one["group"], one["is_sound"]) for one in found["groups"]] == [("billing", False)]
    assert found["topics"] == []
    assert app.run(["verify", "--group", "nobody"]) != 0
    assert "'nobody'" in capfd.readouterr().err
