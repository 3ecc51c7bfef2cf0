"""Which partition a record goes to: as Kafka's default partitioner says, for any client alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker.checks import NUMBER_MAX, whole_number
from broker.errors import InvalidRecord

_SEED = np.uint32(0x9747B28C)
_M = np.uint32(0x5BD1E995)
_UNDECIDED = -1

Words = npt.NDArray[np.uint32]
Partitions = npt.NDArray[np.int64]
# kafka-python's signature: key bytes, all partitions, available partitions.
PartitionFunction = Callable[[bytes | None, list[int], list[int]], int]


def murmur2(keys: pa.Array) -> Words:
    """Hash each key of a binary array as Kafka's clients do. A null has the hash of no bytes."""
    offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, 4 * keys.offset)
    starts, lengths = (
        (offsets[:-1] - offsets[0]).astype(np.int64),
        np.diff(offsets).astype(np.int64),
    )
    data_buffer = keys.buffers()[2]
    # Of a slice only its own bytes: the buffer may be many times larger.
    own = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    data = own.astype(np.uint32)
    # Reading the last word must not run past the end; bytes past a key's own are masked out.
    data = np.concatenate([data, np.zeros(4, np.uint32)])
    with np.errstate(over="ignore"):
        hashes = _SEED ^ lengths.astype(np.uint32)
        hashes = _mix_words(hashes, data, starts, lengths // 4)
        hashes = _mix_rest(hashes, data, starts + (lengths & ~3), lengths & 3)
        hashes ^= hashes >> np.uint32(13)
        hashes *= _M
        hashes ^= hashes >> np.uint32(15)
    return hashes


def _mix_words(hashes: Words, data: Words, starts: Partitions, word_counts: Partitions) -> Words:
    for word in range(int(word_counts.max(initial=0))):
        rows = np.flatnonzero(word_counts > word)
        at = starts[rows] + 4 * word
        k = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
        k *= _M
        k ^= k >> np.uint32(24)
        k *= _M
        hashes[rows] = hashes[rows] * _M ^ k
    return hashes


def _mix_rest(hashes: Words, data: Words, at: Partitions, rest: Partitions) -> Words:
    for byte in (2, 1, 0):
        rows = rest > byte
        hashes[rows] ^= data[at[rows] + byte] << np.uint32(8 * byte)
    rows = rest > 0
    hashes[rows] *= _M
    return hashes


class PartitionChooser:
    """Chooses for one producer and topic: as given, by key, or without one as configured."""

    def __init__(self, strategy: str | PartitionFunction) -> None:
        self._strategy = strategy
        self._next = random.randrange(1 << 16)

    def choose(
        self, given: Sequence[int | None] | None, keys: Any, count: int, partition_count: int
    ) -> int | Partitions:
        """Return the partition of all records, or one for each.

        Args:
            given: what the sender asked for; None where it left the choice.
            keys: an Arrow binary array or a list of bytes; None if no record has a key.
        """
        if partition_count == 1 and not (given and any(given)):
            return 0
        if given is None and keys is None and self._strategy == "sticky":
            return self._advance(1) % partition_count
        chosen = np.full(count, _UNDECIDED, np.int64)
        if given is not None:
            chosen[:] = [_UNDECIDED if one is None else one for one in given]
        if (chosen == _UNDECIDED).any():
            self._decide(chosen, keys, partition_count)
        return chosen

    def _decide(self, chosen: Partitions, keys: Any, partition_count: int) -> None:
        open_rows = chosen == _UNDECIDED
        if callable(self._strategy):
            self._ask(chosen, np.flatnonzero(open_rows), keys, partition_count)
            return
        if keys is not None:
            array = keys if isinstance(keys, pa.Array) else pa.array(keys, pa.binary())
            hashed = open_rows & array.is_valid().to_numpy(zero_copy_only=False)
            positive = murmur2(array) & np.uint32(0x7FFFFFFF)
            chosen[hashed] = (positive % np.uint32(partition_count))[hashed]
            open_rows &= ~hashed
        undecided = np.flatnonzero(open_rows)
        if self._strategy == "sticky":
            if len(undecided):
                chosen[undecided] = self._advance(1) % partition_count
        else:
            first = self._advance(len(undecided))
            chosen[undecided] = (first + np.arange(len(undecided))) % partition_count

    def _ask(self, chosen: Partitions, rows: Any, keys: Any, partition_count: int) -> None:
        assert callable(self._strategy)
        partitions = list(range(partition_count))
        listed = keys.to_pylist() if isinstance(keys, pa.Array) else keys
        for row in rows.tolist():
            key = listed[row] if listed is not None else None
            answer = self._strategy(key, partitions, partitions)
            chosen[row] = whole_number(
                answer, "the partitioner cannot return", at_least=-NUMBER_MAX, error=InvalidRecord
            )

    def _advance(self, count: int) -> int:
        first = self._next
        self._next += count
        return first
