"""A member that dies at any change it makes leaves a group that others go on with."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_storage import Died, FaultyStorage, Fuse
from faulty_store import DyingStore, LossyStore, fresh_store

import broker
from broker import TopicPartition
from broker.group import Position, group
from broker.group.assignment import STRATEGIES
from broker.group.group import Group
from broker.group.lease import Lease, LeaseWatch
from broker.group.rebalance import make_assignment
from broker.group.state import KnownTopic, Member
from broker.log import Log
from broker.storage import LocalStorage, Storage
from broker.storage.hdfs import HdfsStore
from broker.storage.remote import RemoteStorage
from broker.storage.s3 import S3Store
from broker.storage.store import ObjectStore
from servers import HdfsCluster, S3Server

TOPICS = {"t": KnownTopic(1, 2)}
FIRST = TopicPartition("t", 0)


def member(name: str, instance_id: str | None = None) -> Member:
    return Member(name, "", "here", instance_id, ("t",), None, ("sticky",), 1000)


def assign(opened: Group) -> None:
    opened.assign(lambda state: (TOPICS, make_assignment(state, TOPICS, STRATEGIES)))


def life_of_a_member(storage: Storage) -> None:
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


def die_everywhere_on(make: Callable[[str], ObjectStore], *, step: int = 1) -> None:
    """Live once to count the changes of a store, then die before them: every `step`-th one."""

    def live(name: str, fuse: Fuse) -> RemoteStorage:
        store = make(name)
        group.create(RemoteStorage(store), "g", 1)
        life_of_a_member(RemoteStorage(DyingStore(store, fuse)))
        return RemoteStorage(store)

    whole = Fuse()
    live("whole", whole)
    assert len(whole.trace) >= 12, "the life of a member has lost its changes"
    for at in range(1, len(whole.trace) + 1, step):
        fuse = Fuse(at)
        with pytest.raises(Died):
            live(str(at), fuse)
        assert fuse.is_dead
        others_go_on(RemoteStorage(make(str(at))))


def test_a_death_at_any_change_of_a_store_leaves_a_group_that_goes_on() -> None:
    stores = defaultdict(lambda: fresh_store(uuid.uuid4().hex))
    die_everywhere_on(stores.__getitem__)


def test_a_death_at_a_change_of_a_real_hdfs_leaves_a_group_that_goes_on(
    hdfs_cluster: HdfsCluster,
) -> None:
    root = f"{hdfs_cluster.address}/{uuid.uuid4().hex}"
    die_everywhere_on(lambda at: HdfsStore(f"{root}/{at}", {}), step=2)


def test_a_death_at_a_change_of_a_real_s3_store_leaves_a_group_that_goes_on(
    s3_server: S3Server,
) -> None:
    root, options = f"{s3_server.address}/{uuid.uuid4().hex}", s3_server.client_options
    die_everywhere_on(lambda at: S3Store(f"{root}/{at}", options), step=2)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_answer_lost_at_any_request_leaves_the_group_as_it_should_be(after: bool) -> None:
    """It was carried out or not; either way each event is in the journal, and once."""

    def live(at: int) -> tuple[int, Group]:
        store = fresh_store(uuid.uuid4().hex)
        group.create(RemoteStorage(store), "g", 1)
        lossy = LossyStore(store, at=at, after=after)
        life_of_a_member(RemoteStorage(lossy))
        return lossy.count, Group(RemoteStorage(store), "g", 1)

    count, whole = live(-1)
    assert count > 20, "the life of a member has lost its requests"
    for at in range(count):
        _, found = live(at)
        assert found.state.number == whole.state.number, at
        assert found.state.members == whole.state.members == {}, at
        assert found.state.positions.keys() == whole.state.positions.keys() == {FIRST}, at
        assert found.state.generation == whole.state.generation, at
        found.close()
    whole.close()


def others_go_on(storage: Storage) -> None:
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


@pytest.mark.every_store
def test_a_member_whose_store_is_slow_is_evicted_and_comes_back(
    log: broker.Log, storage: Storage
) -> None:
    """It stops delivering before the others have its partitions, and loses no record."""
    log.create_topic("t", partitions=2)
    # One of its own: what is opened by its address, all of a process share.
    mine = RemoteStorage(storage._store) if storage.is_remote else LocalStorage(storage.root)
    overwrite, pause = mine.overwrite, [0.0]

    def slow_for_leases(path: str, data: bytes) -> None:
        if "/leases/" in path:
            time.sleep(pause[0])
        overwrite(path, data)

    mine.overwrite = slow_for_leases  # type: ignore[method-assign]
    pace = {"session_timeout_ms": 1500, "heartbeat_interval_ms": 100}
    options = {"group_id": "g", "auto_offset_reset": "earliest", **pace}
    with Log(mine).consumer("t", **options) as slow, log.consumer("t", **options) as quick:
        poll_both(slow, quick, lambda: len(slow.assignment()) == len(quick.assignment()) == 1)
        pause[0] = 4.0
        poll_until_alone(quick)
        pause[0] = 0.0
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
