"""Checking sealed files: every byte, and that they hold what the commits say of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import google_crc32c
import numpy as np
import pyarrow as pa

from broker.errors import CorruptLog, LogError, MissingFile
from broker.parquet import SealedReader
from broker.sealed import SealedFile
from broker.state import TopicState
from broker.storage import Storage
from broker.verify.findings import Findings

_BLOCK = 1 << 20


class SealedCheck:
    """The sealed files of one topic incarnation, while they are verified."""

    def __init__(self, storage: Storage, directory: str, findings: Findings) -> None:
        self._storage = storage
        self._directory = directory
        self._findings = findings
        self.missing: list[SealedFile] = []

    def check(self, state: TopicState) -> None:
        """Check all files that the state names, and that they leave out no offset."""
        for what in _holes(state):
            self._findings.add(self._storage.locate(f"{self._directory}/sealed"), 0, what)
        for file in state.sealed:
            self._check_file(file)

    def report_missing(self, names: set[str]) -> None:
        """Report those files that are not there although they are still named."""
        for file in self.missing:
            if file.name in names:
                what = (
                    f"the file is missing; offsets {file.start} to {file.end - 1} of partition "
                    f"{file.partition} are in it"
                )
                self._findings.add(self._path(file), 0, what)

    def unnamed(self, state: TopicState) -> list[str]:
        """Return the files that no commit names, or none yet."""
        known = {f"sealed/{file.name}" for file in state.sealed} | state.retired.keys()
        found = []
        for folder in self._storage.list(f"{self._directory}/sealed"):
            for name in self._storage.list(f"{self._directory}/sealed/{folder}"):
                if f"sealed/{folder}/{name}" not in known:
                    found.append(f"{folder}/{name}")
        return found

    def _check_file(self, file: SealedFile) -> None:
        try:
            self._check_bytes(file)
            self._check_records(file)
        except MissingFile:
            self.missing.append(file)
        except CorruptLog as damage:
            self._findings.add(damage.path, damage.position, damage.what)
        except LogError as error:
            self._findings.add(self._path(file), 0, f"the file cannot be read: {error}")
        else:
            self._findings.sealed_file_count += 1
            self._findings.sealed_record_count += file.record_count
            self._findings.byte_count += file.byte_length

    def _check_bytes(self, file: SealedFile) -> None:
        opened = self._storage.open_file(f"{self._directory}/sealed/{file.name}")
        if opened is None:
            raise MissingFile(self._path(file), 0, "the file is missing")
        crc = 0
        with closing(opened):
            size = opened.size()
            if size != file.byte_length:
                what = f"it has {size} bytes instead of {file.byte_length}"
                raise CorruptLog(opened.path, min(size, file.byte_length), what)
            for at in range(0, size, _BLOCK):
                crc = google_crc32c.extend(crc, opened.read(at, _BLOCK))
        if crc != file.crc:
            raise CorruptLog(opened.path, 0, "the file's checksum does not match")

    def _check_records(self, file: SealedFile) -> None:
        """Check what no checksum can say: that it is the file that was meant."""
        opened = SealedReader(self._storage, self._directory, file)
        low, high, last = -1, -1, file.start - 1
        try:
            for group in range(opened.group_count):
                batch = opened.read(group)
                offsets = batch.column("offset").to_numpy()
                if offsets[0] <= last or (np.diff(offsets) <= 0).any() or offsets[-1] >= file.end:
                    what = f"the offsets of row group {group} are not in order, or not its own"
                    raise CorruptLog(opened.path, 0, what)
                stamps = batch.column("timestamp").cast(pa.int64()).to_numpy()
                low = int(stamps.min()) if not group else min(low, int(stamps.min()))
                high = max(high, int(stamps.max()))
                last = int(offsets[-1])
        finally:
            opened.close()
        if (low, high) != (file.min_timestamp, file.max_timestamp):
            raise CorruptLog(opened.path, 0, "its records have other times than its commit says")

    def _path(self, file: SealedFile) -> str:
        return self._storage.locate(f"{self._directory}/sealed/{file.name}")


def _holes(state: TopicState) -> Iterator[str]:
    """Say where the sealed files of a partition do not follow each other up to their end."""
    for partition in range(state.partition_count):
        start, end = state.starts[partition], state.sealed_ends[partition]
        ranges = [file[2:4] for file in state.sealed.of(partition)]
        for one, other in pairwise([(0, min(start, end)), *ranges, (max(start, end), 0)]):
            if one[1] < other[0] and one[1] < end:
                yield f"no file holds offsets {one[1]} to {other[0] - 1} of partition {partition}"
            elif one[1] > other[0] and other in ranges[1:]:
                yield f"two files hold offset {other[0]} of partition {partition}"
