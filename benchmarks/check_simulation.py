"""`python -m benchmarks check-simulation`: the real code and the simulation on the same slow store.

The store is in memory and sleeps as the simulated one does; every writer is a thread with a log and
a producer of its own, which sends one record and waits for it.
"""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections import Counter
from typing import Any

from benchmarks.simulation import Load, Outcome, Simulation, Store
from broker.log import Log
from broker.storage.memory import MemoryStore
from broker.storage.remote import RemoteStorage

STORE = Store("slow", put_seconds=0.1, get_seconds=0.02)
WRITERS = (1, 8, 30)
SECONDS = 40.0
SIMULATED_COMMITS = 5000

_REQUESTS = ("get", "put_new", "put", "stat", "entries", "delete", "delete_tree")


class SlowStore:
    """Passes requests on, and takes its time before and after."""

    def __init__(self, store: MemoryStore, model: Store) -> None:
        self._store = store
        self._model = model
        self.root = store.root
        self.poll_seconds = 1.0
        self.is_known = True
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _REQUESTS:
            return method
        model, is_put = self._model, name.startswith("put")
        median = model.put_seconds if is_put else model.get_seconds
        share = model.decided_share if is_put else 0.5

        def ask(path: str, *arguments: Any) -> Any:
            self.counts[name] += 1
            seconds = median * math.exp(random.gauss(0.0, model.sigma))
            time.sleep(seconds * share)
            try:
                return method(path, *arguments)
            finally:
                time.sleep(seconds * (1 - share))

        return ask


def run_real(writer_count: int, seconds: float) -> Outcome:
    """Let producers of the real code race for so long."""
    memory = MemoryStore(f"memory://{uuid.uuid4().hex}")
    Log(RemoteStorage(memory)).create_topic("t", 1)
    store = SlowStore(memory, STORE)
    outcome = Outcome(seconds=seconds, commits_by_writer=[0] * writer_count)
    deadline = time.monotonic() + seconds

    def write(number: int) -> None:
        with Log(RemoteStorage(store)).producer() as producer:
            while (begun := time.monotonic()) < deadline:
                producer.send("t", b"x" * 100).get(150)
                if (now := time.monotonic()) < deadline:
                    outcome.latencies.append(now - begun)
                    outcome.commits_by_writer[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writer_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.commit_count = len(outcome.latencies)
    outcome.put_count, outcome.get_count = store.counts["put_new"], store.counts["get"]
    return outcome


def main() -> int:
    for writer_count in WRITERS:
        real = run_real(writer_count, SECONDS)
        load = Load(writer_count, math.inf, is_grouped=False)
        simulated = Simulation(STORE, load).run(SIMULATED_COMMITS)
        for name, outcome in (("real", real), ("simulated", simulated)):
            commits = outcome.commit_count
            print(
                f"{writer_count:>3} writers, {name:<9}: {commits / outcome.seconds:.1f} commits/s, "
                f"p50 {outcome.latency(0.5):.2f} s, p99 {outcome.latency(0.99):.2f} s, "
                f"{outcome.put_count / commits:.2f} puts and "
                f"{outcome.get_count / commits:.1f} gets a commit",
                flush=True,
            )
    return 0
