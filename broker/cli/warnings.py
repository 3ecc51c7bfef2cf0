"""What the library warns of beside the command, on stderr."""

from __future__ import annotations

import logging
import threading

from broker.cli.ending import is_of_store

# Longer than a store may be silent before the command fails of it, too.
_HELD_SECONDS = 90.0


class Warnings(logging.StreamHandler):  # type: ignore[type-arg]
    """Says a warning about the store a while later: one line is enough if the command fails of it.

    Whoever maintains the topic beside the command, or keeps its place in a group, often meets the
    same store first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, logging.LogRecord] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple) or not any(map(is_of_store, record.args)):
            super().emit(record)
            return
        text = record.getMessage()
        if text not in self._held:
            self._held[text] = record
            later = threading.Timer(_HELD_SECONDS, self._let_out, [text])
            later.daemon = True
            later.start()

    def let_out(self) -> None:
        """Say all at once: the command does not fail of it."""
        for text in list(self._held):
            self._let_out(text)

    def drop(self) -> None:
        with self.lock:  # type: ignore[union-attr]
            self._held.clear()

    def _let_out(self, text: str) -> None:
        with self.lock:  # type: ignore[union-attr]
            record = self._held.pop(text, None)
            if record is not None:
                super().emit(record)
