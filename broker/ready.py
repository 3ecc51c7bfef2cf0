"""Units on their way from the queue to a commit: encoded, and what is large written to a file."""

from __future__ import annotations

from concurrent.futures import wait

from broker.batch import Frame
from broker.data_file import DataFile
from broker.sending import Placed, Unit
from broker.topic import Topic
from broker.topic_writer import TopicWriter
from broker.workers import Workers

_BY_REFERENCE_BYTES_MIN = 1 << 20


class ReadyUnit:
    """A unit that is encoded; what is large may be on its way into a file already."""

    __slots__ = ("_is_large", "_placed", "_placing", "frames", "unit", "writer")

    def __init__(
        self, unit: Unit, writer: TopicWriter, frames: Placed, ahead: Workers | None
    ) -> None:
        self.unit = unit
        self.writer = writer
        self.frames = frames
        self._is_large = _is_large(writer.topic, frames)
        self._placed = None if self._is_large else frames
        self._placing = (
            ahead.submit(_by_reference, writer.topic, frames) if ahead and self._is_large else None
        )

    @property
    def is_placed(self) -> bool:
        """Tell whether a commit could hold it at once."""
        if self._placing is None:
            return self._placed is not None
        return self._placing.done() and self._placing.exception() is None

    def wait(self) -> None:
        """Return when its file is written, or could not be."""
        if self._placing is not None:
            wait([self._placing])

    def place(self) -> Placed:
        """Return what a commit is to hold; if that failed, another call tries it again.

        Once a file is written, every commit that is tried names the same.
        """
        if self._placed is None:
            placing, self._placing = self._placing, None
            self._placed = (
                _by_reference(self.writer.topic, self.frames)
                if placing is None
                else placing.result()
            )
        return self._placed


def _is_large(topic: Topic, frames: Placed) -> bool:
    """Tell whether frames go to a file of their own: where commits are objects, merged later.

    What is in that file is written once; what is in the commit itself is written again then.
    """
    if not topic.storage.is_remote:
        return False
    size = sum(frame.byte_length for _, frame in frames if isinstance(frame, Frame))
    return size >= _BY_REFERENCE_BYTES_MIN


def _by_reference(topic: Topic, frames: Placed) -> Placed:
    """Write frames to a file of their own, which a commit may name then."""
    file = DataFile(topic.storage, topic.directory)
    try:
        placed: Placed = [
            (partition, file.add(frame) if isinstance(frame, Frame) else frame)
            for partition, frame in frames
        ]
        file.finish()
    except BaseException:
        file.discard()
        raise
    return placed
