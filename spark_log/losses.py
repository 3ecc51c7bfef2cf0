"""From two offsets to the records between them, and what of those is gone.

Pure: a query that reads (start, end) gets the same ranges each time, as long as the log holds them.
What it does not hold any more is named offset by offset; whoever called decides what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from broker import LogError
from spark_log.offsets import LogOffset, TopicOffset
from spark_log.topics import TopicView, Views

logger = logging.getLogger(__name__)

REMOVED = "were removed by retention or delete_records"
DELETED = "are gone: the topic was deleted"
_MADE_AGAIN = "are gone: the topic was deleted and made again"
_LOG_MADE_AGAIN = "are gone: the log was removed and made again, or is another one"
_NOT_READ = "will not be read: the query does not select this partition any more"
_LOST_UNREAD = "were lost in a power cut before they were read"
_LOST_READ = (
    "were read by this query, or the group it starts from, and then lost in a power cut; the log "
    "has given, or will give, the same offsets to other records, and reading goes on with those"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets [start, end) of a partition that cannot be read. No end: all from `start` on.

    Log, incarnation and epoch tell it from the loss of other records that had the same offsets.
    """

    topic: str
    partition: int
    start: int
    end: int | None
    reason: str
    incarnation: int | None = None
    epoch: int = 0
    cluster_id: str | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the offsets."""
        where = self.topic, self.partition, self.reason
        return *where, self.incarnation, self.epoch, self.cluster_id

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.topic}-{self.partition}: offsets from {self.start} on {self.reason}"
        return f"{self.topic}-{self.partition}: offsets [{self.start}, {self.end}) {self.reason}"


class DataLoss(LogError):
    """Records that a query should have read are gone, and it was not told to go on without them."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        super().__init__(losses)
        self.losses = losses

    def __str__(self) -> str:
        return (
            "Some data may have been lost because it is not available in the log any more. "
            f"{describe(self.losses)}. If you don't want your query to fail on such cases, set the "
            "source option failOnDataLoss to false."
        )


def report(losses: Sequence[Loss], *, fail: bool, known: set[Loss]) -> None:
    """Fail because of losses, or say once what they are: of those said before, only what is new."""
    if losses and fail:
        raise DataLoss(losses)
    new = [rest for loss in losses if (rest := _without(loss, known)) is not None]
    known.update(new)
    if new:
        logger.warning("data loss, and failOnDataLoss=false: %s", describe(new))


def describe(losses: Sequence[Loss]) -> str:
    return "; ".join(map(str, merge(losses)))


def merge(losses: Iterable[Loss]) -> list[Loss]:
    """Make one of losses that follow each other, as those of a partition's files do."""
    merged: list[Loss] = []
    for loss in losses:
        place = next((at for at, one in enumerate(merged)
                      if one.kind == loss.kind and one.end == loss.start), None)  # fmt: skip
        if place is None:
            merged.append(loss)
        else:
            merged[place] = replace(merged[place], end=loss.end)
    return merged


def _without(loss: Loss, known: Iterable[Loss]) -> Loss | None:
    """Return what of a loss lies behind those that are known; None if nothing does."""
    start = loss.start
    for one in sorted((one for one in known if one.kind == loss.kind), key=lambda one: one.start):
        if one.start <= start and one.end is None:
            return None
        if one.end is not None and one.start <= start < one.end:
            start = one.end
    return replace(loss, start=start) if loss.end is None or start < loss.end else None


@dataclass(slots=True)
class Ranges:
    """What to read, topic -> partition -> [start, end), and what is lost."""

    found: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)

    @property
    def offset_count(self) -> int:
        return sum(end - start for _, _, start, end in self)

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        for topic, ranges in self.found.items():
            for partition, (start, end) in ranges.items():
                yield topic, partition, start, end


def between(
    start: LogOffset, end: LogOffset, views: Views, is_selected: Callable[[str], bool]
) -> Ranges:
    """Return what lies between two offsets as far as the log still holds it.

    A partition that only `end` knows is new, and read from its first offset.
    """
    ranges = Ranges()
    for name, topic in start.topics.items():
        if name not in end.topics:
            reason = DELETED if is_selected(name) else _NOT_READ
            ranges.losses += [_from(name, number, topic, reason) for number in topic.positions]
    for name, topic in end.topics.items():
        _topic_between(name, start.topics.get(name), topic, views.get(name), ranges)
    return ranges


def _from(name: str, partition: int, topic: TopicOffset, reason: str) -> Loss:
    start = topic.positions[partition]
    return Loss(
        name, partition, start, None, reason, topic.incarnation, topic.epoch, topic.cluster_id
    )


def _topic_between(
    name: str, start: TopicOffset | None, end: TopicOffset, view: TopicView | None, ranges: Ranges
) -> None:
    made_again = None if start is None else _made_again(start, end)
    if start is not None and made_again is not None:
        ranges.losses += [_from(name, number, start, made_again) for number in start.positions]
        start = None
    if start is not None:
        missing = start.positions.keys() - end.positions.keys()
        ranges.losses += [_from(name, number, start, _NOT_READ) for number in sorted(missing)]
    found = ranges.found.setdefault(name, {})
    for partition, stop in end.positions.items():
        begin = 0 if start is None else start.positions.get(partition, 0)
        gone = DELETED if view is None else _made_again(end, view)
        if view is None or gone is not None:
            if begin < stop:
                lost = _from(name, partition, end, gone or DELETED)
                ranges.losses.append(replace(lost, start=begin, end=stop))
            continue
        epochs = (view.epoch if start is None else start.epoch, end.epoch)
        begin, stop = _held(view, partition, begin, stop, epochs, ranges.losses)
        found[partition] = begin, max(begin, stop)


def _held(
    view: TopicView,
    partition: int,
    begin: int,
    stop: int,
    epochs: tuple[int, int],
    losses: list[Loss],
) -> tuple[int, int]:
    """Return the part of [begin, stop) that the log holds, and note the rest."""

    def lose(start: int, end: int, reason: str, epoch: int) -> None:
        losses.append(_of(view, partition, start, end, reason, epoch))

    if partition not in view.bounds:
        lose(begin, stop, _NOT_READ, epochs[1])
        return begin, begin
    low, _high = view.bounds[partition]
    stop_end = view.end_of_epoch(epochs[1], partition)
    begin = survived(view, partition, begin, epochs[0], losses)
    if stop > stop_end:
        if begin < stop:
            lose(max(begin, stop_end), stop, _LOST_UNREAD, epochs[1])
        stop = stop_end
    if begin < low:
        if begin < stop:
            lose(begin, min(low, stop), REMOVED, epochs[1])
        begin = min(low, stop) if begin < stop else begin
    return begin, stop


def survived(view: TopicView, partition: int, at: int, epoch: int, losses: list[Loss]) -> int:
    """Return how far what was read up to `at` in `epoch` is still there, and note the rest."""
    end = view.end_of_epoch(epoch, partition)
    if at > end:
        losses.append(_of(view, partition, end, at, _LOST_READ, epoch))
    return min(at, end)


def _of(view: TopicView, partition: int, start: int, end: int, reason: str, epoch: int) -> Loss:
    return Loss(view.name, partition, start, end, reason, view.incarnation, epoch, view.cluster_id)


def _made_again(before: TopicOffset, now: TopicOffset | TopicView) -> str | None:
    """Return why offsets are those of other records; None if they are not, or nobody knows."""
    if _differ(before.cluster_id, now.cluster_id):
        return _LOG_MADE_AGAIN
    return _MADE_AGAIN if _differ(before.incarnation, now.incarnation) else None


def _differ(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other
