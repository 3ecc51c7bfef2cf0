"""A log on a real HDFS whose machines die, one by one and all at once for a while."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import hdfs_native
import pyarrow as pa
import pytest

import broker
from broker.errors import StoreUnavailable
from broker.log import Log
from broker.storage import RemoteStorage, hdfs
from broker.storage.hdfs import HdfsStore
from servers import HdfsCluster

PLACE = broker.TopicPartition("t", 0)
# Of so many bytes records are written to a file of their own, which the commit names.
LARGE_BYTES = 1_200_000
LARGE_EACH = 4
# A journal file ends after some commits, and is merged.
CONFIG = {"segment.bytes": 2500, "max.message.bytes": 2 << 20}
# Sends numbered records one by one and writes down each one that was acknowledged.
WRITER = """
import sys, broker
root, name, journal = sys.argv[1:]
with open(journal, "a", buffering=1) as acknowledged, broker.open(root).producer() as producer:
    number = 0
    while True:
        offset = producer.send("t", f"{name}-{number}".encode(), partition=0).get(120).offset
        acknowledged.write(f"{offset} {name}-{number}\\n")
        number += 1
"""


@pytest.fixture
def cluster(hdfs_cluster: HdfsCluster) -> Iterator[HdfsCluster]:
    """The cluster, whole again after the test."""
    yield hdfs_cluster
    hdfs_cluster.start_all()


def elsewhere(root: str, patience_seconds: float = 60) -> Log:
    """Open the log as another machine would: nothing of it is known here."""
    return Log(RemoteStorage(HdfsStore(root, {}), patience_seconds=patience_seconds))


def short(value: bytes | None) -> bytes:
    assert value is not None
    return value if len(value) < 100 else hashlib.sha256(value).digest()


class Traffic:
    """One who writes and one, elsewhere, who reads, until told to stop; what they saw."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._stop = threading.Event()
        self.sent: list[bytes] = []
        self.seen: list[bytes] = []
        self.errors: list[BaseException] = []
        works = (self._write, self._read)
        self._threads = [threading.Thread(target=self._guard, args=(work,)) for work in works]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, count: int = 5, seconds: float = 120) -> None:
        """Wait until both have gone on from where they are now."""
        wanted, deadline = len(self.sent) + count, time.monotonic() + seconds
        while len(self.sent) < wanted or len(self.seen) < wanted:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"{len(self.sent)} sent, {len(self.seen)} seen"
            time.sleep(0.05)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self) -> None:
        with broker.open(self._root).producer(delivery_timeout_ms=180_000) as producer:
            while not self._stop.is_set():
                number = len(self.sent)
                value = b"%d" % number
                if number % LARGE_EACH == 0:
                    value += os.urandom(LARGE_BYTES)
                    table = pa.table({"value": pa.array([value], pa.binary())})
                    producer.send_batch("t", table).result(200)
                else:
                    producer.send("t", value, partition=0).get(200)
                self.sent.append(short(value))

    def _read(self) -> None:
        options = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        with elsewhere(self._root).consumer(**options) as consumer:
            consumer.assign([PLACE])
            while self._threads[0].is_alive() or len(self.seen) < len(self.sent):
                for records in consumer.poll(timeout_ms=500).values():
                    self.seen += [short(record.value) for record in records]


@pytest.fixture
def root(cluster: HdfsCluster) -> str:
    made = f"{cluster.address}/{uuid.uuid4().hex}"
    broker.open(made).create_topic("t", partitions=1, config=CONFIG)
    return made


def read(log: Log) -> list[bytes]:
    found: list[bytes] = []
    with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([PLACE])
        end = consumer.end_offsets([PLACE])[PLACE]
        while consumer.position(PLACE) < end:
            for records in consumer.poll(timeout_ms=1000).values():
                found += [short(record.value) for record in records]
    return found


