"""The state along the journal, and whether each commit is one that the state before it allows.

After damage some commits are unknown. What they may have changed is taken from the commits behind
them, without complaint, so that one damaged place is reported once.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker.commit import ROW, TRANSACTIONAL, Author, Commit, Kind
from broker.errors import LogError
from broker.state import TopicState


class Replay:
    """Applies commits to a state and says what about them cannot be."""

    def __init__(self, incarnation: int) -> None:
        self.state = TopicState(incarnation)
        self.is_whole = True
        self.trimmed_before = 0
        self._certain: set[int] = set()

    def skip_to(self, number: int) -> None:
        """Go on at this commit: those before it could not be read."""
        self.is_whole = False
        self._certain.clear()
        self.state.producers.clear()
        self.state.number = number

    def begin_file(self, number: int) -> None:
        """Go on with this file: the one before it has no readable end."""
        self.skip_to(number)
        self.state.file_number = number
        self.state.position = 0

    def adopt(self, known: TopicState) -> list[str]:
        """Go on from a checkpoint of this place; return what cannot be true of it.

        The commits before the journal's first file are gone, so only it can say what they said.
        """
        state, wrong = self.state, []
        for name in ("incarnation", "number", "time", "file_number", "position"):
            if getattr(known, name) != getattr(state, name) and state.position:
                wrong.append(name)
        if any(known.ends[partition : partition + 1] != [state.ends[partition]]
               for partition in self._certain):  # fmt: skip
            wrong.append("ends")
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
        if commit.kind is Kind.APPEND:
            yield from self._check_offsets(commit)
            yield from self._check_producer(commit)
        try:
            if commit.kind is Kind.RECOVER and self.is_whole:
                if commit.details()["ends"] != state.ends:
                    yield f"commit {commit.number} says other end offsets than the commits before"
            if commit.kind is Kind.TRIM:
                self.trimmed_before = max(self.trimmed_before, commit.details()["before"])
            state.apply(commit, path)
        except (LogError, LookupError, TypeError, ValueError) as error:
            # It may build on commits that are not known.
            if self.is_whole or not isinstance(error, LookupError):
                yield f"commit {commit.number} cannot be applied: {error!r}"
            self.skip_to(commit.number + 1)
            state.time = commit.time
            state.position = commit.position + commit.length

    def _check_offsets(self, commit: Commit) -> Iterator[str]:
        ends = self.state.ends
        for row in ROW.iter_unpack(commit.table):
            partition, base_offset, count = row[0], row[3], row[4]
            if partition >= len(ends):
                if self.is_whole:
                    yield f"commit {commit.number} names partition {partition} of {len(ends)}"
                self._add_partitions(partition + 1 - len(ends))
            end = ends[partition]
            is_doubtful = not self.is_whole and partition not in self._certain
            if base_offset < end or (base_offset > end and not is_doubtful):
                yield (
                    f"partition {partition} goes on at offset {base_offset} instead of {end} in "
                    f"commit {commit.number}"
                )
            self._certain.add(partition)
            ends[partition] = base_offset + count
        self._rewind(commit)

    def _add_partitions(self, count: int) -> None:
        state = self.state
        for offsets in (state.starts, state.ends, state.sealed_ends, state.cleaned_ends):
            offsets += [0] * count

    def _rewind(self, commit: Commit) -> None:
        """Let `ends` be such that the state accepts the commit: what is wrong has been said."""
        ends = self.state.ends
        for row in reversed(list(ROW.iter_unpack(commit.table))):
            ends[row[0]] = row[3]

    def _check_producer(self, commit: Commit) -> Iterator[str]:
        if not commit.producer_id:
            return
        if not self.is_whole and commit.producer_id not in self.state.producers:
            return
        is_transactional = bool(commit.flags & TRANSACTIONAL)
        author = Author(
            commit.token, commit.producer_id, commit.sequence, commit.epoch, is_transactional
        )
        try:
            is_repeated = self.state.repeated(author) is not None
        except LogError as error:
            yield f"commit {commit.number} is out of its producer's order: {error}"
        else:
            if is_repeated:
                yield f"commit {commit.number} repeats a commit that is in the journal already"
