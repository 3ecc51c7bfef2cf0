"""Two maintainers of one topic, whole processes: one sleeps in its round, loses its lock, wakes.

The lock is the kernel's, so that the dead lose it, and only they. A store that takes it from one
who sleeps is stood in for by removing the file: the other then locks a new one, and both are at
work.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from test_maintenance import table_files

import broker
from broker import TopicPartition
from broker.maintenance.keeping import last_round

NAME = "orders"
PARTITIONS = 2
KEYS = 30
CONFIG = {
    "cleanup.policy": "compact,delete",
    "min.cleanable.dirty.ratio": 0,
    "segment.bytes": 2000,
    "seal.bytes": 6000,
    "retention.ms": -1,
    # What nothing names goes at once: from below the feet of who wakes, too.
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
    "maintenance.enabled": False,
}
MAINTAINER = Path(__file__).with_name("maintainer.py")


class Pair:
    """Two maintainers, and the lock that only one of them has."""

    def __init__(self, root: Path) -> None:
        self._lock = root / "locks" / f"maintain={NAME}"
        self._journal_lock = root / "locks" / NAME
        self._rounds = root / last_round(NAME)
        self._output = root.with_name("output")
        with self._output.open("ab") as output:
            command = [sys.executable, str(MAINTAINER), str(root), NAME]
            self._processes = [
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
                for _ in range(2)
            ]

    def stop_who_is_at_it(self, chance: random.Random) -> int:
        """Stop the one who maintains, in the midst of it; return who that is."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(chance.random() * 0.05)
            process = holder(self._lock)
            if process is None:
                continue
            os.kill(process, signal.SIGSTOP)
            # With the journal's lock it would keep all writers waiting, which is another story.
            if holder(self._lock) == process and holder(self._journal_lock) != process:
                return process
            os.kill(process, signal.SIGCONT)
        raise AssertionError(f"nobody maintains: {self._output.read_text()[-3000:]}")

    def lose_lock(self) -> None:
        self._lock.unlink()

    def wait_for_rounds(self, count: int) -> None:
        """Wait until so many more rounds have come to their end."""
        for _ in range(count):
            before = self._last_round()
            self.wait_until(lambda before=before: self._last_round() != before)

    def _last_round(self) -> int:
        return self._rounds.stat().st_mtime_ns if self._rounds.exists() else 0

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_done():
            self.check()
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.02)

    def check(self) -> None:
        alive = [process.poll() is None for process in self._processes]
        assert alive == [True, True], self._output.read_text()[-3000:]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def holder(path: Path) -> int | None:
    """Return the process that has locked a file, by the kernel's own table."""
    try:
        number = path.stat().st_ino
    except FileNotFoundError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(number):
            return int(words[4])
    return None


@pytest.fixture
def log(root: Path) -> broker.Log:
    made = broker.open(root)
    made.create_topic(NAME, PARTITIONS, config=CONFIG)
    return made


@pytest.fixture
def pair(log: broker.Log, root: Path) -> Iterator[Pair]:
    made = Pair(root)
    yield made
    made.kill()


class Sent:
    """What was sent: the oracle."""

    def __init__(self, log: broker.Log) -> None:
        self._log = log
        self.count = 0
        self.last: dict[int, dict[bytes, int]] = {number: {} for number in range(PARTITIONS)}

    def more(self, count: int) -> None:
        with self._log.producer() as producer:
            for number in range(self.count, self.count + count):
                partition = number % PARTITIONS
                key = b"%d" % (number % KEYS)
                producer.send(NAME, b"%d" % number, key=key, partition=partition)
                self.last[partition][key] = number
                if number % 20 == 19:
                    producer.flush()
        self.count += count


def is_all_sealed(log: broker.Log) -> bool:
    found = log.describe_topic(NAME)
    return found.sealed_ends == tuple(one.end_offset for one in found.partitions)


def race(log: broker.Log, pair: Pair, *, count: int, chance: random.Random) -> None:
    sent = Sent(log)
    for number in range(count):
        sent.more(60)
        sleeper = pair.stop_who_is_at_it(chance)
        pair.lose_lock()
        sent.more(60)
        if number % 3 == 2:
            log.delete_records({TopicPartition(NAME, 0): sent.count // PARTITIONS - 70})
        pair.wait_until(lambda: is_all_sealed(log))
        pair.wait_for_rounds(chance.randrange(3))
        os.kill(sleeper, signal.SIGCONT)
        # The first time, what is sealed may not have been made a table yet.
        pair.wait_until(lambda: DeltaTable.is_deltatable(log.table_path(NAME)))
        for _ in range(5):
            check_that_the_table_names_no_removed_file(log)
    pair.wait_until(lambda: is_all_sealed(log))
    # Each of them comes to its end, and finds nothing more to do.
    pair.wait_for_rounds(6)
    pair.check()
    pair.kill()
    check_the_end(log, sent)


def check_that_the_table_names_no_removed_file(log: broker.Log) -> None:
    gone = {path for path in table_files(log) if not os.path.exists(path)}
    # They may have gone since the look at the Delta log: then it does not name them any more.
    assert not gone.intersection(table_files(log))


def check_the_end(log: broker.Log, sent: Sent) -> None:
    """Check that journal, sealed files and table say the same, and have what they should."""
    snapshot = log.snapshot(NAME)
    actions = pa.table(DeltaTable(log.table_path(NAME)).get_add_actions(flatten=True)).to_pylist()
    in_table = sorted((one["path"], one["num_records"]) for one in actions)
    assert in_table == sorted((file.name, file.record_count) for file in snapshot.files)
    rows = DeltaTable(log.table_path(NAME)).to_pyarrow_table()
    columns = (rows[name].to_pylist() for name in ("partition", "offset", "value"))
    places = list(zip(*columns, strict=True))
    assert len({place[:2] for place in places}) == len(places), "twice in the table"
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        read = [(one.partition, one.offset, one.value) for one in consumer]
    assert sorted(places) == sorted(read)
    left: dict[int, dict[bytes, int]] = {number: {} for number in range(PARTITIONS)}
    for partition, offset, value in sorted(read):
        assert offset == int(value) // PARTITIONS
        left[partition][b"%d" % (int(value) % KEYS)] = int(value)
    starts = {one.partition: one.start_offset for one in log.describe_topic(NAME).partitions}
    assert left == {
        partition: {key: n for key, n in last.items() if n // PARTITIONS >= starts[partition]}
        for partition, last in sent.last.items()
    }
    report = log.verify(NAME)
    assert report.damage == () and report.sealed_record_count == len(read)


def test_a_maintainer_that_wakes_while_another_is_at_work_spoils_nothing(
    log: broker.Log, pair: Pair
) -> None:
    race(log, pair, count=5, chance=random.Random(11))


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_maintainers_that_sleep_and_wake_for_minutes_spoil_nothing(
    log: broker.Log, pair: Pair
) -> None:
    race(log, pair, count=80, chance=random.Random())
