"""Who reads what: pure functions from members and partitions to an assignment.

A strategy gets the members in the order in which they joined, each with the topics it wants and
the partitions it has, and the number of partitions of every topic. It returns the partitions of
each member. Whoever is first to notice that one is needed makes the assignment and commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from broker import checks
from broker.errors import InvalidOption
from broker.records import TopicPartition


class Subscriber(NamedTuple):
    """A member, as a strategy sees it."""

    member_id: str
    topics: frozenset[str]
    owned: frozenset[TopicPartition] = frozenset()
    instance_id: str | None = None


Assignment = Mapping[str, Iterable[TopicPartition]]
Strategy = Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]


def assign_range(
    members: Sequence[Subscriber], partitions: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Give each member neighbouring partitions of every topic: equal keys of topics stay together.

    The first members get one more of each topic that does not divide evenly.
    """
    assigned: dict[str, list[TopicPartition]] = {member.member_id: [] for member in members}
    for topic, count in sorted(partitions.items()):
        takers = [member.member_id for member in members if topic in member.topics]
        start = 0
        for rank, member_id in enumerate(takers):
            share = count // len(takers) + (rank < count % len(takers))
            assigned[member_id] += _places(topic, range(start, start + share))
            start += share
    return assigned


def assign_round_robin(
    members: Sequence[Subscriber], partitions: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Deal the partitions of all topics out like cards, one to each member in turn."""
    assigned: dict[str, list[TopicPartition]] = {member.member_id: [] for member in members}
    turn = cycle(members)
    for topic, count in sorted(partitions.items()):
        if not any(topic in member.topics for member in members):
            continue
        for place in _places(topic, range(count)):
            taker = next(member for member in turn if topic in member.topics)
            assigned[taker.member_id].append(place)
    return assigned


def assign_sticky(
    members: Sequence[Subscriber], partitions: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Let everybody keep what they have, and move only what balance needs.

    Members that want the same topics end within one partition of each other, with the fewest
    moves possible. Otherwise no single move would bring two members closer together.
    """
    table = _Table(members, partitions)
    for place in table.free_places():
        table.give(place, min(table.takers(place), key=table.load))
    while (move := table.next_move()) is not None:
        table.give(*move)
    return table.result()


STRATEGIES: dict[str, Strategy] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
}


def strategy_name(strategy: str | Strategy) -> str:
    """Return the name under which members agree on a strategy."""
    if isinstance(strategy, str) and strategy in STRATEGIES:
        return strategy
    if not callable(strategy):
        raise InvalidOption(
            f"partition_assignment_strategy={strategy!r} is not one of "
            f"{', '.join(STRATEGIES)} or a function"
        )
    return str(getattr(strategy, "name", None) or getattr(strategy, "__name__", "function"))


def common_strategy(preferences: Sequence[Sequence[str]]) -> str | None:
    """Return the strategy that every member knows and the first likes best, or None."""
    for name in preferences[0] if preferences else ():
        if all(name in known for known in preferences):
            return name
    return None


def check(
    assignment: Assignment, members: Sequence[Subscriber], partitions: Mapping[str, int]
) -> dict[TopicPartition, str]:
    """Return the member of each partition, having made sure that a user's function is right."""
    wanted = {member.member_id: member.topics for member in members}
    owners: dict[TopicPartition, str] = {}
    for member_id, places in _given(assignment).items():
        for place in places:
            topic, partition = place
            if member_id not in wanted or topic not in wanted[member_id]:
                wrong = f"gives it to {member_id!r}, which does not want its topic"
            elif not 0 <= partition < partitions.get(topic, 0):
                wrong = "gives it away, but it does not exist"
            elif place in owners:
                wrong = "gives it away twice"
            else:
                owners[place] = member_id
                continue
            raise InvalidOption(f"{topic}-{partition}: the assignment function {wrong}")
    return owners


def _given(assignment: Any) -> dict[str, list[TopicPartition]]:
    """Return what a user's function has returned, if it is of the right types."""
    if not isinstance(assignment, Mapping):
        raise InvalidOption(
            f"the assignment function returned {assignment!r}; let it return "
            "{member_id: [TopicPartition, ...]}"
        )
    try:
        return {member_id: checks.places(given) for member_id, given in assignment.items()}
    except InvalidOption as error:
        raise InvalidOption(f"from the assignment function: {error}") from error


def _places(topic: str, numbers: Iterable[int]) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


class _Table:
    """The sticky assignment while it is made."""

    def __init__(self, members: Sequence[Subscriber], partitions: Mapping[str, int]) -> None:
        self._members = {member.member_id: member for member in members}
        self._order = {member.member_id: rank for rank, member in enumerate(members)}
        self._takers = {
            topic: [member.member_id for member in members if topic in member.topics]
            for topic in partitions
        }
        self._all = [
            place
            for topic, count in sorted(partitions.items())
            if self._takers[topic]
            for place in _places(topic, range(count))
        ]
        existing = set(self._all)
        self._owner: dict[TopicPartition, str] = {}
        self._held: dict[str, list[TopicPartition]] = {}
        for member in members:
            held = sorted(
                place
                for place in member.owned
                if place in existing and place.topic in member.topics and place not in self._owner
            )
            self._held[member.member_id] = held
            self._owner.update(dict.fromkeys(held, member.member_id))

    def free_places(self) -> list[TopicPartition]:
        """Return what nobody has; those with the fewest takers first, for they have no choice."""
        free = [place for place in self._all if place not in self._owner]
        return sorted(free, key=lambda place: len(self._takers[place.topic]))

    def takers(self, place: TopicPartition) -> list[str]:
        return self._takers[place.topic]

    def load(self, member_id: str) -> tuple[int, int]:
        return len(self._held[member_id]), self._order[member_id]

    def give(self, place: TopicPartition, member_id: str) -> None:
        before = self._owner.get(place)
        if before is not None:
            self._held[before].remove(place)
        self._owner[place] = member_id
        self._held[member_id].append(place)

    def next_move(self) -> tuple[TopicPartition, str] | None:
        """Return a partition of a member with two more than another, which could take it."""
        by_load = sorted(self._held, key=self.load)
        least = len(self._held[by_load[0]]) if by_load else 0
        for giver in reversed(by_load):
            if len(self._held[giver]) < least + 2:
                return None
            for taker in by_load:
                if len(self._held[taker]) > len(self._held[giver]) - 2:
                    break
                topics = self._members[taker].topics
                # The newest first: what a member has had for longest stays with it.
                for place in reversed(self._held[giver]):
                    if place.topic in topics:
                        return place, taker
        return None

    def result(self) -> dict[str, list[TopicPartition]]:
        return {member_id: sorted(held) for member_id, held in self._held.items()}
