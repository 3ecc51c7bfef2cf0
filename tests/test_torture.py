"""Many writers, maintainers and readers on one topic while some are killed or stopped.

Then every promise is checked.

Each writer appends to a file of its own what was acknowledged to it, so that what is known
outlives the writer. A record names its writer, the writer's life, a counter and its transaction.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import broker
from broker import TopicPartition
from broker.maintenance import keeping
from broker.producer import Producer
from broker.reader import TopicReader

NAME = "orders"
PARTITIONS = 3
PLACES = [TopicPartition(NAME, partition) for partition in range(PARTITIONS)]
CONFIG = {"segment.bytes": 40_000, "checkpoint.commits": 50}
# What is not needed any more goes at once: from under those who still read it, too.
MAINTAINED = {
    "seal.bytes": 50_000,
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
    "retention.ms": -1,
}
PATIENCE_SECONDS = 60
_processes = multiprocessing.get_context("spawn")


class Token(NamedTuple):
    """What a record says about itself. `size` is how many records its transaction has, or 0."""

    writer: int
    life: int
    counter: int
    transaction: int
    size: int

    def encode(self) -> bytes:
        return b"%d %d %d %d %d" % self + b" " + b"." * (self.counter * 7919 % 600)

    @classmethod
    def decode(cls, value: bytes) -> Token:
        return cls(*map(int, value.split()[:5]))


# Writers.


class Writing:
    """One life of one writer: sends in all ways there are, and notes what is acknowledged."""

    def __init__(self, root: Path, notes: Path, writer: int, life: int) -> None:
        self.writer = writer
        self.life = life
        self.counter = 0
        self.transactions = 0
        self.rng = random.Random(f"{writer} {life}")
        log = broker.open(root)
        self.plain = log.producer(linger_ms=1)
        self.exclusive = log.producer(transactional_id=f"writer {writer}")
        self.durable = log.producer(durability="fsync")
        # Without a buffer: what is noted is in the kernel's hands when the process is killed.
        self.notes = notes.open("ab", buffering=0)

    def next_token(self, transaction: int = 0, size: int = 0) -> Token:
        self.counter += 1
        return Token(self.writer, self.life, self.counter, transaction, size)

    def note(self, places: list[tuple[int, int, Token]]) -> None:
        lines = [[partition, offset, *token] for partition, offset, token in places]
        self.notes.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def send_some(self, producer: Producer) -> None:
        """Send records one after the other without waiting in between."""
        sent = []
        for _ in range(self.rng.randrange(1, 12)):
            token = self.next_token()
            partition = self.rng.randrange(PARTITIONS)
            sent.append((token, producer.send(NAME, token.encode(), partition=partition)))
        acknowledged = []
        for token, future in sent:
            place = future.result(PATIENCE_SECONDS)
            acknowledged.append((place.partition, place.offset, token))
        self.note(acknowledged)

    def send_batch(self, producer: Producer) -> None:
        tokens, partitions, table = self.make_batch(0, 0)
        offsets = producer.send_batch(NAME, table).result(PATIENCE_SECONDS).offsets
        self.note(place_batch(tokens, partitions, offsets))

    def send_transaction(self, producer: Producer) -> None:
        """Send single records and a batch as one; the batch's places follow from its offsets."""
        self.transactions += 1
        single = self.rng.randrange(1, 5)
        rows = self.rng.randrange(1, 9)
        size = single + rows
        sent = []
        with producer.transaction():
            for _ in range(single):
                token = self.next_token(self.transactions, size)
                partition = self.rng.randrange(PARTITIONS)
                sent.append((token, producer.send(NAME, token.encode(), partition=partition)))
            tokens, partitions, table = self.make_batch(self.transactions, size, rows)
            batch = producer.send_batch(NAME, table)
        acknowledged = []
        for token, future in sent:
            place = future.result(PATIENCE_SECONDS)
            acknowledged.append((place.partition, place.offset, token))
        acknowledged += place_batch(tokens, partitions, batch.result(PATIENCE_SECONDS).offsets)
        assert len(acknowledged) == size
        self.note(acknowledged)

    def abort_transaction(self, producer: Producer) -> None:
        """What is aborted must never be seen: a size that cannot be met would tell."""
        self.transactions += 1
        producer.begin_transaction()
        for _ in range(3):
            producer.send(NAME, self.next_token(self.transactions, 1 << 20).encode())
        producer.abort_transaction()

    def make_batch(
        self, transaction: int, size: int, rows: int = 0
    ) -> tuple[list[Token], list[int], pa.Table]:
        rows = rows or self.rng.randrange(1, 40)
        tokens = [self.next_token(transaction, size) for _ in range(rows)]
        partitions = [self.rng.randrange(PARTITIONS) for _ in range(rows)]
        columns = {"value": [token.encode() for token in tokens], "partition": partitions}
        return tokens, partitions, pa.table(columns)

    def go_on(self) -> None:
        ways = [
            lambda: self.send_some(self.plain),
            lambda: self.send_some(self.durable),
            lambda: self.send_batch(self.plain),
            lambda: self.send_transaction(self.plain),
            lambda: self.send_transaction(self.exclusive),
            lambda: self.abort_transaction(self.exclusive),
        ]
        self.rng.choice(ways)()


