"""Consumer groups: reading as a member, position commits, fail-over, static restarts, age.

Rates are by processor time, user's and system's, of all threads: this work waits for nothing, and
other work on the machine must not count. Pauses and fail-over are by the clock on the wall.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import broker
from benchmarks.table import Row, best_of_pairs
from broker import RecordMetadata, TopicPartition, batch
from broker.commit import Author
from broker.group import Position, group
from broker.group.group import Group
from broker.ledger import new_token
from broker.storage import LocalStorage
from broker.topic import Topic, create

PARTITIONS = 4
RECORDS = 400_000
PLACES = [TopicPartition("t", number) for number in range(PARTITIONS)]
MEMBER = Path(__file__).parent.parent / "tests" / "group_member.py"


def group_of_one(directory: Path) -> list[Row]:
    """Records by poll() as the only member of a group, against the same consumer with assign."""
    log = broker.open(directory / "log")
    log.create_topic("t", partitions=PARTITIONS)
    values = pa.array([b"x" * 100] * (RECORDS // 10), pa.binary())
    with log.producer() as producer:
        for _ in range(10):
            producer.send_batch("t", pa.record_batch({"value": values}))
    turn = iter(range(1_000_000))

    def read(consumer: Any) -> float:
        with consumer:
            while len(consumer.assignment()) < PARTITIONS:
                consumer.poll(100, max_records=1)
            consumer.seek_to_beginning()
            begun = time.process_time()
            rest = RECORDS
            while rest > 0:
                rest -= sum(len(many) for many in consumer.poll(1000).values())
            return RECORDS / (time.process_time() - begun)

    def member() -> float:
        return read(log.consumer("t", group_id=f"g{next(turn)}", auto_offset_reset="earliest"))

    def assigned() -> float:
        consumer = log.consumer(auto_offset_reset="earliest")
        consumer.assign(PLACES)
        return read(consumer)

    mine, other, ratios = best_of_pairs(member, assigned, 7)
    ratio = statistics.median(ratios)
    return [
        Row(
            "a group of one over 4 partitions",
            f"{mine:,.0f} rec/s",
            f"{other:,.0f} rec/s with assign",
            ratio,
            "0.9x",
            ratio >= 0.9,
            ratios,
        )
    ]


def position_commits(directory: Path) -> list[Row]:
    """Positions of 4 partitions, one commit each, against commits of one small record."""
    storage = LocalStorage(str(directory / "log"))
    create(storage, "t", 1, partitions=PARTITIONS, config={})
    topic = Topic(storage, "t", 1, write=True)
    opened = one_member(storage)
    frame = batch.encode_records([None], [b"x" * 100], None, [1])
    count = 5_000
    turn = iter(range(1_000_000_000))

    def positions() -> float:
        return rate(lambda: commit(opened, next(turn)), count)

    def plain() -> float:
        return rate(lambda: topic.append([(0, frame)], Author(new_token())), count)

    mine, other, ratios = best_of_pairs(positions, plain, 7)
    opened.close()
    topic.close()
    ratio = statistics.median(ratios)
    return [
        Row(
            "position commits, one member",
            f"{mine:,.0f} /s",
            f"{other:,.0f} /s plain commits",
            ratio,
            "0.5x",
            ratio >= 0.5,
            ratios,
        )
    ]


def kill_to_reading(directory: Path) -> list[Row]:
    """From SIGKILL of a member to the last of its partitions being read by the other."""
    session = 3.0
    pace = ["session_timeout_ms=3000", "heartbeat_interval_ms=300"]
    taken = tuple(fail_over(directory / str(turn), pace) for turn in range(5))
    worst = max(taken)
    return [
        Row(
            "SIGKILL of a member until its partitions are read",
            f"{statistics.median(taken):.2f} s, worst {worst:.2f} s",
            f"{session:.0f} s session timeout",
            None,
            "timeout + 1 s",
            worst < session + 1,
            taken,
        )
    ]


def static_restart(directory: Path) -> list[Row]:
    """The longest pause of the other member while a static one goes and comes back.

    On a small machine, a process that starts holds up all others, which is not the group's doing.
    So the same is done in a second group that reads the same topic, by turns: what a member waits
    for when somebody of another group restarts is what the machine makes it wait.
    """
    own, foreign = [], []
    for turn in range(5):
        own.append(restart(directory / f"own {turn}", "g"))
        foreign.append(restart(directory / f"other {turn}", "other"))
    mine, elsewhere = (statistics.median(after for after, _ in each) for each in (own, foreign))
    quiet = statistics.median(before for _, before in own + foreign)
    return [
        Row(
            "static restart: the others' longest pause",
            f"{mine * 1000:.0f} ms",
            f"{quiet * 1000:.0f} ms when nothing happens, "
            f"{elsewhere * 1000:.0f} ms when it is in another group",
            None,
            "50 ms more",
            mine < quiet + 0.05,
            tuple(round(after - before, 4) for after, before in own),
        )
    ]


def age(directory: Path) -> list[Row]:
    """A commit, and opening to describe, after 1,000,000 position commits and after 1,000."""
    rows = []
    young, old = LocalStorage(str(directory / "young")), LocalStorage(str(directory / "old"))
    for storage, count in ((young, 1_000), (old, 1_000_000)):
        opened = one_member(storage)
        for number in range(count):
            commit(opened, number)
        opened.close()
    for what, work in (("commit", commit_once), ("describe", describe_once)):
        mine, other, ratios = best_of_pairs(lambda w=work: w(old), lambda w=work: w(young), 7)
        ratio = statistics.median(ratios)
        rows.append(
            Row(
                f"{what} after 1,000,000 position commits",
                f"{mine * 1e6:,.0f} µs",
                f"{other * 1e6:,.0f} µs after 1,000",
                ratio,
                "under 2x",
                ratio < 2,
                ratios,
            )
        )
    return rows


def one_member(storage: LocalStorage) -> Group:
    """Return a group with one member that has all partitions."""
    group.create(storage, "g", 1)
    opened = Group(storage, "g", 1, write=True)
    member = group.Member("m", "", "here", None, ("t",), None, ("sticky",), 10_000)
    opened.join(member)
    topics = {"t": group.KnownTopic(1, PARTITIONS)}
    opened.assign(lambda state: (topics, {"m": {"t": list(range(PARTITIONS))}}))
    return opened


def commit(opened: Group, number: int) -> None:
    opened.commit_positions(
        {place: Position(number, 1, 0, 0) for place in PLACES},
        member_id="m",
        generation=1,
    )


def rate(act: Callable[[], Any], count: int) -> float:
    begun = time.process_time()
    for _ in range(count):
        act()
    return count / (time.process_time() - begun)


def commit_once(storage: LocalStorage) -> float:
    opened = Group(storage, "g", 1, write=True)
    commit(opened, 1)
    taken = 1 / rate(lambda: commit(opened, 2), 500)
    opened.close()
    return taken


def describe_once(storage: LocalStorage) -> float:
    def describe() -> None:
        opened = Group(storage, "g", 1)
        assert len(opened.state.positions) == PARTITIONS
        opened.close()

    return 1 / rate(describe, 20)


class Members:
    """Member processes on a log that is being written to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.log = broker.open(directory / "log")
        self.log.create_topic("t", partitions=PARTITIONS)
        self.processes: list[subprocess.Popen[bytes]] = []
        # When each record was sent: (partition, offset) -> time.
        self.sent: dict[tuple[int, int], float] = {}
        self._stop = threading.Event()
        self._feeder = threading.Thread(target=self._feed)
        self._feeder.start()

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(MEMBER), str(self.directory / "log"), str(self.out(name))]
        process = subprocess.Popen([*command, *options])
        self.processes.append(process)
        return process

    def out(self, name: str) -> Path:
        return self.directory / name

    def reads(self, name: str) -> list[list[Any]]:
        path = self.out(name)
        if not path.exists():
            return []
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
        return [line for line in map(json.loads, lines) if line[0] == "read"]

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("the group did not get there")
            time.sleep(0.02)

    def partitions(self, name: str, since: float = 0) -> set[int]:
        return {line[5] for line in self.reads(name) if line[1] > since}

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
        self._stop.set()
        self._feeder.join()

    def _feed(self) -> None:
        with self.log.producer() as producer:
            while not self._stop.wait(0.005):
                now = clock()
                for partition in range(PARTITIONS):
                    sent = producer.send("t", b"x", partition=partition)
                    sent.add_callback(self._note_sent, now)

    def _note_sent(self, time: float, record: RecordMetadata) -> None:
        self.sent[record.partition, record.offset] = time


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def fail_over(directory: Path, pace: list[str]) -> float:
    members = Members(directory)
    try:
        victim = members.start("victim", *pace)
        members.start("other", *pace)
        members.wait_for(lambda: bool(members.reads("victim")) and bool(members.reads("other")))
        time.sleep(1)
        killed = clock()
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        lost = members.partitions("victim", killed - 0.5)
        members.wait_for(lambda: lost <= members.partitions("other", killed))
        first: dict[int, float] = {}
        for line in members.reads("other"):
            if line[1] > killed and line[5] in lost:
                first.setdefault(line[5], line[1])
        return max(first.values()) - killed
    finally:
        members.end()


