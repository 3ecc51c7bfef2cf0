"""Producers maintain what they write to, in the background, and so does the command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import broker
from broker.maintenance import keeper
from broker.maintenance.keeping import ROUND_MS, Round
from broker.maintenance.units import Progress
from broker.storage import LocalStorage
from broker.topic import Topic

NAME = "orders"
CONFIG = {"segment.bytes": 20_000, "seal.bytes": 60_000, "file.delete.delay.ms": 0}
TABLE = pa.table({"value": [b"%0100d" % number for number in range(100)]})


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to it in time"
        time.sleep(0.05)


def send(log: broker.Log, batches: int) -> None:
    with log.producer() as producer:
        for _ in range(batches):
            producer.send_batch(NAME, TABLE)


def sealed_records(log: broker.Log) -> int:
    return sum(log.describe_topic(NAME).sealed_ends)


def make_due(root: Path) -> None:
    """Let the last full round have been long ago."""
    path = root / "locks" / f"maintained={NAME}"
    then = time.time() - ROUND_MS / 1000 - 1
    os.utime(path, (then, then))


def test_a_producer_seals_what_it_writes(log: broker.Log) -> None:
    log.create_topic(NAME, 2, config=CONFIG)
    with log.producer() as producer:
        sent = 0
        while not sealed_records(log):
            producer.send_batch(NAME, TABLE).result(60)
            sent += 100
            assert sent < 1_000_000
        producer.send_batch(NAME, TABLE).result(60)
    with log.consumer(NAME, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        assert sum(1 for _ in consumer) == sent + 100


def test_a_topic_can_be_left_alone(log: broker.Log) -> None:
    log.create_topic(NAME, config=CONFIG | {"maintenance.enabled": False})
    with log.producer() as producer:
        for _ in range(30):
            producer.send_batch(NAME, TABLE).result(60)
            time.sleep(0.05)
    assert sealed_records(log) == 0
    (done,) = log.maintain(NAME)
    assert done.sealed_records > 0


def test_even_short_lived_producers_apply_retention(log: broker.Log, root: Path) -> None:
    log.create_topic(NAME, config={"retention.ms": 1000, "segment.bytes": 1000})
    with log.producer() as producer:
        for _ in range(10):
            producer.send(NAME, b"v" * 500, timestamp_ms=1000).result(60)
    assert log.describe_topic(NAME).record_count == 10, "a new topic is not due"
    make_due(root)
    with log.producer() as producer:
        producer.send(NAME, b"new").result(60)
        wait_until(lambda: log.describe_topic(NAME).record_count == 1)


def test_closing_does_not_wait_for_a_round(log: broker.Log) -> None:
    log.create_topic(NAME, config=CONFIG)
    send(log, 500)
    begun = time.monotonic()
    send(log, 1)
    assert time.monotonic() - begun < 10


def test_a_topic_deleted_under_its_keeper_is_no_trouble(
    log: broker.Log, caplog: pytest.LogCaptureFixture
) -> None:
    log.create_topic(NAME, config=CONFIG)
    with log.producer() as producer:
        for _ in range(3):
            # The first commit finds that the topic is another one.
            with contextlib.suppress(broker.UnknownTopic):
                producer.send_batch(NAME, TABLE).result(60)
            for _ in range(20):
                producer.send_batch(NAME, TABLE).result(60)
            log.delete_topic(NAME)
            log.create_topic(NAME, config=CONFIG)
            time.sleep(0.5)
    assert "could not maintain" not in caplog.text


def test_a_keeper_goes_on_after_any_failure_with_one_warning(
    log: broker.Log,
    root: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.create_topic(NAME, config=CONFIG)
    send(log, 20)
    failures = [OSError(5, "Input/output error")]

    def make_round(name: str, progress: Progress) -> Round:
        if failures:
            raise failures.pop()
        return log._round(name, progress)

    monkeypatch.setattr(keeper, "_REST_SECONDS", 1.5)
    topic = Topic(LocalStorage(str(root)), NAME, 1, write=True)
    kept = keeper.Keeper(make_round)
    make_due(root)
    kept.look_after(topic)
    try:
        wait_until(lambda: sealed_records(log) > 0)
    finally:
        kept.close()
        topic.close()
    assert caplog.text.count("could not maintain") == 1 and "Input/output error" in caplog.text


def stage(log: broker.Log) -> None:
    """Write as Spark's sink does."""
    made = log.stage(NAME)
    made.write(TABLE)
    staged = made.finish()
    made.close()
    log.commit_staged(NAME, [staged])