def place_batch(
    tokens: list[Token], partitions: list[int], offsets: dict[int, tuple[int, int]]
) -> list[tuple[int, int, Token]]:
    """Give each row of a batch its offset: rows keep their order within a partition."""
    following = {partition: first for partition, (first, _count) in offsets.items()}
    placed = []
    for token, partition in zip(tokens, partitions, strict=True):
        placed.append((partition, following[partition], token))
        following[partition] += 1
    return placed


def write(root: Path, notes: Path, stop: Path, writer: int, life: int) -> None:
    writing = Writing(root, notes, writer, life)
    while not stop.exists():
        writing.go_on()
    for producer in (writing.plain, writing.exclusive, writing.durable):
        producer.close()


# Readers.


class Chain:
    """What a reader has seen of a partition: how many records, and a digest of them in order."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = hashlib.sha256()

    def add(self, offset: int, value: bytes) -> None:
        assert offset == self.count, f"offset {offset} came after {self.count - 1}"
        self.count += 1
        self._digest.update(b"%d %d " % (offset, len(value)))
        self._digest.update(value)

    def seen(self) -> tuple[int, str]:
        return self.count, self._digest.hexdigest()


def read(root: Path, report: Path, stop: Path, is_columnar: bool) -> None:
    """Read from the beginning until told to stop; report what was seen."""
    chains = {place: Chain() for place in PLACES}
    with broker.open(root).consumer(NAME, auto_offset_reset="earliest") as consumer:
        while not stop.exists():
            if is_columnar:
                for place, batch in consumer.poll_batches(200).items():
                    values = batch.column("value").to_pylist()
                    for offset, value in zip(
                        batch.column("offset").to_pylist(), values, strict=True
                    ):
                        chains[place].add(offset, value)
            else:
                for place, records in consumer.poll(200).items():
                    for record in records:
                        chains[place].add(record.offset, record.value)
    seen = [chains[place].seen() for place in PLACES]
    report.write_text(json.dumps(seen))


# Maintainers.


def maintain(root: Path, stop: Path, is_alone: bool) -> None:
    """Seal, merge, trim and remove all the time.

    Args:
        is_alone: heed the lock between maintainers; it only saves work.
    """
    if not is_alone:
        keeping.hold = lambda storage, topic: nullcontext(True)  # type: ignore[assignment]
    log = broker.open(root)
    while not stop.exists():
        log.maintain(NAME, seal=True)


# The run.


@dataclass
class Run:
    """The processes of one run. Writers and maintainers come back after they were killed."""

    directory: Path
    writers: int
    readers: int
    maintainers: int = 0

    def __post_init__(self) -> None:
        self.root = self.directory / "log"
        self.stop_writers = self.directory / "stop writers"
        self.stop_readers = self.directory / "stop readers"
        self.lives = [0] * self.writers
        self.kills = 0
        config = CONFIG | MAINTAINED if self.maintainers else CONFIG
        broker.open(self.root).create_topic(NAME, PARTITIONS, config)

    def start(self, target: Any, *args: Any) -> BaseProcess:
        process = _processes.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def start_writer(self, writer: int) -> BaseProcess:
        self.lives[writer] += 1
        notes = self.directory / f"notes {writer} {self.lives[writer]}"
        return self.start(write, self.root, notes, self.stop_writers, writer, self.lives[writer])

    def start_reader(self, reader: int) -> BaseProcess:
        report = self.directory / f"report {reader}"
        return self.start(read, self.root, report, self.stop_readers, reader % 2 == 1)

    def start_maintainer(self, maintainer: int) -> BaseProcess:
        return self.start(maintain, self.root, self.stop_writers, maintainer % 2 == 0)

    def torture(self, seconds: float) -> None:
        """Kill a random writer now and then, as soon as it has something acknowledged."""
        rng = random.Random(1)
        readers = [self.start_reader(reader) for reader in range(self.readers)]
        writers = [self.start_writer(writer) for writer in range(self.writers)]
        maintainers = [self.start_maintainer(number) for number in range(self.maintainers)]
        try:
            for writer, process in enumerate(writers):  # A process may take long to begin.
                assert self.wait_for_notes(writer, process, time.monotonic() + PATIENCE_SECONDS)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                victim = rng.randrange(self.writers)
                if self.wait_for_notes(victim, writers[victim], deadline):
                    time.sleep(rng.random() * 0.3)  # Anywhere in what it does.
                    kill(writers[victim])
                    self.kills += 1
                    writers[victim] = self.start_writer(victim)
                if maintainers:
                    self.hit_maintainer(maintainers, rng)
            self.stop_writers.touch()
            end([*writers, *maintainers])
            self.stop_readers.touch()
            end(readers)
        finally:
            for process in (*writers, *maintainers, *readers):
                process.kill()

    def hit_maintainer(self, maintainers: list[BaseProcess], rng: random.Random) -> None:
        """Kill one, or stop it for a while in which others do its work."""
        victim = rng.randrange(len(maintainers))
        process = maintainers[victim]
        assert process.exitcode is None, f"maintainer {victim} ended by itself"
        if rng.random() < 0.3:
            kill(process)
            maintainers[victim] = self.start_maintainer(victim)
        else:
            os.kill(process.pid or 0, signal.SIGSTOP)
            time.sleep(rng.random())
            os.kill(process.pid or 0, signal.SIGCONT)

    def wait_for_notes(self, writer: int, process: BaseProcess, deadline: float) -> bool:
        """Return whether the writer had something acknowledged in time."""
        notes = self.directory / f"notes {writer} {self.lives[writer]}"
        while time.monotonic() < deadline:
            assert process.exitcode is None, f"writer {writer} ended by itself"
            if notes.exists() and notes.stat().st_size:
                return True
            time.sleep(0.01)
        return False


def kill(process: BaseProcess) -> None:
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(2 * PATIENCE_SECONDS)
        assert process.exitcode == 0


# The check.


def read_log(root: Path) -> list[list[bytes]]:
    """Read every frame of every partition, which checks each checksum."""
    reader = TopicReader(broker.open(root, create=False)._storage, NAME, 1)
    found = []
    for partition, end_offset in enumerate(reader.refresh().ends):
        values: list[bytes] = []
        while len(values) < end_offset:
            for one in reader.fetch(partition, len(values), 1 << 20):
                assert one.base_offset == len(values)
                values += one.batch.column(1).to_pylist()
        found.append(values)
    reader.close()
    return found


def check(run: Run) -> int:
    """Check all that was promised; return how many records were acknowledged."""
    values = read_log(run.root)
    tokens = [[Token.decode(value) for value in one] for one in values]
    acknowledged = check_acknowledged(run, tokens)
    check_order_and_uniqueness(tokens)
    check_transactions(tokens)
    check_readers(run, values)
    report = broker.open(run.root).verify()
    assert not report.damage
    return acknowledged


def check_acknowledged(run: Run, tokens: list[list[Token]]) -> int:
    count = 0
    for notes in run.directory.glob("notes *"):
        lines = notes.read_bytes().split(b"\n")
        for line in lines[:-1]:  # The last one is empty, or was cut off by the kill.
            partition, offset, *token = json.loads(line)
            assert tokens[partition][offset] == Token(*token)
            count += 1
    return count


def check_order_and_uniqueness(tokens: list[list[Token]]) -> None:
    """No record is there twice, and what one producer sent to a partition is in its order.

    A writer has three producers but waits for each before it turns to the next, so all that one
    life of a writer sent is in order.
    """
    everywhere: set[tuple[int, int, int]] = set()
    for one in tokens:
        last: dict[tuple[int, int], int] = {}
        for token in one:
            key = token.writer, token.life
            assert token.counter > last.get(key, 0)
            last[key] = token.counter
            assert (*key, token.counter) not in everywhere
            everywhere.add((*key, token.counter))


def check_transactions(tokens: list[list[Token]]) -> None:
    sizes: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for one in tokens:
        for token in one:
            if token.size:
                sizes[token.writer, token.life, token.transaction].append(token.size)
    assert sizes
    for transaction, found in sizes.items():
        assert found == [found[0]] * found[0], f"transaction {transaction} is there in part"


def check_readers(run: Run, values: list[list[bytes]]) -> None:
    for reader in range(run.readers):
        seen = json.loads((run.directory / f"report {reader}").read_text())
        for partition, (count, digest) in enumerate(seen):
            chain = Chain()
            for offset, value in enumerate(values[partition][:count]):
                chain.add(offset, value)
            assert chain.seen() == (count, digest), f"reader {reader} saw something else"
        assert sum(count for count, _ in seen) > 0


def torture(
    directory: Path, *, writers: int, readers: int, seconds: float, maintainers: int = 0
) -> None:
    run = Run(directory, writers, readers, maintainers)
    run.torture(seconds)
    acknowledged = check(run)
    assert run.kills >= seconds / 10, "hardly anything was killed"
    # A stopped maintainer may hold the lock that all writers wait for.
    assert acknowledged > (2 if maintainers else 20) * seconds, "hardly anything was written"
    state = TopicReader(broker.open(run.root)._storage, NAME, 1).refresh()
    if maintainers:
        assert min(state.sealed_ends) > 0, "hardly anything was sealed"
        return
    assert len(state.files) > seconds, "hardly any file was rolled"


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    torture(tmp_path, writers=4, readers=2, seconds=10)


@pytest.mark.slow
def test_killed_and_stopped_maintainers_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    torture(tmp_path, writers=2, readers=2, maintainers=3, seconds=12)


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_killed_and_stopped_maintainers_lose_nothing_for_long(tmp_path: Path) -> None:
    """The environment variable `TORTURE_SECONDS` says for how long."""
    seconds = float(os.environ.get("TORTURE_SECONDS", "60"))
    torture(tmp_path, writers=4, readers=3, maintainers=3, seconds=seconds)


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_killed_writers_lose_nothing_and_repeat_nothing_for_long(tmp_path: Path) -> None:
    """The environment variable `TORTURE_SECONDS` says for how long."""
    seconds = float(os.environ.get("TORTURE_SECONDS", "60"))
    torture(tmp_path, writers=8, readers=4, seconds=seconds)
