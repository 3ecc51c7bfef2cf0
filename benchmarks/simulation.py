"""Many writers on one topic of a remote store, in virtual time: no store, no threads.

Each writer does what a producer does there (`broker/sender.py`, `Topic.append`,
`broker/storage/pieces.py`), in the same order and with the same constants: put the commit where
nothing is; after losing, read the winner back, wait as `pause_seconds` says, read on with ever more
requests at once, and put again. Meanwhile the next commit gathers records.

What it leaves out: the store answers as fast to a thousand as to one, Python takes no time, and the
few requests for checkpoints, ends of files and merging are not made. Same seed, same figures.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from statistics import NormalDist

from broker import sender
from broker.accumulator import RECORD_OVERHEAD
from broker.config import ProducerOptions
from broker.ledger import pause_seconds
from broker.storage import pieces

RECORD_BYTES = 100
OPTIONS = ProducerOptions()
UNIT_RECORDS_MAX = OPTIONS.batch_size // (RECORD_BYTES + RECORD_OVERHEAD)
BUFFERED_RECORDS_MAX = OPTIONS.buffer_memory // (RECORD_BYTES + RECORD_OVERHEAD)

Steps = Generator[float, None, None]
Tries = Generator[float, None, bool]
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Store:
    """How long a store takes: lognormal around a median, and bytes at a steady rate.

    Attributes:
        sigma: Of the logarithm. At 0.5 one answer in a hundred takes 3.2 times the median.
        decided_share: The part of a put after which it is settled who was first.
        loser_requests: What a writer asks for after losing: to read the winner, and on HDFS also
            to remove its temporary file.
    """

    name: str
    put_seconds: float
    get_seconds: float
    sigma: float = 0.5
    decided_share: float = 0.9
    loser_requests: int = 1
    write_bytes_per_second: float = math.inf
    read_bytes_per_second: float = math.inf

    @property
    def mean_put_seconds(self) -> float:
        return self.put_seconds * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Load:
    """What the writers have to send.

    Attributes:
        record_rate: Records a second that each writer makes; infinite: always a full unit.
        is_grouped: A commit takes all that has gathered; otherwise one record, and the writer makes
            the next when that is committed.
    """

    writer_count: int
    record_rate: float
    is_grouped: bool = True
    unit_records_max: int = UNIT_RECORDS_MAX


@dataclass(slots=True)
class Outcome:
    """What was counted after the warm-up. Latency: from a commit's oldest record to its answer."""

    seconds: float = 0.0
    commit_count: int = 0
    record_count: int = 0
    put_count: int = 0
    get_count: int = 0
    conflict_count: int = 0
    failed_count: int = 0
    latencies: list[float] = field(default_factory=list)
    commits_by_writer: list[int] = field(default_factory=list)

    def latency(self, share: float) -> float:
        """Return the latency that this share of the commits does not exceed."""
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Simulation:
    """One topic and its writers. The journal is the list of offsets at which its commits end."""

    def __init__(
        self,
        store: Store,
        load: Load,
        *,
        seed: int = 1,
        pause: Callable[[int, float], float] = pause_seconds,
    ) -> None:
        self.store = store
        self.load = load
        self.pause = pause
        self.random = random.Random(seed)
        self.now = 0.0
        self.ends = [0]
        self.placed: list[tuple[int, int]] = []  # Offsets [start, end) as the writers gave them.
        self.outcome = Outcome(commits_by_writer=[0] * load.writer_count)
        self._waiting: list[tuple[float, int, Steps]] = []
        self._turn = 0
        for number in range(load.writer_count):
            self._wait(0.0, _Writer(self, number).run())

    def run(self, commit_count: int) -> Outcome:
        """Warm up with a few commits of each writer, then count this many."""
        self._go_on(100 + 2 * self.load.writer_count)
        self.outcome = Outcome(commits_by_writer=[0] * self.load.writer_count)
        begun = self.now
        self._go_on(commit_count)
        self.outcome.seconds = self.now - begun
        return self.outcome

    def get_seconds(self, count: int) -> float:
        """Return how long the slowest of some requests made at once takes."""
        store = self.store
        if not store.sigma:
            return store.get_seconds
        # The greatest of n is below a value with the n-th power of one's probability.
        share = self.random.random() ** (1 / count)
        deviation = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
        return store.get_seconds * math.exp(store.sigma * deviation)

    def put_seconds(self, record_count: int) -> float:
        store = self.store
        latency = store.put_seconds * math.exp(self.random.gauss(0.0, store.sigma))
        return latency + record_count * RECORD_BYTES / store.write_bytes_per_second

    def _go_on(self, commit_count: int) -> None:
        waiting, until = self._waiting, self.outcome.commit_count + commit_count
        while self.outcome.commit_count < until:
            self.now, _, steps = heapq.heappop(waiting)
            self._wait(next(steps), steps)

    def _wait(self, seconds: float, steps: Steps) -> None:
        self._turn += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._turn, steps))


