"""The topics that one query reads, and what they hold as of the last look."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import broker
from broker import TopicReader, UnknownPartition, UnknownTopic
from spark_log.offsets import LogOffset, TopicOffset
from spark_log.options import Selection

# How often topics are listed. An idle query asks what is new some eighty times a second.
_LIST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic as of one look: the offsets [start, end) of each partition that is read."""

    name: str
    reader: TopicReader
    incarnation: int
    epoch: int
    bounds: dict[int, tuple[int, int]]

    def end_of_epoch(self, epoch: int, partition: int) -> int:
        """Return where an epoch's records end: what a power cut left of them."""
        if epoch >= self.epoch:
            return self.bounds[partition][1]
        return self.reader.state.end_of_epoch(epoch, partition)


Views = dict[str, TopicView]


class TopicSet:
    """Keeps a reader for each selected topic, and notices topics that come, go or come back."""

    def __init__(
        self, log: broker.Log, selection: Selection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._selection = selection
        self._clock = clock
        self._readers: dict[str, TopicReader] = {}
        self._listed: float | None = None

    def look(self, *, afresh: bool = False) -> Views:
        """Return what each topic holds now; a topic that does not exist is left out.

        Args:
            afresh: list the topics even if that was done a moment ago.
        """
        self._open_new(afresh)
        views = {}
        for name in sorted(self._readers):
            view = self._look_at(name)
            if view is not None:
                views[name] = view
        return views

    def look_at_all(self) -> Views:
        """Return what each topic holds now; all that were named must be there."""
        views = self.look(afresh=True)
        for name in self._selection.names():
            if name not in views:
                raise UnknownTopic(
                    name,
                    f"does not exist in {self._log.root}",
                    "check option subscribe or assign, or create the topic first",
                )
        return views

    def check(self) -> None:
        """Raise if a topic or partition that was named is not there."""
        try:
            self.look_at_all()
        finally:
            self.close()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _open_new(self, afresh: bool) -> None:
        now = self._clock()
        if not afresh and self._listed is not None and now - self._listed < _LIST_SECONDS:
            return
        self._listed = now
        names = list(self._selection.names())
        if self._selection.pattern is not None:
            names = [name for name in self._log.topics() if self._selection.includes(name)]
        for name in names:
            if name not in self._readers:
                self._open(name)

    def _open(self, name: str) -> bool:
        try:
            self._readers[name] = self._log.reader(name)
            return True
        except UnknownTopic:
            return False

    def _look_at(self, name: str) -> TopicView | None:
        try:
            state = self._readers[name].refresh()
        except UnknownTopic:
            self._readers.pop(name).close()
            if not self._open(name):
                return None
            state = self._readers[name].refresh()
        partitions = self._selection.selected(name, state.partition_count)
        if partitions and partitions[-1] >= state.partition_count:
            raise UnknownPartition(name, partitions[-1], state.partition_count)
        bounds = {number: (state.starts[number], state.ends[number]) for number in partitions}
        return TopicView(name, self._readers[name], state.incarnation, state.epoch, bounds)


def offset_at(views: Views, positions: dict[str, dict[int, int]]) -> LogOffset:
    """Return these positions as an offset, in today's incarnations and epochs."""
    return LogOffset(
        {
            name: TopicOffset(positions[name], view.incarnation, view.epoch)
            for name, view in views.items()
        }
    )


def latest(views: Views) -> LogOffset:
    return offset_at(
        views,
        {
            name: {number: end for number, (_start, end) in view.bounds.items()}
            for name, view in views.items()
        },
    )