def check(root: str, sent: list[bytes]) -> None:
    log = elsewhere(root)
    assert read(log) == sent
    assert not log.verify().damage
    names = [entry.name for entry in HdfsStore(root, {}).entries("topics/t/1/journal")]
    assert [name for name in names if name.endswith(".log")], "no file was merged"
    assert len(HdfsStore(root, {}).entries("topics/t/1/data")) >= len(sent) // LARGE_EACH


def test_all_datanodes_but_one_die_under_a_writer_and_a_reader(
    cluster: HdfsCluster, root: str
) -> None:
    with Traffic(root) as traffic:
        traffic.wait_for_more()
        for number in (0, 1):
            cluster.kill_datanode(number)
            traffic.wait_for_more()
            if number == 0:
                # What was written while the name node knew nothing may be on the next one only.
                cluster.wait_until_copied()
    assert not traffic.errors
    assert traffic.seen == traffic.sent
    check(root, traffic.sent)


def test_a_large_batch_is_written_though_a_datanode_has_just_died(
    cluster: HdfsCluster, root: str
) -> None:
    """The name node still believes in it, and hands it out."""
    with elsewhere(root).producer() as producer:
        cluster.kill_datanode(0)
        for value in (b"a", b"b"):
            table = pa.table({"value": [value * LARGE_BYTES]})
            producer.send_batch("t", table).result(120)
    assert read(elsewhere(root)) == [short(value * LARGE_BYTES) for value in (b"a", b"b")]


def test_a_task_of_spark_stages_and_history_is_sealed_though_a_datanode_has_just_died(
    cluster: HdfsCluster, root: str
) -> None:
    log = elsewhere(root)
    cluster.kill_datanode(1)
    stage = log.stage("t")
    stage.write(pa.table({"value": [b"a" * LARGE_BYTES, b"b"]}))
    log.commit_staged("t", [stage.finish()])
    stage.close()
    cluster.start_datanode(1)
    cluster.kill_datanode(2)
    log.maintain("t", seal=True)
    assert log.describe_topic("t").sealed_ends == (2,)
    assert read(elsewhere(root)) == [short(b"a" * LARGE_BYTES), b"b"]


def test_without_any_datanode_all_say_so_and_go_on_when_one_is_back(
    cluster: HdfsCluster, root: str
) -> None:
    log, reader = elsewhere(root, patience_seconds=3), elsewhere(root, patience_seconds=3)
    with log.producer(delivery_timeout_ms=1000, request_timeout_ms=500) as producer:
        producer.send("t", b"a").get(60)
        for number in range(3):
            cluster.kill_datanode(number)
        lost = producer.send("t", b"b")
        with pytest.raises(broker.LogError, match="name node answers, but no datanode does"):
            read(reader)
        with pytest.raises(broker.LogError, match="name node answers, but no datanode does"):
            lost.get(120)
        cluster.start_datanode(0)
        assert producer.send("t", b"c").get(120)
    assert read(reader) == read(elsewhere(root)) == [b"a", b"c"]
    assert not elsewhere(root).verify().damage


def test_the_name_node_is_restarted_under_a_writer_and_a_reader(
    cluster: HdfsCluster, root: str
) -> None:
    with Traffic(root) as traffic:
        traffic.wait_for_more()
        cluster.kill_name_node()
        time.sleep(2)
        cluster.start_name_node()
        cluster.wait_until_ready()
        traffic.wait_for_more()
    assert not traffic.errors
    assert traffic.seen == traffic.sent
    check(root, traffic.sent)


