"""A group's members, owners and positions against a plain model, through random commits."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import broker
from broker import TopicPartition
from broker.group import Position, checkpoint, group
from broker.group.assignment import STRATEGIES
from broker.group.group import Group
from broker.group.rebalance import make_assignment
from broker.group.state import GroupState, KnownTopic, Member
from broker.storage import LocalStorage, Storage

TOPIC = "t"


def member(name: str, instance_id: str | None = None, **given: Any) -> Member:
    fields: dict[str, Any] = {
        "client_id": "",
        "host": "here",
        "topics": (TOPIC,),
        "pattern": None,
        "strategies": ("sticky",),
        "session_timeout_ms": 1000,
        **given,
    }
    return Member(member_id=name, instance_id=instance_id, **fields)


def place(partition: int) -> TopicPartition:
    return TopicPartition(TOPIC, partition)


def position(offset: int) -> Position:
    return Position(offset, incarnation=1, epoch=0, time=0)


def assign(opened: Group, partitions: int) -> None:
    topics = {TOPIC: KnownTopic(1, partitions)}
    opened.assign(lambda state: (topics, make_assignment(state, topics, STRATEGIES)))


class GroupMachine(RuleBasedStateMachine):
    """Members come, go, die and commit; a dict of owners is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.storage = LocalStorage(self.root)
        group.create(self.storage, "g", 1)
        self.group = Group(self.storage, "g", 1, write=True)
        self.names = 0
        self.partitions = 4
        self.owners: dict[TopicPartition, str] = {}
        self.positions: dict[TopicPartition, int] = {}

    @property
    def state(self) -> GroupState:
        return self.group.state

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.state.members)))

    @rule(instance=st.sampled_from([None, None, "one", "two"]))
    def join(self, instance: str | None) -> None:
        self.names += 1
        name = f"m{self.names:03d}"
        generation, settled = self.state.generation, self.state.is_unsettled
        old = self.group.join(member(name, instance))
        if old is not None:
            assert (self.state.generation, self.state.is_unsettled) == (generation, settled)
            self.owners = {
                p: name if who == old.member_id else who for p, who in self.owners.items()
            }

    @precondition(lambda self: self.state.members)
    @rule(data=st.data(), is_eviction=st.booleans())
    def go(self, data: st.DataObject, is_eviction: bool) -> None:
        name = self.pick(data)
        if is_eviction:
            assert self.group.evict([name], by=None, is_dead=lambda _: True) == [name]
        else:
            self.group.leave(name)
        self.owners = {p: who for p, who in self.owners.items() if who != name}

    @precondition(lambda self: self.state.members)
    @rule(grow=st.integers(0, 2))
    def assign(self, grow: int) -> None:
        self.partitions += grow
        assign(self.group, self.partitions)
        for p in map(place, range(self.partitions)):
            self.owners.setdefault(p, self.state.target[p])

    @precondition(lambda self: self.state.members)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data)
        given = self.state.to_release(name)
        target = dict(self.state.target)
        self.group.release(name, given)
        for p in given:
            del self.owners[p]
            if p in target:
                self.owners[p] = target[p]

    @precondition(lambda self: self.state.members)
    @rule(data=st.data(), partition=st.integers(0, 5), offset=st.integers(0, 99))
    def commit(self, data: st.DataObject, partition: int, offset: int) -> None:
        name, p = self.pick(data), place(partition)
        wanted = {p: position(offset)}
        if self.owners.get(p) == name:
            self.group.commit_positions(wanted, member_id=name, generation=self.state.generation)
            self.positions[p] = offset
        else:
            with pytest.raises(broker.CommitFailed):
                self.group.commit_positions(
                    wanted, member_id=name, generation=self.state.generation
                )

    @rule(partition=st.integers(0, 5), offset=st.integers(0, 99))
    def publish(self, partition: int, offset: int) -> None:
        wanted = {place(partition): position(offset)}
        if self.state.members:
            with pytest.raises(broker.GroupNotEmpty):
                self.group.publish(wanted)
        else:
            self.group.publish(wanted)
            self.positions[place(partition)] = offset

    @invariant()
    def state_is_the_model(self) -> None:
        state = self.state
        assert {p: who.member_id for p, who in state.owners.items()} == self.owners
        assert {p: known.offset for p, known in state.positions.items()} == self.positions
        assert set(self.owners.values()) | set(state.target.values()) <= set(state.members)
        assert all(who.generation <= state.generation for who in state.owners.values())

    @invariant()
    def a_checkpoint_says_the_same(self) -> None:
        assert checkpoint.decode(checkpoint.encode(self.state, "b"), "x") == (self.state, "b")

    def teardown(self) -> None:
        self.group.close()
        shutil.rmtree(f"{self.root}/groups/g/1/checkpoint", ignore_errors=True)
        replayed = Group(self.storage, "g", 1)
        assert replayed.state == self.state
        replayed.close()
        shutil.rmtree(self.root)


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture
def opened(storage: Storage) -> Group:
    group.create(storage, "g", 1)
    return Group(storage, "g", 1, write=True)


