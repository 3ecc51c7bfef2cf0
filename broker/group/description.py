"""A group as others see it: its members, its positions, and how far it is behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from broker.errors import UnknownTopic
from broker.group.assignment import common_strategy
from broker.group.state import GroupState, Position
from broker.reader import TopicReader
from broker.records import TopicPartition


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member and the partitions that it has.

    Args:
        silent_seconds: for how long it has not shown that it lives, by the clock of the files;
            None if it never has.
        is_silent: that is longer than its session timeout. It may be dead: others evict it only
            after they have watched it for so long.
    """

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    partitions: tuple[TopicPartition, ...]
    silent_seconds: float | None
    is_silent: bool


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a group is in one partition.

    Args:
        position: the next offset the group wants; None if it has none.
        is_lost: a power cut took records that the group had read, and others have their offsets.
        lag: the records from there to the end that are still kept; None without a position.
        lag_seconds: for how long the first of them has been there, by its timestamp.
        member_id: who reads it; None if nobody does.
    """

    partition: TopicPartition
    position: int | None
    start_offset: int
    end_offset: int
    lag: int | None
    lag_seconds: float | None
    member_id: str | None
    metadata: str
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as of one commit. `state` is empty, stable or rebalancing."""

    name: str
    state: str
    generation: int
    strategy: str | None
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionLag, ...]
    config: dict[str, Any]

    @property
    def lag(self) -> int:
        """The records that are still to be read, over all partitions with a position."""
        return sum(one.lag or 0 for one in self.partitions)

    @property
    def lag_seconds(self) -> float:
        """For how long the oldest of them has been there."""
        return max((one.lag_seconds or 0.0 for one in self.partitions), default=0.0)


def describe(
    name: str,
    state: GroupState,
    positions: Mapping[TopicPartition, Position],
    open_reader: Callable[[str], TopicReader],
    now_ms: int,
    silences: Mapping[str, float | None],
) -> GroupDescription:
    """Describe a group.

    Args:
        positions: those that are in topics of today.
        silences: for how many seconds each member has not shown that it lives.
    """
    places = {*positions, *state.owners, *state.target}
    members = tuple(
        MemberDescription(
            member.member_id,
            member.client_id,
            member.host,
            member.instance_id,
            tuple(sorted(state.owned_by(member.member_id))),
            silences[member.member_id],
            is_silent(silences[member.member_id], member.session_timeout_ms / 1000),
        )
        for member in state.members.values()
    )
    return GroupDescription(
        name=name,
        state=_condition(state),
        generation=state.generation,
        strategy=common_strategy([one.strategies for one in state.members.values()]),
        members=members,
        partitions=tuple(_lags(state, positions, places, open_reader, now_ms)),
        config=dict(state.config),
    )


def is_silent(silent_seconds: float | None, timeout_seconds: float) -> bool:
    """Tell whether a member looks dead: a hint, for clocks may differ."""
    return silent_seconds is None or not 0 <= silent_seconds < timeout_seconds


def _condition(state: GroupState) -> str:
    if not state.members:
        return "empty"
    owners = {place: owner.member_id for place, owner in state.owners.items()}
    return "rebalancing" if state.is_unsettled or owners != state.target else "stable"


def _lags(
    state: GroupState,
    positions: Mapping[TopicPartition, Position],
    places: Iterable[TopicPartition],
    open_reader: Callable[[str], TopicReader],
    now_ms: int,
) -> list[PartitionLag]:
    by_topic: dict[str, list[TopicPartition]] = {}
    for place in sorted(places):
        by_topic.setdefault(place.topic, []).append(place)
    lags = []
    for topic, many in by_topic.items():
        try:
            reader = open_reader(topic)
        except UnknownTopic:
            continue  # Deleted, and the group has not noticed yet.
        try:
            for place in many:
                if place.partition < reader.state.partition_count:
                    lags.append(_lag(state, positions.get(place), place, reader, now_ms))
        finally:
            reader.close()
    return lags


def _lag(
    state: GroupState,
    position: Position | None,
    place: TopicPartition,
    reader: TopicReader,
    now_ms: int,
) -> PartitionLag:
    start, end = reader.bounds(place.partition)
    owner = state.owners.get(place)
    lag: int | None = None
    seconds: float | None = None
    lost_from: int | None = None
    if position is not None:
        lost_from = position.lost_from(reader.state, place.partition)
        unread = max(position.offset if lost_from is None else lost_from, start)
        lag = max(0, end - unread)
        since = _timestamp(reader, place, unread) if lag else None
        seconds = 0.0 if since is None else max(0.0, (now_ms - since) / 1000)
    return PartitionLag(
        partition=place,
        position=None if position is None else position.offset,
        start_offset=start,
        end_offset=end,
        lag=lag,
        lag_seconds=seconds,
        member_id=None if owner is None else owner.member_id,
        metadata="" if position is None else position.metadata,
        is_lost=lost_from is not None,
    )


def _timestamp(reader: TopicReader, place: TopicPartition, offset: int) -> int | None:
    """Return the time of the next record in milliseconds; None if compaction left none."""
    for fetched in reader.fetch(place.partition, offset, 1):
        if fetched.batch.num_rows:
            stamp: int = fetched.batch.column("timestamp")[0].cast(pa.int64()).as_py()
            return stamp // 1000
    return None
