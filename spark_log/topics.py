"""The topics that one query reads, and what they hold as of the last look."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import broker
from broker import TopicReader, UnknownPartition, UnknownTopic
from spark_log.offsets import LogOffset, TopicOffset
from spark_log.options import Selection

# How often topics are listed; on a store that is a request or more for each.
_LIST_SECONDS, _REMOTE_LIST_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic as of one look: the offsets [start, end) of each partition that is read."""

    name: str
    reader: TopicReader
    incarnation: int
    epoch: int
    bounds: dict[int, tuple[int, int]]
    cluster_id: str | None = None

    def is_of(self, offset: TopicOffset) -> bool:
        """Tell whether an offset is one in this topic, not in an earlier one of that name."""
        return self.incarnation == offset.incarnation and offset.cluster_id in (
            None,
            self.cluster_id,
        )

    def end_of_epoch(self, epoch: int, partition: int) -> int:
        """Return where an epoch's records end: what a power cut left of them."""
        if epoch >= self.epoch:
            return self.bounds[partition][1]
        return self.reader.state.end_of_epoch(epoch, partition)


Views = dict[str, TopicView]


class TopicSet:
    """Keeps a reader for each selected topic, and notices topics that come, go or come back.

    It notices as well that the whole log was removed and made again: that has another cluster id.
    """

    def __init__(
        self, log: broker.Log, selection: Selection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._selection = selection
        self._clock = clock
        self._cluster_id = log.cluster_id
        self._readers: dict[str, TopicReader] = {}
        self._listed: float | None = None
        # An idle query would ask what is new some eighty times a second.
        self._pause = log.pause()
        self._list_seconds = _REMOTE_LIST_SECONDS if self._pause.longest else _LIST_SECONDS
        self._views: Views | None = None

    def look(self, *, afresh: bool = False) -> Views:
        """Return what each topic holds now; a topic that does not exist is left out.

        Args:
            afresh: list the topics even if that was done a moment ago.
        """
        if self._views is not None and not afresh and not self._pause.may_look():
            return self._views
        while True:
            self._open_new(afresh)
            views = self._look_at_readers()
            if views is not None:
                break
            afresh = True
        if views != self._views:
            self._pause.changed()
        self._views = views
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
        self._views = None

    def _open_new(self, afresh: bool) -> None:
        now = self._clock()
        if not afresh and self._listed is not None and now - self._listed < self._list_seconds:
            return
        self._listed = now
        while True:
            for name in self._names():
                if name not in self._readers:
                    self._open(name)
            # After the readers were opened, so that none of them is of a later log than this.
            found = self._log.current_cluster_id()
            if found == self._cluster_id:
                return
            self.close()
            self._cluster_id = found

    def _names(self) -> Sequence[str]:
        if self._selection.pattern is None:
            return self._selection.names()
        return [name for name in self._log.topics() if self._selection.includes(name)]

    def _open(self, name: str) -> None:
        with contextlib.suppress(UnknownTopic):
            self._readers[name] = self._log.reader(name)

    def _look_at_readers(self) -> Views | None:
        """Return what each open topic holds; None if one is gone, so that all is opened anew."""
        views = {}
        for name in sorted(self._readers):
            try:
                views[name] = self._look_at(name, self._readers[name])
            except UnknownTopic:
                self._readers.pop(name).close()
                return None
        return views

    def _look_at(self, name: str, reader: TopicReader) -> TopicView:
        state = reader.refresh()
        partitions = self._selection.selected(name, state.partition_count)
        if partitions and partitions[-1] >= state.partition_count:
            raise UnknownPartition(name, partitions[-1], state.partition_count)
        bounds = {number: (state.starts[number], state.ends[number]) for number in partitions}
        return TopicView(name, reader, state.incarnation, state.epoch, bounds, self._cluster_id)


def offset_at(views: Views, positions: dict[str, dict[int, int]]) -> LogOffset:
    """Return these positions as an offset, in today's incarnations and epochs."""
    return LogOffset(
        {
            name: TopicOffset(positions[name], view.incarnation, view.epoch, view.cluster_id)
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
