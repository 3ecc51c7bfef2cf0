"""A power cut in the middle of maintenance: what was durable before it is there after it.

The storage remembers what of each file is on disk. When it dies, each file becomes what may be left
of it: as it was when it was last synced, or as it is, or with unsynced bytes gone. Removals are not
synced, so removed files may be back.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_storage import Died, FaultyFile, FaultyStorage, Fuse

import broker
from broker import TopicPartition
from broker.maintenance.keeping import Round
from broker.storage import AppendFile, LocalStorage

NAME = "orders"
BEFORE, AFTER = "the boot before", "another boot"
CONFIG = {
    "segment.bytes": 2000,
    "retention.ms": -1,
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
    "min.cleanable.dirty.ratio": 0,
}

Row = tuple[int, int, bytes | None, bytes | None]


class PowerFile(FaultyFile):
    """A file whose bytes count only when it was synced."""

    __slots__ = ("_storage",)

    def __init__(self, path: str, descriptor: int, storage: PowerStorage) -> None:
        super().__init__(path, descriptor, storage.fuse)
        self._storage = storage

    def sync(self) -> None:
        super().sync()
        self._storage.note(self.path)


class PowerStorage(FaultyStorage):
    """Storage that knows what a power cut leaves. All that is there at the start is on disk."""

    def __init__(self, root: str, fuse: Fuse) -> None:
        super().__init__(root, fuse, BEFORE)
        self.on_disk = contents(Path(root))

    def note(self, path: str) -> None:
        self.on_disk[path] = Path(path).read_bytes()

    def create(self, path: str, data: bytes, *, sync: bool = True) -> None:
        super().create(path, data, sync=sync)
        if sync:
            self.note(self.locate(path))

    def _file(self, target: str, descriptor: int) -> AppendFile:
        file = PowerFile(target, descriptor, self)
        self._opened.append(file)
        return file

    def lose_power(self, rng: random.Random | None) -> None:
        """Leave what is certainly on disk; with `rng`, anything that is possible."""
        self.bury()
        now = contents(Path(self.root))
        for path in sorted(now.keys() | self.on_disk.keys()):
            choices = [self.on_disk.get(path), now.get(path)]
            if rng is not None and path.endswith(".log") and None not in choices:
                choices.append(torn(choices, rng))
            left = choices[0] if rng is None else rng.choice(choices)
            if left is None:
                Path(path).unlink(missing_ok=True)
            else:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(left)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def torn(choices: Sequence[bytes | None], rng: random.Random) -> bytes:
    """Return a file of which some bytes that were not synced are zero."""
    synced, now = choices[0] or b"", choices[1] or b""
    at = rng.randint(min(len(synced), len(now)), len(now))
    return now[:at] + bytes(rng.randint(0, len(now) - at))


def fill(log: broker.Log, count: int, first: int = 0) -> None:
    with log.producer(durability="fsync") as producer:
        for number in range(first, first + count):
            value = None if number % 9 == 0 else b"value %d" % number
            producer.send(NAME, value, key=b"k%d" % (number % 10), partition=number % 2)
            if number % 10 == 9:
                producer.flush()


def read(log: broker.Log) -> list[Row]:
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return sorted((one.partition, one.offset, one.key, one.value) for one in consumer)


def table(rows: list[Row]) -> dict[tuple[int, bytes | None], bytes | None]:
    return {(partition, key): value for partition, _, key, value in rows}


def prepare(root: Path, policy: str) -> broker.Log:
    log = broker.Log(LocalStorage(str(root), boot_id=BEFORE))
    log.create_topic(NAME, 2, CONFIG | {"cleanup.policy": policy})
    for first in range(0, 60, 20):
        fill(log, 20, first)
        log.maintain(NAME, seal=True)
    log.delete_records({TopicPartition(NAME, 1): 7})
    fill(log, 50, 60)
    return log


@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_a_power_cut_at_any_change_of_maintenance_loses_nothing(
    tmp_path: Path, policy: str
) -> None:
    made = tmp_path / "made"
    log = prepare(made, policy)
    before = read(log)
    changes = run(made, tmp_path / "whole", Fuse(), None)
    assert changes > 30
    for at in range(1, changes + 1):
        for seed in (None,) if at % 3 else (at,):
            trial = tmp_path / f"{at} {seed}"
            run(made, trial, Fuse(at), None if seed is None else random.Random(seed))
            check(trial, before, policy, f"change {at}, seed {seed}")
            shutil.rmtree(trial)


def run(made: Path, trial: Path, fuse: Fuse, rng: random.Random | None) -> int:
    shutil.copytree(made, trial)
    storage = PowerStorage(str(trial), fuse)
    try:
        Round(storage, NAME, 1).run(is_forced=True)
    except Died:
        pass
    storage.lose_power(rng)
    return len(fuse.trace)


def check(root: Path, before: list[Row], policy: str, when: str) -> None:
    """Read before anybody writes, then after recovery, and after maintenance."""
    log = broker.Log(LocalStorage(str(root), boot_id=AFTER))
    for step in range(3):
        found = read(log)
        if policy == "delete":
            assert found == before, f"{when}, step {step}"
        else:
            assert set(found) <= set(before), f"{when}, step {step}"
            assert table(found) == table(before), f"{when}, step {step}"
        if step < 2:
            assert log.verify(NAME).damage == (), f"{when}, step {step}"
            log.maintain(NAME, seal=step == 1)
    fill(log, 4, 200)
    assert len(read(log)) == len(found) + 4
