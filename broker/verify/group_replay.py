"""The state along a group's journal: who may say what, by the state before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from broker.commit import Commit, Kind
from broker.group.state import GroupState, parse_places
from broker.records import TopicPartition
from broker.verify.replay import Replay


class GroupReplay(Replay[GroupState]):
    """Replays a group."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(GroupState(incarnation))
        self._name = name
        # Positions that were committed since commits were skipped.
        self._certain: set[TopicPartition] = set()

    def _forget(self) -> None:
        self._certain.clear()

    def _disagreements(self, known: GroupState) -> Iterator[str]:
        here = self.state.positions
        if any(known.positions.get(place) != here[place] for place in self._certain):
            yield "positions"

    def _check(self, commit: Commit) -> Iterator[str]:
        if commit.table:
            yield f"commit {commit.number} holds records, and a group has none"
        details = commit.details()
        check = _CHECKS.get(commit.kind)
        # What an unknown commit may have changed is not held against those behind it.
        if check is not None and (self.is_whole or commit.kind is Kind.CREATE):
            for what in check(self, details):
                yield f"commit {commit.number} {what}"
        if commit.kind is Kind.POSITION:
            self._certain.update(_places_of_positions(details))
        elif commit.kind is Kind.FORGET:
            self._certain.difference_update(parse_places(details["positions"]))

    def _create(self, details: dict[str, Any]) -> Iterator[str]:
        if details["group"] != self._name:
            yield f"makes group {details['group']!r}"

    def _recover(self, details: dict[str, Any]) -> Iterator[str]:
        if details["epoch"] != self.state.epoch + 1:
            yield f"begins epoch {details['epoch']} after {self.state.epoch}"

    def _join(self, details: dict[str, Any]) -> Iterator[str]:
        if details["member"] in self.state.members:
            yield f"lets {details['member']} join, which is a member"
        replaced = details.get("replaces")
        if replaced is not None:
            old = self.state.members.get(replaced)
            if old is None or old.instance_id != details["instance"]:
                yield f"replaces {replaced}, which is no member of instance {details['instance']!r}"

    def _leave(self, details: dict[str, Any]) -> Iterator[str]:
        yield from self._no_members([details["member"]])

    def _evict(self, details: dict[str, Any]) -> Iterator[str]:
        yield from self._no_members(details["members"])

    def _release(self, details: dict[str, Any]) -> Iterator[str]:
        for place in parse_places(details["partitions"]):
            yield from self._not_owner(place, details["member"], None)

    def _assign(self, details: dict[str, Any]) -> Iterator[str]:
        if details["generation"] != self.state.generation + 1:
            yield f"begins generation {details['generation']} after {self.state.generation}"
        yield from self._no_members(details["members"])

    def _position(self, details: dict[str, Any]) -> Iterator[str]:
        if "member" not in details:
            yield from self._not_empty("from outside")
            return
        generation = details["generation"]
        if generation > self.state.generation:
            yield f"names generation {generation}, and there are {self.state.generation}"
        for place in _places_of_positions(details):
            yield from self._not_owner(place, details["member"], generation)

    def _forget_positions(self, details: dict[str, Any]) -> Iterator[str]:
        yield from self._not_empty("removed")

    def _no_members(self, member_ids: Any) -> Iterator[str]:
        for member_id in member_ids:
            if member_id not in self.state.members:
                yield f"names {member_id}, which is no member"

    def _not_empty(self, how: str) -> Iterator[str]:
        if self.state.members:
            yield f"has positions {how} while the group has {len(self.state.members)} members"

    def _not_owner(
        self, place: TopicPartition, member_id: str, generation: int | None
    ) -> Iterator[str]:
        owner = self.state.owners.get(place)
        is_late = owner is not None and generation is not None and generation < owner.generation
        if owner is None or owner.member_id != member_id or is_late:
            yield f"is of {member_id}, which does not own {place.topic}-{place.partition}"


def _places_of_positions(details: dict[str, Any]) -> list[TopicPartition]:
    return [
        TopicPartition(topic, int(partition))
        for topic, (_incarnation, _epoch, offsets) in details["positions"].items()
        for partition in offsets
    ]


_CHECKS = {
    Kind.CREATE: GroupReplay._create,
    Kind.RECOVER: GroupReplay._recover,
    Kind.JOIN: GroupReplay._join,
    Kind.LEAVE: GroupReplay._leave,
    Kind.EVICT: GroupReplay._evict,
    Kind.RELEASE: GroupReplay._release,
    Kind.ASSIGN: GroupReplay._assign,
    Kind.POSITION: GroupReplay._position,
    Kind.FORGET: GroupReplay._forget_positions,
}