class _Writer:
    """One producer. Its generators yield the seconds until they are to go on."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self._number = number
        self._known = 0  # How many commits it has read.
        self._is_behind = True
        self._oldest = simulation.random.random() / simulation.load.record_rate

    def run(self) -> Steps:
        """Send for ever: a commit at a time, of what has gathered when the last was answered."""
        simulation, load = self._simulation, self._simulation.load
        while True:
            if self._oldest > simulation.now:
                yield self._oldest - simulation.now
            count, oldest = self._take()
            is_committed = yield from self._send(count)
            outcome = simulation.outcome
            if is_committed:
                outcome.commit_count += 1
                outcome.record_count += count
                outcome.latencies.append(simulation.now - oldest)
                outcome.commits_by_writer[self._number] += 1
            else:
                outcome.failed_count += 1
            self._oldest = oldest + count / load.record_rate
            if not load.is_grouped:
                self._oldest = max(self._oldest, simulation.now)

    def _take(self) -> tuple[int, float]:
        """Return how many records the next commit takes, and when the oldest was sent."""
        now, load = self._simulation.now, self._simulation.load
        if not load.is_grouped:
            return 1, self._oldest
        if math.isinf(load.record_rate):
            return load.unit_records_max, now
        # Who sends faster than that has been made to wait.
        oldest = max(self._oldest, now - BUFFERED_RECORDS_MAX / load.record_rate)
        return min(1 + int((now - oldest) * load.record_rate), load.unit_records_max), oldest

    def _send(self, record_count: int) -> Tries:
        """As `Sender._commit`: again until it is committed or the delivery timeout has passed."""
        simulation = self._simulation
        deadline = simulation.now + OPTIONS.delivery_timeout_ms / 1000
        while True:
            rest = max(0.0, deadline - simulation.now)
            patience = min(rest, OPTIONS.request_timeout_ms / 1000)
            if (yield from self._append(record_count, patience)):
                return True
            if simulation.now >= deadline:
                return False
            yield sender._PAUSE_SECONDS

    def _append(self, record_count: int, patience: float) -> Tries:
        """As `Topic.append` and `Ledger.give_way`."""
        simulation = self._simulation
        begun, tries = simulation.now, 0
        while True:
            if self._is_behind:
                yield from self._read_on()
            if (yield from self._put(record_count)):
                return True
            tries += 1
            simulation.outcome.conflict_count += 1
            if simulation.now - begun > patience:
                return False
            yield simulation.pause(tries, simulation.random.random())

    def _put(self, record_count: int) -> Tries:
        """As `PieceFile.append`: put where nothing is, at the offsets that follow what it knows."""
        simulation, store = self._simulation, self._simulation.store
        start = simulation.ends[self._known]
        seconds = simulation.put_seconds(record_count)
        simulation.outcome.put_count += 1
        yield seconds * store.decided_share
        is_first = len(simulation.ends) - 1 == self._known
        if is_first:
            simulation.ends.append(simulation.ends[-1] + record_count)
            simulation.placed.append((start, start + record_count))
            self._known += 1
        yield seconds * (1 - store.decided_share)
        if not is_first:
            self._is_behind = True
            simulation.outcome.get_count += store.loser_requests
            for _ in range(store.loser_requests):
                yield simulation.get_seconds(1)
        return is_first

    def _read_on(self) -> Steps:
        """As `PieceFile.size`: ask for ever more of the next commits until one is absent."""
        simulation = self._simulation
        ahead = 1
        while True:
            simulation.outcome.get_count += ahead
            seconds = simulation.get_seconds(ahead)
            yield seconds / 2
            ends, first = simulation.ends, self._known
            found = min(ahead, len(ends) - 1 - first)
            self._known += found
            byte_count = (ends[self._known] - ends[first]) * RECORD_BYTES
            yield seconds / 2 + byte_count / simulation.store.read_bytes_per_second
            if found < ahead:
                self._is_behind = False
                return
            ahead = min(2 * ahead, pieces._AHEAD_MAX)