def restart(directory: Path, group: str) -> tuple[float, float]:
    """Restart a static member of a group; the other is in group `g`.

    Returns:
        The longest pause of the other meanwhile, and that in as long a time before.
    """
    pace = ["session_timeout_ms=10000", "heartbeat_interval_ms=300"]
    victim_options = [*pace, "group_instance_id=one", f"group_id={group}"]
    members = Members(directory)
    try:
        victim = members.start("victim", *victim_options)
        members.start("other", *pace, "group_instance_id=two", "group_id=g")
        members.wait_for(lambda: bool(members.reads("victim")) and bool(members.reads("other")))
        time.sleep(1)
        before = members.log.describe_group(group).generation
        # Started before, for its imports would hold up everybody on a small machine.
        begin = members.out("begin")
        members.start("again", *victim_options, f"begin_at={begin}")
        members.wait_for(members.out("again").exists)
        time.sleep(4)
        killed = clock()
        os.kill(victim.pid, signal.SIGTERM)
        victim.wait()
        begin.touch()
        members.wait_for(lambda: len(members.reads("again")) > 20)
        now = clock()
        if members.log.describe_group(group).generation != before:
            return float("inf"), 0.0
        reads = members.reads("other")
        return (
            pause(members, reads, killed, now),
            pause(members, reads, max(2 * killed - now, killed - 4), killed),
        )
    finally:
        members.end()


def pause(members: Members, reads: list[list[Any]], start: float, end: float) -> float:
    """Return the longest time from when a record was sent to when it was read.

    Not that between two reads: while nobody writes, there is nothing to read.
    """
    return max(
        line[1] - members.sent[line[5], line[6]]
        for line in reads
        if start < line[1] <= end and (line[5], line[6]) in members.sent
    )


BENCHMARKS = [group_of_one, position_commits, kill_to_reading, static_restart, age]
