"""From what the user asked for (earliest, a time, offsets) to one offset of each partition."""

from __future__ import annotations

from collections.abc import Mapping

from broker import InvalidOption, Position, TopicPartition
from spark_log.losses import Loss, survived
from spark_log.options import (
    EARLIEST,
    LATEST,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    OFFSETS,
    TIMESTAMP,
    Edge,
    Offsets,
)
from spark_log.topics import TopicView, Views


def find(edge: Edge, views: Views, *, latest_if_no_time: bool) -> Offsets:
    """Return the offset of each partition at which a read starts or ends.

    Args:
        latest_if_no_time: what no record has reached yet means the end; otherwise it is an error.
    """
    if edge.values:
        _check_partitions(edge, views)
    return {
        name: {number: _find_one(edge, view, number, latest_if_no_time) for number in view.bounds}
        for name, view in views.items()
    }


def find_of_group(
    held: Mapping[TopicPartition, Position], views: Views, *, fallback: str
) -> tuple[Offsets, list[Loss]]:
    """Return where a consumer group is, in the topics of today, and what it had read and is gone.

    In a topic in which it has no position at all, that is `fallback`. In another, a partition
    without a position was added since, and is read from its first record.
    """
    held = {
        place: position
        for place, position in held.items()
        if place.topic in views and views[place.topic].incarnation == position.incarnation
    }
    known = {place.topic for place in held}
    found: dict[str, dict[int, int]] = {}
    losses: list[Loss] = []
    for name, view in views.items():
        is_at_end = fallback == LATEST and name not in known
        found[name] = {}
        for number, (start, end) in view.bounds.items():
            position = held.get(TopicPartition(name, number))
            if position is None:
                found[name][number] = end if is_at_end else start
            else:
                at, epoch = position.offset, position.epoch
                found[name][number] = survived(view, number, at, epoch, losses)
    return found, losses


def _find_one(edge: Edge, view: TopicView, partition: int, latest_if_no_time: bool) -> int:
    start, end = view.bounds[partition]
    if edge.kind == EARLIEST:
        return start
    if edge.kind == LATEST:
        return end
    if edge.kind == OFFSETS:
        return _given(edge, view, partition)
    timestamp_ms = edge.timestamp_ms
    if edge.kind != TIMESTAMP:
        timestamp_ms = edge.values[view.name][partition]
    found = view.reader.offset_for_time(partition, timestamp_ms * 1000)
    if found is not None:
        return min(found.offset, end)
    if latest_if_no_time:
        return end
    raise InvalidOption(
        f"No offset matched from request of topic-partition {view.name}-{partition} and timestamp "
        f"{timestamp_ms} ({edge.option}). Set startingOffsetsByTimestampStrategy=latest to start "
        "at the end then."
    )


def _given(edge: Edge, view: TopicView, partition: int) -> int:
    start, end = view.bounds[partition]
    offset = edge.values[view.name][partition]
    if offset == OFFSET_EARLIEST:
        return start
    if offset == OFFSET_LATEST:
        return end
    if offset > end:
        raise InvalidOption(
            f"{edge.option} for {view.name}-{partition} is {offset}, but the partition holds "
            f"[{start}, {end})"
        )
    return offset


def _check_partitions(edge: Edge, views: Views) -> None:
    given = {(name, number) for name, values in edge.values.items() for number in values}
    assigned = {(name, number) for name, view in views.items() for number in view.bounds}
    if given != assigned:
        hint = "Use -1 for latest, -2 for earliest, if you don't care.\n"
        raise InvalidOption(
            f"If {edge.option} contains specific values, you must specify all TopicPartitions.\n"
            f"{hint if edge.kind == OFFSETS else ''}"
            f"Specified: {_list(given)} Assigned: {_list(assigned)}"
        )


def _list(places: set[tuple[str, int]]) -> str:
    return "{" + ", ".join(f"{name}-{number}" for name, number in sorted(places)) + "}"
