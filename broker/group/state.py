"""The state that a group's journal describes: a pure function of its commits.

Nothing in this module reads a clock or a file; what depends on time was decided by whoever noticed
it, and is in the commits.

Each partition has at most one owner. `target` says who is to have it: an `assign` commit sets the
targets and gives away only what nobody owns; an owner that is no longer the target releases the
partition, and from that commit on it is the target's. So a partition is always given up before
another member gets it, and everybody else goes on reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker.commit import Commit, Kind
from broker.errors import CorruptLog, UnknownPartition
from broker.records import TopicPartition
from broker.state import TopicState


class Position(NamedTuple):
    """Where a group goes on in one partition: the offset of the next record it wants.

    Incarnation and epoch are those of the topic when it was committed: a position in a topic that
    was deleted since, or above what survived a power cut, is not one in the topic of today.
    """

    offset: int
    incarnation: int
    epoch: int
    time: int = 0
    metadata: str = ""

    def lost_from(self, topic: TopicState, partition: int) -> int | None:
        """Return from where on what was read up to here is gone; None if all of it is there.

        Today's end does not tell: it may have grown over the position again, with other records.
        """
        survived = topic.end_of_epoch(self.epoch, partition)
        return survived if self.offset > survived else None


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer in the group, from one join on: another join is another member.

    Args:
        instance_id: the name under which a static member comes back.
        topics: what it wants by name; with a pattern, all topics that fit it.
        strategies: the assignment strategies it knows, the best first.
    """

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    topics: tuple[str, ...]
    pattern: str | None
    strategies: tuple[str, ...]
    session_timeout_ms: int

    def details(self) -> dict[str, Any]:
        """Return what a `join` commit says."""
        return {
            "member": self.member_id,
            "client": self.client_id,
            "host": self.host,
            "instance": self.instance_id,
            "topics": list(self.topics),
            "pattern": self.pattern,
            "strategies": list(self.strategies),
            "session_timeout_ms": self.session_timeout_ms,
        }

    @classmethod
    def parse(cls, details: Mapping[str, Any]) -> Member:
        return cls(
            member_id=details["member"],
            client_id=details["client"],
            host=details["host"],
            instance_id=details["instance"],
            topics=tuple(details["topics"]),
            pattern=details["pattern"],
            strategies=tuple(details["strategies"]),
            session_timeout_ms=details["session_timeout_ms"],
        )

    def wants_the_same_as(self, other: Member) -> bool:
        return (self.topics, self.pattern, self.strategies) == (
            other.topics,
            other.pattern,
            other.strategies,
        )


class Owner(NamedTuple):
    """Who has a partition, and since which generation."""

    member_id: str
    generation: int


class KnownTopic(NamedTuple):
    """A topic as the last assignment saw it."""

    incarnation: int
    partition_count: int


