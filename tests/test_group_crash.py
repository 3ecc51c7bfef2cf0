"""A member that dies at any change it makes leaves a group that others go on with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faulty_storage import Died, FaultyStorage, Fuse

import broker
from broker import TopicPartition
from broker.group import Position, group
from broker.group.assignment import STRATEGIES
from broker.group.group import Group
from broker.group.lease import Lease, LeaseWatch
from broker.group.rebalance import make_assignment
from broker.group.state import KnownTopic, Member
from broker.log import Log
from broker.storage import LocalStorage

TOPICS = {"t": KnownTopic(1, 2)}
FIRST = TopicPartition("t", 0)


def member(name: str, instance_id: str | None = None) -> Member:
    return Member(name, "", "here", instance_id, ("t",), None, ("sticky",), 1000)


def assign(opened: Group) -> None:
    opened.assign(lambda state: (TOPICS, make_assignment(state, TOPICS, STRATEGIES)))


def life_of_a_member(storage: LocalStorage) -> None:
    """Everything that members do, by two of them."""
    opened = Group(storage, "g", 1, write=True)
    lease = Lease(storage, opened.directory, "a")
    opened.join(member("a"))
    lease.renew()
    assign(opened)
    position = Position(3, 1, 0, 0, "note")
    opened.commit_positions({FIRST: position}, member_id="a", generation=1)
    other = Lease(storage, opened.directory, "b")
    opened.join(member("b", "static"))
    other.renew()
    assign(opened)
    opened.release("a", opened.state.to_release("a"))
    lease.renew()
    opened.join(member("c", "static"))
    other.remove()
    opened.evict(["c"], by="a", is_dead=lambda _: True)
    opened.leave("a")
    lease.remove()
    opened.close()


@pytest.mark.parametrize("manner", ["before", "half", "after"])
def test_a_death_at_any_change_leaves_a_group_that_goes_on(root: Path, manner: str) -> None:
    deaths = 0
    for change in range(1, 1000):
        where = str(root / str(change))
        group.create(LocalStorage(where), "g", 1)
        storage = FaultyStorage(where, Fuse(change, manner))
        try:
            life_of_a_member(storage)
            break
        except AssertionError as error:
            assert "not done in parts" in str(error)
        except Died:
            deaths += 1
        finally:
            storage.bury()
        others_go_on(LocalStorage(where))
    else:
        pytest.fail("the life of a member never ended")
    assert deaths >= (12 if manner == "half" else 20)


def others_go_on(storage: LocalStorage) -> None:
    """A newcomer evicts whom the dead process left behind, and gets everything."""
    opened = Group(storage, "g", 1, write=True)
    opened.join(member("new"))
    now = [0.0]
    watch = LeaseWatch(
        lambda name: storage.read(f"{opened.directory}/leases/{name}"), lambda: now[0]
    )
    dead: list[str] = []
    for _ in range(3):
        now[0] += 1
        silent = {name: 1.0 for name in opened.state.members if name != "new"}
        dead = watch.observe(silent, interval=1)
    opened.evict(dead, by="new", is_dead=watch.is_still)
    assign(opened)
    owners = {place: who.member_id for place, who in opened.state.owners.items()}
    assert owners == {TopicPartition("t", p): "new" for p in range(2)}
    known = opened.state.positions.get(FIRST)
    assert known is None or (known.offset, known.metadata) == (3, "note")
    opened.commit_positions(
        {FIRST: Position(9, 1, 0, 0)}, member_id="new", generation=opened.state.generation
    )
    opened.close()
    again = Group(storage, "g", 1)
    assert again.state == opened.state
    again.close()
    newcomer = Group(storage, "g", 1, write=True)
    newcomer.join(member("newest"))
    assert storage.list(f"{newcomer.directory}/leases") == []
    newcomer.close()


class SlowStorage(LocalStorage):
    """A store on which every write of a lease takes its time."""

    pause = 0.0

    def overwrite(self, path: str, data: bytes) -> None:
        if "/leases/" in path:
            time.sleep(self.pause)
        super().overwrite(path, data)


def test_a_member_whose_store_is_slow_is_evicted_and_comes_back(root: Path) -> None:
    """It stops delivering before the others have its partitions, and loses no record."""
    log = broker.open(root)
    log.create_topic("t", partitions=2)
    storage = SlowStorage(str(root))
    pace = {"session_timeout_ms": 900, "heartbeat_interval_ms": 100}
    options = {"group_id": "g", "auto_offset_reset": "earliest", **pace}
    with Log(storage).consumer("t", **options) as slow, log.consumer("t", **options) as quick:
        poll_both(slow, quick, lambda: len(slow.assignment()) == len(quick.assignment()) == 1)
        storage.pause = 3.0
        poll_until_alone(quick)
        storage.pause = 0.0
        poll_both(slow, quick, lambda: len(slow.assignment()) == len(quick.assignment()) == 1)


def poll_until_alone(quick: object) -> None:
    assert isinstance(quick, broker.consumer.Consumer)
    deadline = time.monotonic() + 30
    while len(quick.assignment()) < 2:
        assert time.monotonic() < deadline
        quick.poll(50)


def poll_both(one: object, two: object, is_done: object) -> None:
    assert callable(is_done)
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        for consumer in (one, two):
            assert isinstance(consumer, broker.consumer.Consumer)
            consumer.poll(50)