def test_a_name_node_that_falls_silent_is_not_waited_for_without_end(
    cluster: HdfsCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, as while it collects garbage; the driver itself has no limit."""
    for name in ("_ANSWER_SECONDS", "_WRITE_SECONDS"):
        monkeypatch.setattr(hdfs, name, 1.0)
    storage = RemoteStorage(HdfsStore(root, {}), patience_seconds=0.5)
    assert storage.read("none") is None
    begun = time.monotonic()
    with cluster.silent():
        with pytest.raises(StoreUnavailable, match=f"{root}/a: HDFS has not answered for 1 s"):
            storage.read("a")
        with pytest.raises(broker.OutcomeUnknown, match="HDFS has not answered for 1 s"):
            storage.create("a", b"x")
    assert time.monotonic() - begun < 10
    later = RemoteStorage(HdfsStore(root, {}), patience_seconds=60)
    later.create("a", b"x")  # Or it was, by the first.
    assert storage.read("a") == b"x"


def test_what_killed_writers_had_acknowledged_is_there_once(root: str, tmp_path: Path) -> None:
    journals = [tmp_path / f"{number}" for number in range(3)]
    for turn in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, root, f"{turn}.{number}", str(journal)],
                stderr=subprocess.DEVNULL,
            )
            for number, journal in enumerate(journals)
        ]
        wait_for_lines(journals, 4 * (turn + 1))
        for writer in writers:
            time.sleep(random.random() / 2)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    log = broker.open(root)
    with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([PLACE])
        end = consumer.end_offsets([PLACE])[PLACE]
        found: list[str] = []
        while consumer.position(PLACE) < end:
            for records in consumer.poll(timeout_ms=1000).values():
                found += [(record.value or b"").decode() for record in records]
    assert len(found) == len(set(found)) == end
    for journal in journals:
        for line in journal.read_text().splitlines():
            offset, value = line.split()
            assert found[int(offset)] == value
    assert not log.verify().damage


CROWD = """
import sys, threading, broker
root, name, threads, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
log = broker.open(root)
failures = []

def write(number):
    try:
        with log.producer(delivery_timeout_ms=280_000) as producer:
            for turn in range(count):
                value = f"{name}.{number}-{turn}".encode()
                producer.send("t", value, partition=0).get(300)
    except BaseException as error:
        failures.append(error)

started = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
for thread in started: thread.start()
for thread in started: thread.join()
if failures: raise failures[0]
"""


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_two_hundred_writers_race_on_one_topic_and_all_get_through(root: str) -> None:
    crowd = [
        subprocess.Popen([sys.executable, "-c", CROWD, root, str(number), "20", "2"])
        for number in range(10)
    ]
    assert [one.wait(800) for one in crowd] == [0] * 10
    log = broker.open(root)
    with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([PLACE])
        found: list[str] = []
        while consumer.position(PLACE) < 400:
            for records in consumer.poll(timeout_ms=1000).values():
                found += [(record.value or b"").decode() for record in records]
    assert sorted(found) == sorted(
        f"{p}.{t}-{n}" for p in range(10) for t in range(20) for n in (0, 1)
    )
    assert log.describe_topic("t").partitions[0].end_offset == 400
    assert not log.verify().damage


def wait_for_lines(files: list[Path], count: int) -> None:
    deadline = time.monotonic() + 120
    while not all(file.exists() and len(file.read_text().splitlines()) >= count for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_forked_child_forgets_what_it_inherited_and_is_told_to_begin_anew(root: str) -> None:
    """The driver's threads are not in the child, which must not wait for them."""
    logs = [broker.open(root)]

    def forget() -> None:
        logs.clear()
        gc.collect()
        with pytest.raises(broker.LogError, match="forked from one that used HDFS.*'spawn'"):
            broker.open(root)

    child = multiprocessing.get_context("fork").Process(target=forget, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert logs[0].topics() == ["t"]


def test_who_may_not_write_is_told_so_in_one_line(cluster: HdfsCluster, tmp_path: Path) -> None:
    client = hdfs_native.Client(cluster.address, cluster.client_options)
    folder = f"/{uuid.uuid4().hex}"
    client.mkdirs(folder, 0o700, True)
    script = f"import broker; broker.open('{cluster.address}{folder}/log')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HADOOP_USER_NAME": "stranger"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "not allowed to write or read" in last and "stranger" in last, done.stderr