@pytest.mark.every_store
def test_a_partition_is_given_up_before_another_gets_it(opened: Group) -> None:
    opened.join(member("a"))
    assign(opened, 2)
    opened.join(member("b"))
    assign(opened, 2)
    assert {who.member_id for who in opened.state.owners.values()} == {"a"}
    (given,) = opened.state.to_release("a")
    opened.release("a", [given])
    assert opened.state.owners[given].member_id == "b"
    assert opened.state.generation == 2


@pytest.mark.every_store
def test_an_old_generations_position_is_refused(opened: Group) -> None:
    opened.join(member("a"))
    assign(opened, 1)
    opened.join(member("b"))
    opened.release("a", [place(0)])  # Still the target: it has it anew, in this generation.
    assign(opened, 1)
    opened.leave("a")
    assign(opened, 1)
    assert opened.state.owners[place(0)] == ("b", 3)
    with pytest.raises(broker.CommitFailed, match="t-0 does not belong to this member"):
        opened.commit_positions({place(0): position(1)}, member_id="b", generation=2)
    with pytest.raises(broker.CommitFailed, match="no longer a member"):
        opened.commit_positions({place(0): position(1)}, member_id="a", generation=3)
    opened.commit_positions({place(0): position(1)}, member_id="b", generation=3)


@pytest.mark.every_store
def test_a_static_member_comes_back_without_a_generation(opened: Group) -> None:
    opened.join(member("a", "one"))
    opened.join(member("b", "two"))
    assign(opened, 4)
    before = {p for p, who in opened.state.owners.items() if who.member_id == "a"}
    old = opened.join(member("c", "one"))
    assert old is not None and old.member_id == "a"
    assert set(opened.state.owned_by("c")) == before
    assert (opened.state.generation, opened.state.is_unsettled) == (1, False)
    assert list(opened.state.members) == ["c", "b"]


def test_a_static_member_that_wants_something_else_is_assigned_anew(opened: Group) -> None:
    opened.join(member("a", "one"))
    assign(opened, 4)
    opened.join(member("c", "one", topics=("other",)))
    assert opened.state.is_unsettled


@pytest.mark.every_store
def test_who_was_evicted_evicts_nobody(opened: Group) -> None:
    opened.join(member("a"))
    opened.join(member("b"))
    assert opened.evict(["b"], by="a", is_dead=lambda _: True) == ["b"]
    assert opened.evict(["a"], by="b", is_dead=lambda _: True) == []
    assert list(opened.state.members) == ["a"]


def test_who_moved_since_is_not_evicted(opened: Group) -> None:
    opened.join(member("a"))
    opened.join(member("b"))
    assert opened.evict(["b"], by="a", is_dead=lambda _: False) == []


def test_members_need_a_strategy_in_common(opened: Group) -> None:
    opened.join(member("a", strategies=("range",)))
    with pytest.raises(broker.InvalidOption, match="use range; use one of these"):
        opened.join(member("b", strategies=("sticky",)))
    opened.join(member("c", strategies=("sticky", "range")))


def test_partitions_that_appear_are_late_until_they_have_a_position(opened: Group) -> None:
    opened.join(member("a"))
    assign(opened, 2)
    assert opened.state.late == set()
    assign(opened, 3)
    assert opened.state.late == {place(2)}
    opened.commit_positions({place(2): position(0)}, member_id="a", generation=2)
    assert opened.state.late == set()


def test_positions_expire_only_by_the_setting_and_without_members(root: Path) -> None:
    now = [1_700_000_000_000]
    storage = LocalStorage(str(root), clock=lambda: now[0] * 1_000_000)
    group.create(storage, "g", 1)
    opened = Group(storage, "g", 1, write=True)
    opened.publish({place(0): position(5)})
    now[0] += 1000 * 86_400_000
    assert opened.expire() == 0
    opened.configure({"offsets.retention.minutes": 10})
    opened.join(member("a"))
    assert opened.expire() == 0
    opened.leave("a")
    now[0] += 10 * 60_000
    assert opened.expire() == 0
    now[0] += 1
    assert opened.expire() == 1
    assert opened.state.positions == {}
    opened.close()
