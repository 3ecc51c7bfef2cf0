"""Groups as journals: positions that outlive everybody, made and removed by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_storage import Died, FaultyStorage, Fuse, InlineExecutor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import broker
from broker import TopicPartition
from broker.group import Position, group, names
from broker.group.group import Group
from broker.log import Log
from broker.storage import LocalStorage, Storage

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)


@pytest.fixture
def log(root: Path) -> broker.Log:
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    return log


@pytest.mark.every_store
def test_positions_are_there_for_whoever_asks(log: broker.Log, root: Path) -> None:
    log.publish_positions("billing", {FIRST: 5, SECOND: 7})
    log.publish_positions("billing", {FIRST: 6})
    assert broker.open(root).group_positions("billing") == {FIRST: 6, SECOND: 7}


@pytest.mark.every_store
def test_groups_do_not_know_each_others_positions(log: broker.Log) -> None:
    log.publish_positions("billing", {FIRST: 5})
    log.publish_positions("audit", {FIRST: 1})
    assert log.groups() == ["audit", "billing"]
    assert log.group_positions("audit") == {FIRST: 1}


def test_a_group_that_does_not_exist_has_no_positions(log: broker.Log) -> None:
    assert log.group_positions("nobody") == {}
    assert log.groups() == []


def test_publishing_nothing_makes_the_group(log: broker.Log) -> None:
    log.publish_positions("billing", {})
    assert log.groups() == ["billing"]


@pytest.mark.every_store
def test_a_position_may_go_back(log: broker.Log) -> None:
    log.publish_positions("billing", {FIRST: 5})
    log.publish_positions("billing", {FIRST: 2})
    assert log.group_positions("billing") == {FIRST: 2}


@pytest.mark.parametrize("offset", [-1, 1.5, None, True])
def test_what_is_no_offset_is_refused(log: broker.Log, offset: int) -> None:
    with pytest.raises(broker.InvalidOption, match="orders-0 cannot have the position"):
        log.publish_positions("billing", {FIRST: offset})
    assert log.groups() == []


def test_a_position_needs_a_topic(log: broker.Log) -> None:
    with pytest.raises(broker.UnknownTopic):
        log.publish_positions("billing", {TopicPartition("nothing", 0): 1})


@pytest.mark.every_store
def test_a_position_does_not_outlive_its_topic(log: broker.Log) -> None:
    log.publish_positions("billing", {FIRST: 5})
    log.delete_topic("orders")
    assert log.group_positions("billing") == {}
    log.create_topic("orders", partitions=2)
    assert log.group_positions("billing") == {}
    log.publish_positions("billing", {SECOND: 1})
    assert log.group_positions("billing") == {SECOND: 1}


@pytest.mark.every_store
@pytest.mark.parametrize("name", ["a/b", "..", ".", ".tmp-x", "ä ö", "%2F", "x" * 240, "a=b", "\n"])
def test_any_text_names_a_group(log: broker.Log, name: str) -> None:
    log.publish_positions(name, {FIRST: 5})
    assert log.groups() == [name]
    assert log.group_positions(name) == {FIRST: 5}


@pytest.mark.parametrize("name", ["", "x" * 241, "/" * 81, "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(log: broker.Log, name: str) -> None:
    with pytest.raises(broker.InvalidGroupName):
        log.publish_positions(name, {FIRST: 5})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_encoded_names_are_plain_and_come_back(name: str) -> None:
    encoded = names.encode(name)
    assert names.decode(encoded) == name
    assert "/" not in encoded and "=" not in encoded and not encoded.startswith(".")


def test_a_topic_and_a_group_of_one_name_have_locks_of_their_own(
    log: broker.Log, root: Path
) -> None:
    log.publish_positions("orders", {FIRST: 5})
    assert {path.name for path in (root / "locks").iterdir()} >= {"group=orders"}


def open_group(storage: Storage, name: str = "billing", incarnation: int = 1) -> Group:
    opened = Group(storage, name, incarnation, write=True)
    opened._finisher = InlineExecutor()  # type: ignore[assignment]
    return opened


def position(offset: int, note: str = "") -> Position:
    return Position(offset, incarnation=1, epoch=0, time=0, metadata=note)


@pytest.mark.every_store
def test_metadata_stays_with_its_position(log: broker.Log, storage: Storage) -> None:
    log.publish_positions("billing", {SECOND: 1})
    opened = open_group(storage)
    opened.publish({FIRST: position(3, "by hand"), SECOND: position(4)})
    assert opened.state.positions[FIRST].metadata == "by hand"
    opened.publish({FIRST: position(5)})
    opened.close()
    again = Group(storage, "billing", 1)
    assert again.state.positions[FIRST][:3] == (5, 1, 0)
    assert again.state.positions[FIRST].metadata == ""
    again.close()


@pytest.mark.every_store
def test_a_group_is_opened_from_a_checkpoint(
    log: broker.Log, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_FILE_BYTES_MAX", 2000)
    monkeypatch.setattr(group, "_CHECKPOINT_COMMITS", 7)
    log.publish_positions("billing", {})
    opened = open_group(storage)
    for offset in range(100):
        opened.publish({FIRST: position(offset, f"note {offset}")})
    opened.close()
    assert storage.list("groups/billing/1/checkpoint")
    again = Group(storage, "billing", 1)
    assert again.state == opened.state
    again.close()


def test_the_past_of_a_group_is_removed_and_slow_readers_go_on(
    log: broker.Log, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_FILE_BYTES_MAX", 2000)
    log.publish_positions("billing", {})
    opened = open_group(storage)
    slow = Group(storage, "billing", 1)
    other = open_group(storage)
    for offset in range(500):
        opened.publish({FIRST: position(offset)})
        assert len(storage.list("groups/billing/1/journal")) <= 4
    assert slow.refresh() == opened.state
    other.publish({SECOND: position(7)})
    assert opened.refresh().positions[SECOND].offset == 7
    for each in (opened, slow, other):
        each.close()


@pytest.mark.every_store
def test_a_group_that_is_deleted_and_made_again_is_empty(log: broker.Log, storage: Storage) -> None:
    log.publish_positions("billing", {FIRST: 5})
    open_group(storage).delete()
    assert log.groups() == []
    assert log.group_positions("billing") == {}
    log.publish_positions("billing", {SECOND: 1})
    assert log.group_positions("billing") == {SECOND: 1}
    # On a store the journal stays for an hour: who still writes there finds the `delete`.
    kept = ["1", "1.deleted", "2"] if storage.is_remote else ["2"]
    assert storage.list("groups/billing") == kept


@pytest.mark.every_store
def test_who_comes_late_to_make_a_group_leaves_it_as_it_is(log: broker.Log) -> None:
    """It is not taken for the rest of a deleted one: another has made it meanwhile."""
    log.publish_positions("billing", {FIRST: 5})
    log._groups._create("billing")
    assert log.group_positions("billing") == {FIRST: 5}


@pytest.mark.every_store
def test_a_group_deleted_under_its_user_says_so(log: broker.Log, storage: Storage) -> None:
    log.publish_positions("billing", {FIRST: 5})
    mine, other = open_group(storage), open_group(storage)
    other.delete()
    with pytest.raises(broker.UnknownGroup, match="group 'billing' was deleted"):
        mine.publish({FIRST: position(6)})
    mine.close()


@pytest.mark.every_store
def test_positions_of_two_epochs_of_a_topic_can_be_handed_on(log: broker.Log, root: Path) -> None:
    given = {FIRST: Position(5, 1, 0), SECOND: Position(7, 1, 1)}
    log.publish_positions("billing", given)
    held = broker.open(root).located_positions("billing")
    assert {place: one[:3] for place, one in held.items()} == {FIRST: (5, 1, 0), SECOND: (7, 1, 1)}


def test_after_a_power_cut_the_first_writer_recovers(log: broker.Log, root: Path) -> None:
    log.publish_positions("billing", {FIRST: 5})
    after = Log(LocalStorage(str(root), boot_id="another boot"))
    assert after.group_positions("billing") == {FIRST: 5}
    after.publish_positions("billing", {FIRST: 6})
    opened = Group(LocalStorage(str(root), boot_id="another boot"), "billing", 1)
    assert opened.state.epoch == 1
    assert opened.state.positions[FIRST].offset == 6
    opened.close()


def _publish(storage: LocalStorage) -> None:
    Log(storage).publish_positions("billing", {FIRST: 5, SECOND: 6})


def _delete(storage: LocalStorage) -> None:
    open_group(storage).delete()


def _publish_once_more(storage: LocalStorage) -> None:
    Log(storage).publish_positions("billing", {FIRST: 8, SECOND: 9})


@pytest.mark.parametrize("manner", ["before", "half", "after"])
def test_a_death_at_any_change_leaves_all_or_nothing(root: Path, manner: str) -> None:
    """Publish, publish again, delete, publish: killed at each change of each of these."""
    steps: list[tuple[Callable[[LocalStorage], None], dict[TopicPartition, int]]] = [
        (_publish, {FIRST: 5, SECOND: 6}),
        (_publish_once_more, {FIRST: 8, SECOND: 9}),
        (_delete, {}),
        (_publish, {FIRST: 5, SECOND: 6}),
    ]
    deaths = 0
    for place in range(len(steps)):
        change = 0
        while True:
            change += 1
            where = root / f"{manner}-{place}-{change}"
            Log(LocalStorage(str(where))).create_topic("orders", partitions=2)
            for act, _ in steps[:place]:
                act(LocalStorage(str(where)))
            before = steps[place - 1][1] if place else {}
            storage = FaultyStorage(str(where), Fuse(change, manner))
            try:
                steps[place][0](storage)
                break
            except AssertionError as error:
                assert "not done in parts" in str(error)
            except Died:
                deaths += 1
            finally:
                storage.bury()
            after = broker.open(where)
            assert after.group_positions("billing") in (before, steps[place][1])
            _publish_once_more(LocalStorage(str(where)))
            assert after.group_positions("billing") == {FIRST: 8, SECOND: 9}
    assert deaths >= (4 if manner == "half" else 20)
