"""The state along a journal, and whether each commit is one that the state before it allows.

After damage some commits are unknown. What they may have changed is taken from the commits behind
them, without complaint, so that one damaged place is reported once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic

from broker.commit import Commit, Kind
from broker.errors import LogError
from broker.ledger import State


class Replay(ABC, Generic[State]):
    """Applies commits to a state and says what about them cannot be."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.is_whole = True

    @abstractmethod
    def _check(self, commit: Commit) -> Iterator[str]:
        """Yield what the state before it does not allow, and make ready for it to be applied."""

    @abstractmethod
    def _forget(self) -> None:
        """Commits were skipped: forget what they may have changed."""

    @abstractmethod
    def _disagreements(self, known: State) -> Iterator[str]:
        """Yield in what a checkpoint of this place says otherwise than what is certain here."""

    def skip_to(self, number: int) -> None:
        """Go on at this commit: those before it could not be read."""
        self.is_whole = False
        self._forget()
        self.state.number = number

    def begin_file(self, number: int) -> None:
        """Go on with this file: the one before it has no readable end."""
        self.skip_to(number)
        self.state.file_number = number
        self.state.position = 0
        # A file before may have been left by a writer who woke up long after it was removed.
        self.state.time = 0

    def adopt(self, known: State) -> list[str]:
        """Go on from a checkpoint of this place; return what cannot be true of it.

        The commits before the journal's first file are gone, so only it can say what they said.
        """
        state, wrong = self.state, []
        for name in ("incarnation", "number", "time", "file_number", "position"):
            if getattr(known, name) != getattr(state, name) and state.position:
                wrong.append(name)
        wrong += self._disagreements(known)
        if not wrong:
            self.state, self.is_whole = known, True
        return wrong

    def apply(self, commit: Commit, path: str) -> Iterator[str]:
        """Yield what is wrong with the commit, then let the state move on by it."""
        state = self.state
        if commit.time < state.time:
            yield f"commit {commit.number} is older than the one before it"
        if (commit.kind is Kind.CREATE) != (commit.number == 0):
            yield f"commit {commit.number} is of kind {commit.kind.name}"
        try:
            yield from self._check(commit)
            state.apply(commit, path)
        except (LogError, LookupError, TypeError, ValueError) as error:
            # It may build on commits that are not known.
            if self.is_whole or not isinstance(error, LookupError):
                yield f"commit {commit.number} cannot be applied: {error!r}"
            self.skip_to(commit.number + 1)
            state.time = commit.time
            state.position = commit.position + commit.length