@dataclass(slots=True)
class GroupState:
    """What the commits before `number` say.

    Args:
        members: by id, in the order in which they joined.
        owners: the member that has each partition now.
        target: the member that is to have each partition.
        topics: the topics that the last assignment was made for.
        late: partitions that appeared after the group had begun, and have no position yet.
        is_unsettled: members came or went since the last assignment.
        version: grows with every change of members, owners or targets.
        empty_since: the time of the commit that left the group without members.
    """

    incarnation: int
    number: int = 0
    time: int = 0
    epoch: int = 0
    file_number: int = 0
    position: int = 0
    is_deleted: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    owners: dict[TopicPartition, Owner] = field(default_factory=dict)
    target: dict[TopicPartition, str] = field(default_factory=dict)
    topics: dict[str, KnownTopic] = field(default_factory=dict)
    late: set[TopicPartition] = field(default_factory=set)
    is_unsettled: bool = False
    empty_since: int = 0
    positions: dict[TopicPartition, Position] = field(default_factory=dict)

    def apply(self, commit: Commit, path: str) -> None:
        """Move on by one commit; its number and position were checked when it was read."""
        act = _APPLY.get(commit.kind)
        if act is None:
            raise CorruptLog(path, commit.position, f"a group has no {commit.kind.name} commit")
        act(self, commit)
        self.number = commit.number + 1
        self.time = commit.time
        self.position = commit.position + commit.length
        if commit.kind is Kind.END_OF_FILE:
            self.file_number, self.position = self.number, 0

    def apply_positions(
        self, positions: Mapping[TopicPartition, Position], time: int, length: int
    ) -> None:
        """Move on by a position commit that this process has just written itself."""
        for place, (offset, incarnation, epoch, _time, note) in positions.items():
            self.positions[place] = Position(offset, incarnation, epoch, time, note)
        if self.late:
            self.late.difference_update(positions)
        self.number += 1
        self.time = time
        self.position += length

    # What one may ask.

    def owned_by(self, member_id: str) -> dict[TopicPartition, Owner]:
        return {place: who for place, who in self.owners.items() if who.member_id == member_id}

    def to_release(self, member_id: str) -> list[TopicPartition]:
        """Return what a member has and is to give up."""
        return [
            place
            for place, who in self.owners.items()
            if who.member_id == member_id and self.target.get(place) != member_id
        ]

    def instance(self, instance_id: str) -> Member | None:
        """Return the member that goes by this name now."""
        for member in self.members.values():
            if member.instance_id == instance_id:
                return member
        return None

    def expired_positions(self, now: int) -> list[TopicPartition]:
        """Return the positions that are older than the group's setting, if it has one."""
        minutes = self.config.get("offsets.retention.minutes")
        if minutes is None or self.members:
            return []
        oldest = now - minutes * 60_000
        return [
            place
            for place, position in self.positions.items()
            if max(position.time, self.empty_since) < oldest
        ]

    # What each commit does.

    def _nothing(self, commit: Commit) -> None:
        pass

    def _delete(self, commit: Commit) -> None:
        self.is_deleted = True
        self.version += 1

    def _configure(self, commit: Commit) -> None:
        self.config = commit.details()["config"]

    def _recover(self, commit: Commit) -> None:
        self.epoch = commit.details()["epoch"]

    def _join(self, commit: Commit) -> None:
        details = commit.details()
        member = Member.parse(details)
        old = self.members.get(details.get("replaces") or "")
        if old is None:
            self.members[member.member_id] = member
            self.is_unsettled = True
        else:
            self._replace(old, member)
        self.version += 1

    def _replace(self, old: Member, new: Member) -> None:
        """A static member is back: it has what it had, and its place among the others."""
        self.members = {
            new.member_id if key == old.member_id else key: new if one is old else one
            for key, one in self.members.items()
        }
        for place, owner in self.owned_by(old.member_id).items():
            self.owners[place] = Owner(new.member_id, owner.generation)
        for place, member_id in self.target.items():
            if member_id == old.member_id:
                self.target[place] = new.member_id
        self.is_unsettled = self.is_unsettled or not new.wants_the_same_as(old)

    def _leave(self, commit: Commit) -> None:
        self._remove([commit.details()["member"]], commit.time)

    def _evict(self, commit: Commit) -> None:
        self._remove(commit.details()["members"], commit.time)

    def _remove(self, member_ids: Iterable[str], time: int) -> None:
        gone = {member_id for member_id in member_ids if self.members.pop(member_id, None)}
        self.owners = {p: who for p, who in self.owners.items() if who.member_id not in gone}
        self.target = {
            p: member_id for p, member_id in self.target.items() if member_id not in gone
        }
        self.is_unsettled = bool(self.members)
        if not self.members:
            self.empty_since = time
        self.version += 1

    def _release(self, commit: Commit) -> None:
        details = commit.details()
        for place in parse_places(details["partitions"]):
            owner = self.owners.get(place)
            if owner is None or owner.member_id != details["member"]:
                continue
            del self.owners[place]
            if place in self.target:
                self.owners[place] = Owner(self.target[place], self.generation)
        self.version += 1

    def _assign(self, commit: Commit) -> None:
        details = commit.details()
        self.generation = details["generation"]
        topics = {name: KnownTopic(*known) for name, known in details["topics"].items()}
        self._note_late(topics)
        self.topics = topics
        self.target = {
            place: member_id
            for member_id, places in details["members"].items()
            for place in parse_places(places)
        }
        for place, member_id in self.target.items():
            if place not in self.owners:
                self.owners[place] = Owner(member_id, self.generation)
        self.is_unsettled = False
        self.version += 1

    def _note_late(self, topics: Mapping[str, KnownTopic]) -> None:
        """Remember partitions that appeared, or a reader from the latest would miss a part."""
        if not self.topics:
            return
        for name, now in topics.items():
            before = self.topics.get(name)
            if before is None and self.is_unsettled:
                continue  # A new member may have brought it.
            known = before.partition_count if before is not None else 0
            self.late.update(TopicPartition(name, p) for p in range(known, now.partition_count))

    def _take_positions(self, commit: Commit) -> None:
        details = commit.details()
        metadata: dict[str, Any] = details.get("metadata", {})
        for topic, (incarnation, epoch, offsets) in details["positions"].items():
            notes = metadata.get(topic, {})
            for partition, offset in offsets.items():
                place = TopicPartition(topic, int(partition))
                self.positions[place] = Position(
                    offset, incarnation, epoch, commit.time, notes.get(partition, "")
                )
                self.late.discard(place)

    def _forget(self, commit: Commit) -> None:
        for place in parse_places(commit.details()["positions"]):
            self.positions.pop(place, None)


def check_partition(place: TopicPartition, topic: TopicState) -> None:
    """Refuse a position in a partition that does not exist."""
    if not 0 <= place.partition < topic.partition_count:
        raise UnknownPartition(place.topic, place.partition, topic.partition_count)


def format_places(places: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return partitions as commits name them: {topic: [partition]}."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in places:
        by_topic.setdefault(topic, []).append(partition)
    return by_topic


def parse_places(by_topic: Mapping[str, Iterable[int]]) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for topic, many in by_topic.items() for number in many]


_APPLY = {
    Kind.CREATE: GroupState._nothing,
    Kind.CONFIG: GroupState._configure,
    Kind.DELETE: GroupState._delete,
    Kind.END_OF_FILE: GroupState._nothing,
    Kind.RECOVER: GroupState._recover,
    Kind.JOIN: GroupState._join,
    Kind.LEAVE: GroupState._leave,
    Kind.EVICT: GroupState._evict,
    Kind.RELEASE: GroupState._release,
    Kind.ASSIGN: GroupState._assign,
    Kind.POSITION: GroupState._take_positions,
    Kind.FORGET: GroupState._forget,
}
