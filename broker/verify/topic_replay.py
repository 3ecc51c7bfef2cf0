"""The state along a topic's journal: offsets without a gap, producers in their order."""

from __future__ import annotations

from collections.abc import Iterator

from broker.commit import ROW, TRANSACTIONAL, Author, Commit, Kind
from broker.errors import LogError
from broker.state import TopicState
from broker.verify.replay import Replay


class TopicReplay(Replay[TopicState]):
    """Replays a topic."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(TopicState(incarnation))
        self.trimmed_before = 0
        self._certain: set[int] = set()

    def _forget(self) -> None:
        self._certain.clear()
        self.state.producers.clear()

    def _disagreements(self, known: TopicState) -> Iterator[str]:
        if any(known.ends[partition : partition + 1] != [self.state.ends[partition]]
               for partition in self._certain):  # fmt: skip
            yield "ends"

    def _check(self, commit: Commit) -> Iterator[str]:
        if commit.kind is Kind.APPEND:
            yield from self._check_offsets(commit)
            yield from self._check_producer(commit)
        elif commit.kind is Kind.RECOVER and self.is_whole:
            if commit.details()["ends"] != self.state.ends:
                yield f"commit {commit.number} says other end offsets than the commits before"
        elif commit.kind is Kind.TRIM:
            self.trimmed_before = max(self.trimmed_before, commit.details()["before"])

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
