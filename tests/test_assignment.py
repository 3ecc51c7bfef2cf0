"""The assignment functions: examples, and properties against random members and topics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import broker
from broker import TopicPartition
from broker.group.assignment import (
    STRATEGIES,
    Subscriber,
    assign_range,
    assign_round_robin,
    assign_sticky,
    check,
    common_strategy,
    strategy_name,
)

TOPICS = ("a", "b", "c")
EVERY_PLACE = [TopicPartition(topic, number) for topic in TOPICS for number in range(15)]
# On a busy machine, drawing a group takes as long as it takes.
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def members(count: int, *topics: str) -> list[Subscriber]:
    return [Subscriber(f"m{number}", frozenset(topics)) for number in range(count)]


def places(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def holding(assigned: dict[str, list[TopicPartition]], *topics: str) -> list[Subscriber]:
    return [Subscriber(name, frozenset(topics), frozenset(held)) for name, held in assigned.items()]


def test_range_gives_neighbours_and_the_first_get_more() -> None:
    assert assign_range(members(2, "a", "b"), {"a": 3, "b": 3}) == {
        "m0": places("a", 0, 1) + places("b", 0, 1),
        "m1": places("a", 2) + places("b", 2),
    }


def test_round_robin_deals_over_all_topics() -> None:
    assert assign_round_robin(members(2, "a", "b"), {"a": 3, "b": 3}) == {
        "m0": places("a", 0, 2) + places("b", 1),
        "m1": places("a", 1) + places("b", 0, 2),
    }


def test_sticky_moves_one_partition_to_a_third_member() -> None:
    before = assign_sticky(members(2, "a"), {"a": 4})
    after = assign_sticky([*holding(before, "a"), Subscriber("new", frozenset("a"))], {"a": 4})
    assert len(after["new"]) == 1
    assert all(set(after[name]) <= set(before[name]) for name in before)


def test_more_members_than_partitions_leaves_some_without() -> None:
    for strategy in STRATEGIES.values():
        assigned = strategy(members(3, "a"), {"a": 2})
        assert sorted(len(list(held)) for held in assigned.values()) == [0, 1, 1]


counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 12), max_size=3)
alike = st.integers(1, 8)


@st.composite
def mixed_members(draw: st.DrawFn) -> list[Subscriber]:
    """Members with any subscriptions, holding anything, even what others hold too."""
    owned = st.frozensets(st.sampled_from(EVERY_PLACE), max_size=8)
    wanted = st.frozensets(st.sampled_from(TOPICS))
    drawn = draw(st.lists(st.tuples(wanted, owned), min_size=1, max_size=8))
    return [Subscriber(f"m{number}", *one) for number, one in enumerate(drawn)]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@relaxed
@given(group=mixed_members(), partitions=counts)
def test_every_wanted_partition_has_exactly_one_member(
    strategy: object, group: list[Subscriber], partitions: dict[str, int]
) -> None:
    assert callable(strategy)
    owners = check(strategy(group, partitions), group, partitions)
    wanted = frozenset[str]().union(*(member.topics for member in group))
    assert set(owners) == {
        TopicPartition(topic, number)
        for topic, count in partitions.items()
        if topic in wanted
        for number in range(count)
    }


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@relaxed
@given(count=alike, partitions=st.integers(0, 40))
def test_members_that_want_the_same_are_balanced_within_one(
    strategy: object, count: int, partitions: int
) -> None:
    assert callable(strategy)
    loads = [len(held) for held in strategy(members(count, "a"), {"a": partitions}).values()]
    assert max(loads) - min(loads) <= 1


def fewest_moves(owned: Sequence[int], total: int) -> int:
    """The model: the members with the most keep the larger shares, and give up the rest."""
    share, larger = divmod(total, len(owned))
    ordered = sorted(owned, reverse=True)
    return sum(max(0, has - share - (rank < larger)) for rank, has in enumerate(ordered))


@relaxed
@given(data=st.data(), partitions=counts, count=alike)
def test_sticky_is_balanced_with_the_fewest_moves(
    data: st.DataObject, partitions: dict[str, int], count: int
) -> None:
    everything = [
        TopicPartition(topic, number)
        for topic, many in partitions.items()
        for number in range(many)
    ]
    size = len(everything)
    drawn = data.draw(st.lists(st.integers(-1, count - 1), min_size=size, max_size=size))
    owner = dict(zip(everything, drawn, strict=True))
    group = [
        Subscriber(
            f"m{number}",
            frozenset(TOPICS),
            frozenset(place for place in everything if owner[place] == number),
        )
        for number in range(count)
    ]
    assigned = assign_sticky(group, partitions)
    loads = [len(held) for held in assigned.values()]
    assert max(loads) - min(loads) <= 1
    moved = sum(len(member.owned - set(assigned[member.member_id])) for member in group)
    assert moved == fewest_moves([len(member.owned) for member in group], len(everything))


@relaxed
@given(group=mixed_members(), partitions=counts)
def test_sticky_leaves_no_move_that_would_bring_two_closer(
    group: list[Subscriber], partitions: dict[str, int]
) -> None:
    assigned = assign_sticky(group, partitions)
    for giver in group:
        for taker in group:
            surplus = len(assigned[giver.member_id]) - len(assigned[taker.member_id])
            movable = [p for p in assigned[giver.member_id] if p.topic in taker.topics]
            assert surplus <= 1 or not movable


@relaxed
@given(group=mixed_members(), partitions=counts)
def test_sticky_changes_nothing_the_second_time(
    group: list[Subscriber], partitions: dict[str, int]
) -> None:
    first = assign_sticky(group, partitions)
    again = [member._replace(owned=frozenset(first[member.member_id])) for member in group]
    assert assign_sticky(again, partitions) == first


def test_a_large_group_is_assigned_in_time() -> None:
    assigned = assign_sticky(members(100, "a"), {"a": 5000})
    assert {len(held) for held in assigned.values()} == {50}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ({"m0": places("a", 0), "m1": places("a", 0)}, "a-0: .* gives it away twice"),
        ({"m0": places("a", 9)}, "a-9: .* does not exist"),
        ({"m0": places("b", 0)}, "does not want its topic"),
        ({"stranger": places("a", 0)}, "does not want its topic"),
    ],
)
def test_a_wrong_function_is_told_so(
    assignment: dict[str, list[TopicPartition]], message: str
) -> None:
    with pytest.raises(broker.InvalidOption, match=message):
        check(assignment, members(2, "a"), {"a": 2, "b": 1})


def test_the_strategy_is_the_first_that_all_know() -> None:
    assert common_strategy([["x", "range"], ["range", "sticky", "x"]]) == "x"
    assert common_strategy([["sticky", "range"], ["range"]]) == "range"
    assert common_strategy([["sticky"], ["range"]]) is None
    assert common_strategy([]) is None


def test_a_function_goes_by_its_name() -> None:
    assert strategy_name(assign_range) == "assign_range"
    assert strategy_name("sticky") == "sticky"
    with pytest.raises(broker.InvalidOption, match="not one of range, roundrobin, sticky"):
        strategy_name("stickey")
