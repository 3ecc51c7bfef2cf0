"""Whole Spark jobs in processes of their own: killed, failing, on a cluster, by Spark Connect."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

import broker

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("spark_job.py")
LIBRARIES = Path(pyspark.__file__).parent.parent
PARTITIONS = 3
# Spark starts in ten seconds; on a busy machine it takes minutes.
PATIENCE_SECONDS = 280


def run_job(name: str, *arguments: object, **environment: str) -> Any:
    """Run a job to its end and return what it reported."""
    return run_job_aloud(name, *arguments, **environment)[0]


def run_job_aloud(name: str, *arguments: object, **environment: str) -> tuple[Any, str]:
    """Run a job to its end and return what it reported, and what was on its standard error."""
    command = [sys.executable, str(JOB), name, *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = done.stdout.splitlines()  # Delta's VACUUM prints as well.
    return (json.loads(lines[-1]) if lines else None), done.stderr


def values(log: broker.Log, topic: str) -> Counter[bytes]:
    """Return how often each value is in a topic."""
    with log.consumer(topic, auto_offset_reset="earliest") as consumer:
        counts: Counter[bytes] = Counter()
        while batches := consumer.poll_batches(timeout_ms=0):
            for batch in batches.values():
                counts.update(batch.column("value").to_pylist())
    return counts


def numbers(count: int) -> Counter[bytes]:
    return Counter(b"%d" % number for number in range(count))


# Killed at any moment.


def test_a_driver_killed_in_its_first_batch_and_later_loses_and_repeats_nothing(
    log: broker.Log, tmp_path: Path
) -> None:
    kill_and_restart(log, tmp_path, "latest", seed=1, random_kill_count=1)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(5))
def test_a_driver_killed_in_its_first_batch_and_four_times_more_loses_and_repeats_nothing(
    log: broker.Log, tmp_path: Path, number: int
) -> None:
    start = ["latest", "timestamp", "earliest", "latest", "timestamp"][number]
    kill_and_restart(log, tmp_path, start, seed=100 + number, random_kill_count=4)


def kill_and_restart(
    log: broker.Log, tmp_path: Path, start: str, *, seed: int, random_kill_count: int
) -> None:
    """Kill a copying query in its first batch, then at random moments; then let it end.

    What was written after the query began must be in the copy exactly once.
    """
    chance = random.Random(seed)
    topic = f"orders{seed}"
    log.create_topic(topic, partitions=PARTITIONS)
    log.create_topic(f"{topic}-copy", partitions=PARTITIONS)
    job = CopyJob(log.root, topic, start, tmp_path / topic)
    with job, Feeder(log, topic) as feeder:
        begin = kill_in_first_batch(job, feeder, chance)
        for _ in range(random_kill_count):
            job.start()
            job.wait_for_batch(job.last_batch() + 1)
            time.sleep(chance.random() * 1.5)
            job.kill()
    with job:
        job.start(mode="finish")
        job.wait()
    expected = Counter(
        b"%d-%d" % (partition, offset)
        for partition, sent in enumerate(feeder.counts)
        for offset in range(begin[partition], sent)
    )
    assert values(log, f"{topic}-copy") == expected
    assert len(expected) > 1000
    assert log.verify(f"{topic}-copy").is_sound


def kill_in_first_batch(job: CopyJob, feeder: Feeder, chance: random.Random) -> list[int]:
    """Kill a query while a task of its first batch has records; return where the batch began.

    Held at its start until there are records behind it, it cannot find its first batch empty, and
    held in a task, it cannot finish it, from whichever offset it starts.
    """
    job.hold("start", "task")
    job.start()
    job.wait_at("start")
    seen = list(feeder.counts)
    # What is sent is committed within moments, one after the other.
    while any(now < before + 10 for now, before in zip(feeder.counts, seen, strict=True)):
        time.sleep(0.005)
    job.release("start")
    job.wait_at("task")
    time.sleep(chance.random() * 0.3)
    assert not job.has_committed(0)
    job.kill()
    job.release("task")
    begin, end = job.first_batch()
    assert all(first < last for first, last in zip(begin, end, strict=True))
    assert job.last_batch() == 0 and not job.has_committed(0)
    return begin


class Feeder:
    """Writes all the time; each value says where it is."""

    def __init__(self, log: broker.Log, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self.counts = [0] * PARTITIONS

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _feed(self) -> None:
        with self._log.producer(linger_ms=0) as producer:
            while not self._is_over.wait(0.005):
                for partition in range(PARTITIONS):
                    value = b"%d-%d" % (partition, self.counts[partition])
                    producer.send(self._topic, value, partition=partition)
                    self.counts[partition] += 1


class CopyJob:
    """A driver that copies a topic, its JVM and its workers: one process group."""

    def __init__(self, root: str, topic: str, start: str, checkpoint: Path) -> None:
        self._topic = topic
        self._gates = checkpoint.with_suffix(".gates")
        self._gates.mkdir()
        self._arguments = ["copy", root, topic, start, str(checkpoint), str(self._gates)]
        self._checkpoint = checkpoint
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CopyJob:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def start(self, *, mode: str = "follow") -> None:
        command = [sys.executable, str(JOB), *self._arguments, mode]
        output = self._checkpoint.with_suffix(".output")
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True
            )

    def hold(self, *places: str) -> None:
        """Let the query wait at these places: its start, its tasks."""
        for place in places:
            (self._gates / f"hold-{place}").touch()

    def release(self, place: str) -> None:
        (self._gates / f"hold-{place}").unlink()

    def wait_at(self, place: str) -> None:
        """Wait until the query is held at a place."""
        self._wait_for(self._gates / f"at-{place}")

    def wait_for_batch(self, number: int) -> None:
        """Wait until a batch has begun: its end is in the checkpoint."""
        self._wait_for(self._checkpoint / "offsets" / str(number))

    def _wait_for(self, path: Path) -> None:
        assert self._process is not None
        end = time.monotonic() + PATIENCE_SECONDS
        while not path.exists():
            assert self._process.poll() is None, "the job ended"
            assert time.monotonic() < end, "the job does nothing"
            time.sleep(0.005)

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        assert self._process is not None
        assert self._process.wait(timeout=PATIENCE_SECONDS) == 0

    def last_batch(self) -> int:
        files = (self._checkpoint / "offsets").iterdir()
        return max(int(path.name) for path in files if path.name.isdigit())

    def has_committed(self, batch: int) -> bool:
        return (self._checkpoint / "commits" / str(batch)).exists()

    def first_batch(self) -> tuple[list[int], list[int]]:
        """Return where each partition began, and where the first batch ended."""
        text = (self._checkpoint / "offsets/0").read_text().splitlines()[2]
        end = json.loads(text)
        start = end["@"].get("start", end)
        return tuple(  # type: ignore[return-value]
            [one[self._topic][str(number)] for number in range(PARTITIONS)] for one in (start, end)
        )


# Tasks that fail or are run twice.


def test_tasks_that_fail_at_first_write_once(log: broker.Log) -> None:
    for topic in ("out", "again"):
        log.create_topic(topic, partitions=2)
    run_job("retry", log.root)
    assert values(log, "out") == numbers(40_000)
    assert values(log, "again") == numbers(40_000)
    assert log.verify().is_sound


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone master with two workers, on two addresses so that Spark sees two hosts."""
    directory = tmp_path_factory.mktemp("cluster")
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    common = ["--webui-port", "0"]
    commands = [["master.Master", "-h", "127.0.0.1", "-p", str(port), *common]]
    for host in ("127.0.0.2", "127.0.0.3"):
        limits = ["-c", "1", "-m", "1g", "-d", str(directory / host)]
        commands.append(["worker.Worker", "-h", host, *limits, *common, address])
    processes = [start_daemon(directory, *command) for command in commands]
    try:
        wait_for_workers(directory / "master.Master", 2)
        yield address
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start_daemon(directory: Path, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
    launcher = Path(pyspark.__file__).parent / "bin/spark-class"
    command = [str(launcher), f"org.apache.spark.deploy.{kind}", *arguments]
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    environment = {
        "SPARK_DAEMON_MEMORY": "512m",
        "SPARK_DAEMON_JAVA_OPTS": options,
        "PYTHONPATH": str(LIBRARIES),
    }
    with (directory / kind).open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | environment,
        )