def test_staged_records_are_maintained_by_a_process_apart(log: broker.Log, root: Path) -> None:
    log.create_topic(NAME, config={"seal.ms": 0, "retention.ms": -1})
    stage(log)
    assert sealed_records(log) == 0, "a new topic is not due"
    make_due(root)
    stage(log)
    wait_until(lambda: sealed_records(log) == 200)


def test_a_topic_left_alone_is_not_maintained_apart(log: broker.Log, root: Path) -> None:
    log.create_topic(NAME, config={"seal.ms": 0, "maintenance.enabled": False})
    (root / "locks").mkdir(exist_ok=True)
    (root / "locks" / f"maintained={NAME}").touch()
    make_due(root)
    stage(log)
    time.sleep(2)
    assert sealed_records(log) == 0


# The command.


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.cli", "--log", str(root), "maintain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_says_what_it_did(log: broker.Log, root: Path) -> None:
    log.create_topic(NAME, 2, config=CONFIG | {"maintenance.enabled": False})
    send(log, 10)
    done = run(root, "--seal")
    assert (done.returncode, done.stderr) == (0, "")
    header, row = done.stdout.splitlines()
    assert header.split()[:2] == ["TOPIC", "SEALED"] and row.split()[:3] == [NAME, "1,000", "2"]
    (told,) = json.loads(run(root, "--json").stdout)
    assert told["topic"] == NAME and told["sealed_records"] == 0


def test_the_command_refuses_an_unknown_topic_in_one_line(log: broker.Log, root: Path) -> None:
    done = run(root, "nothing")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "spark-log: topic 'nothing' does not exist; see `spark-log topic list`\n"


def damage_journal(root: Path, topic: str) -> Path:
    path = sorted((root / "topics" / topic / "1" / "journal").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    return path


def test_the_command_maintains_the_others_and_names_what_failed(
    log: broker.Log, root: Path
) -> None:
    for name in ("broken", NAME):
        log.create_topic(name, config=CONFIG | {"maintenance.enabled": False})
        with log.producer() as producer:
            producer.send_batch(name, TABLE)
    path = damage_journal(root, "broken")
    done = run(root, "--seal")
    assert done.returncode == 1 and done.stdout.splitlines()[1].split()[:2] == [NAME, "100"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("spark-log: could not maintain topic 'broken': ") and path.name in line
    alone = run(root, "broken")
    assert (alone.returncode, alone.stdout) == (1, "") and path.name in alone.stderr


def test_the_command_goes_on_for_ever_beside_what_fails(log: broker.Log, root: Path) -> None:
    for name in ("broken", NAME):
        log.create_topic(name, config=CONFIG | {"maintenance.enabled": False})
    with log.producer() as producer:
        producer.send_batch("broken", TABLE)
    path = damage_journal(root, "broken")
    command = [sys.executable, "-m", "broker.cli", "--log", str(root), "maintain", "--forever"]
    process = subprocess.Popen([*command, "--interval", "0.1"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert path.name.encode() in process.stderr.readline()
    send(log, 50)
    wait_until(lambda: sealed_records(log) > 0)
    process.send_signal(2)
    assert process.stderr.read().endswith(b"spark-log: interrupted\n")
    process.stderr.close()
    assert process.wait(30) == 130


def test_the_command_goes_on_until_it_is_interrupted(log: broker.Log, root: Path) -> None:
    log.create_topic(NAME, config=CONFIG | {"maintenance.enabled": False})
    command = [sys.executable, "-m", "broker.cli", "--log", str(root), "maintain", "--forever"]
    process = subprocess.Popen([*command, "--interval", "0.1"], stderr=subprocess.PIPE)
    send(log, 50)
    wait_until(lambda: sealed_records(log) > 0)
    process.send_signal(2)
    assert process.stderr is not None
    assert process.stderr.read() == b"spark-log: interrupted\n"
    process.stderr.close()
    assert process.wait(30) == 130