def wait_for_workers(output: Path, count: int) -> None:
    end = time.monotonic() + 60
    while output.read_text().count("Registering worker") < count:
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_speculative_task_writes_nothing_twice(
    log: broker.Log, master: str, tmp_path: Path
) -> None:
    log.create_topic("out", partitions=2)
    marks = tmp_path / "marks"
    marks.mkdir()
    run_job("speculate", log.root, master, marks)
    attempts = {path.name for path in marks.iterdir()}
    assert {"0-0", "0-1"} <= attempts, "Spark did not start a second attempt"
    assert values(log, "out") == numbers(4000)


def test_an_executor_without_the_package_says_how_to_install_it(
    log: broker.Log, master: str, tmp_path: Path
) -> None:
    log.create_topic("out")
    with log.producer() as producer:
        producer.send("out", b"a")
    # Without the site module, Python does not follow the link to the package's sources.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    path = f"{LIBRARIES}:{Path(broker.__file__).parent.parent}"
    found = run_job("lack", log.root, master, python, PYTHONPATH=path)
    for text in (found["read"], found["write"]):
        assert f"the Python of this executor ({sys.executable})" in text
        assert "has no module 'spark_log" in text and "pip install spark-log" in text
    assert values(log, "out") == Counter([b"a"])


# Other ways to Spark.


def test_spark_connect_reads_and_writes(log: broker.Log) -> None:
    for topic in ("out", "again"):
        log.create_topic(topic, partitions=2)
    found = run_job("connect", log.root)
    assert (found["count"], found["distinct"]) == (100, 100)
    assert "topic 'none' does not exist" in found["error"]
    assert values(log, "out") == numbers(100)


def test_the_session_helper_sets_what_is_needed(log: broker.Log) -> None:
    log.create_topic("out")
    found, errors = run_job_aloud("session", log.root)
    assert "a session without Delta Lake is running" in found.pop("delta")
    assert found == {
        "name": "helper",
        "master": "local[1]",
        "python": sys.executable,
        "socket": "true",
        "shuffle": "3",
        "ui": "false",
        "is_same": True,
        "mine": "kept",
        "catalog": None,
    }
    assert values(log, "out") == Counter([b"a"])
    # What Spark says by itself, of its log level and of libraries that are not there.
    assert " WARN " not in errors and "log level" not in errors, errors


def test_the_session_helper_with_delta_has_its_catalog_its_sql_and_its_format(
    log: broker.Log,
) -> None:
    log.create_topic("out")
    found = run_job("delta_session", log.root)
    assert found == {"operations": ["WRITE", "CREATE TABLE"], "count": 20}
    assert values(log, "out") == numbers(20)
