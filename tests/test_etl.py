"""The ETL job as a person runs it: in a process of its own, killed, and held to one batch."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import broker

COMMAND = [sys.executable, "-m", "pipelines", "etl"]
# Spark with Delta starts in fifteen seconds; on a busy machine it takes minutes.
PATIENCE_SECONDS = 280
SPARK = """
[spark]
"spark.master" = "local[2]"
"spark.databricks.delta.snapshotPartitions" = 1
# The job is over before the better code of the JVM's second compiler would pay.
"spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""
MORNING = datetime(2026, 4, 1, 6, tzinfo=UTC)
BROKEN = {
    "not JSON at all": "not a JSON object",
    '{"order_id": "x-1", "product": "desk", "amount": "many", "at": "2026-04-01T09:00:00Z"}': (
        "missing or unusable: amount"
    ),
    '{"order_id": "x-2", "product": "lamp", "amount": -5, "at": "2026-04-01T09:00:00Z"}': (
        "negative amount"
    ),
    '{"order_id": "x-3", "product": "a", "amount": 9, "at": "2026-04-01T09:00:00Z", "tax": 1}': (
        "unknown field: tax"
    ),
}


class Shop:
    """Makes orders, some of them twice or an hour late, some broken; knows what is to come out."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._count = 0
        self.ids: set[str] = set()
        self.totals: dict[tuple[datetime, str], tuple[int, Decimal]] = {}
        self.broken: list[str] = []

    def lines(self, count: int) -> list[str]:
        return [text for _ in range(count) for text in self._some()]

    def _some(self) -> Iterator[str]:
        self._count += 1
        at = MORNING + timedelta(seconds=10 * self._count)
        if self._chance.random() < 0.1:
            at -= timedelta(minutes=self._chance.randint(1, 110))
        product = self._chance.choice(["lamp", "desk", "chair"])
        cents = self._chance.randint(0, 100_000)
        amount = Decimal(cents) / 100
        name = f"o-{self._count}"
        text = json.dumps(
            {"order_id": name, "product": product, "amount": float(amount), "at": at.isoformat()}
        )
        self.ids.add(name)
        hour = at.replace(minute=0, second=0, microsecond=0)
        orders, revenue = self.totals.get((hour, product), (0, Decimal(0)))
        self.totals[hour, product] = orders + 1, revenue + amount
        yield text
        if self._chance.random() < 0.05:
            yield text
        if self._chance.random() < 0.05:
            self.broken.append(self._chance.choice(list(BROKEN)))
            yield self.broken[-1]


class Job:
    """The log, the config and the processes of one pipeline."""

    def __init__(
        self,
        log: broker.Log,
        directory: Path,
        *,
        records_per_batch: int = 400,
        patience_seconds: int = PATIENCE_SECONDS,
    ) -> None:
        self._patience_seconds = patience_seconds
        self.log = log
        self.directory = directory
        self.gold = directory / "gold"
        self.checkpoints = directory / "checkpoints"
        self._config = directory / "etl.toml"
        self._keys: dict[str, object] = {
            "log": log.root,
            "gold": str(self.gold),
            "checkpoints": str(self.checkpoints),
            "partitions": 2,
            "records_per_batch": records_per_batch,
            "interval": "1 second",
        }
        self.set()

    def set(self, **keys: object) -> None:
        self._keys |= keys
        lines = [f"{name} = {json.dumps(value)}" for name, value in self._keys.items()]
        self._config.write_text("\n".join(lines) + SPARK)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, str(self._config), *options],
            capture_output=True,
            text=True,
            timeout=self._patience_seconds,
            cwd=self.directory,
        )

    def finish(self) -> dict[str, int]:
        """Run it to its end and return what it reports."""
        done = self.run("--json")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def refuse(self) -> str:
        """Run it and return the one line with which it refuses."""
        done = self.run()
        said = [line for line in done.stderr.splitlines() if line.startswith("spark-log: ")]
        assert (done.returncode, done.stdout, len(said)) == (1, "", 1), done.stderr[-3000:]
        assert "Traceback" not in done.stderr and "\tat " not in done.stderr
        return said[0]

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.directory / "output").open("ab") as output:
            return subprocess.Popen(
                [*COMMAND, str(self._config), *options],
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.directory,
            )

    def kill_in_a_batch(self, chance: random.Random, *options: str) -> None:
        """Start it; kill it, with its JVM and workers, soon after some query has begun a batch."""
        before = self.batches()
        self.kill_when(lambda: self.batches() != before, chance.random() * 6, *options)

    def kill_after_a_merge(self, *options: str) -> None:
        """Kill it between a MERGE and Spark's note that the batch is done."""
        before = self.merges()
        self.kill_when(lambda: self.merges() != before, 0, *options)

    def kill_when(self, is_time: Callable[[], bool], seconds: float, *options: str) -> None:
        process = self.start(*options)
        try:
            end = time.monotonic() + PATIENCE_SECONDS
            while not is_time():
                assert process.poll() is None, f"the job ended: {self.said()}"
                assert time.monotonic() < end, "the job does nothing"
                time.sleep(0.005)
            time.sleep(seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def said(self) -> list[str]:
        lines = (self.directory / "output").read_text().splitlines()
        return [line for line in lines if line.startswith("spark-log: ")]

    def batches(self) -> set[Path]:
        """Return what says that a batch has begun."""
        return set(self.checkpoints.glob("*/offsets/[0-9]*"))

    def merges(self) -> set[Path]:
        """Return the commits of gold but the first, which makes the table."""
        return set((self.gold / "_delta_log").glob("*[1-9]*.json"))

    def has_noted_its_last_merge(self) -> bool:
        last = max(int(path.stem) for path in self.merges())
        # Each batch of gold is one MERGE, and version 1 is that of batch 0.
        return (self.checkpoints / "gold" / "commits" / str(last - 1)).exists()

    def send(self, lines: list[str], topic: str = "orders") -> None:
        """Send lines in their order, some to each partition."""
        with self.log.producer() as producer:
            for number, text in enumerate(lines):
                producer.send(topic, text.encode(), partition=number % 2, key=b"k")

    def records(self, topic: str) -> list[Any]:
        with self.log.consumer(
            topic, auto_offset_reset="earliest", consumer_timeout_ms=0
        ) as consumer:
            return list(consumer)

    def totals(self) -> dict[tuple[datetime, str], tuple[int, Decimal]]:
        rows = DeltaTable(str(self.gold)).to_pyarrow_table().to_pylist()
        found = {(row["hour"], row["product"]): (row["orders"], row["revenue"]) for row in rows}
        assert len(found) == len(rows)
        return found

    def check(self, shop: Shop) -> None:
        """Hold everything that came out to what the shop sent."""
        silver = Counter(
            json.loads(record.value)["order_id"] for record in self.records("orders-silver")
        )
        assert silver == Counter(shop.ids)
        assert self.totals() == shop.totals
        letters = self.records("orders-dead-letter")
        assert Counter(letter.value.decode() for letter in letters) == Counter(shop.broken)
        sent = {(one.partition, one.offset): one.value for one in self.records("orders")}
        places = set()
        for letter in letters:
            headers = {name: value.decode() for name, value in letter.headers}
            place = int(headers["partition"]), int(headers["offset"])
            assert sent[place] == letter.value
            assert (headers["topic"], headers["reason"]) == (
                "orders",
                BROKEN[letter.value.decode()],
            )
            places.add(place)
        assert len(places) == len(letters)
        assert self.log.verify().is_sound


@pytest.fixture
def job(log: broker.Log, tmp_path: Path) -> Job:
    log.create_topic("orders", partitions=2)
    return Job(log, tmp_path)


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_job_that_is_killed_gives_what_one_batch_gives(job: Job) -> None:
    shop = Shop(1)
    job.send(shop.lines(700))
    job.kill_in_a_batch(random.Random(1))
    job.send(shop.lines(700))
    job.kill_after_a_merge("--continuous")
    assert not job.has_noted_its_last_merge()
    job.finish()
    job.check(shop)


@pytest.mark.torture
@pytest.mark.spark
@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_ten_times_gives_what_one_batch_gives(
    log: broker.Log, tmp_path: Path
) -> None:
    log.create_topic("orders", partitions=2)
    job = Job(log, tmp_path, records_per_batch=1000, patience_seconds=1200)
    chance = random.Random(2)
    shop = Shop(2)
    for number in range(10):
        job.send(shop.lines(1500))
        job.kill_in_a_batch(chance, *(["--continuous"] if number % 2 else []))
    job.finish()
    job.check(shop)
    assert job.finish() == dict.fromkeys(
        ("lines_loaded", "lines_read", "orders", "too_late", "dead_letters"), 0
    )
    job.check(shop)


# What it refuses.


def test_what_can_be_known_before_spark_starts_is_one_line(job: Job) -> None:
    assert "topic 'orders' of " in (line := job.refuse()) and "is empty: produce to it" in line
    job.set(bronze="ordres")
    assert "topic 'ordres' does not exist" in job.refuse()
    job.set(log=str(job.directory / "none"))
    assert f"no log at {job.directory / 'none'}" in job.refuse()
    job.set(sliver="x")
    assert "unknown key 'sliver'; did you mean 'silver'?" in job.refuse()


def test_without_spark_it_is_one_line_how_to_get_it(job: Job) -> None:
    # A module that is None is one that cannot be found.
    program = "import sys; sys.modules['pyspark'] = None; from broker.cli import main; main()"
    for arguments in (
        ["etl", "x.toml"],
        ["--log", job.log.root, "load", "/x", "t", "--format=csv"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("spark-log: this command needs Spark, and ")
        assert done.stderr.endswith("pip install 'spark-log[spark]'\n")
        assert done.stderr.count("\n") == 1


def test_without_java_it_is_one_line_what_is_missing(job: Job) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", "load", "/x", "orders", "--format", "csv"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAVA_HOME": "/none", "SPARK_LOG_ROOT": job.log.root},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "spark-log: Spark did not start: " in done.stderr
    assert "/none/bin/java: No such file or directory" in done.stderr


@pytest.mark.torture
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_a_table_or_a_topic_without_its_checkpoint_is_refused(job: Job) -> None:
    shop = Shop(3)
    job.send(shop.lines(300))
    job.finish()
    kept = job.directory / "kept"
    job.checkpoints.rename(kept)
    assert "topic 'orders-silver' has records, but there is no checkpoint" in job.refuse()
    shutil.copytree(kept, job.checkpoints)
    shutil.rmtree(job.checkpoints / "gold")
    assert "was made with another checkpoint" in job.refuse()
    shutil.rmtree(job.checkpoints / "gold")
    shutil.copytree(kept / "gold", job.checkpoints / "gold")
    job.set(window="2 hours")
    job.send(shop.lines(100))
    assert "has windows of 1 hour, not of 2 hours" in job.refuse()
    job.set(window="1 hour")
    job.gold.rename(job.directory / "gold-kept")
    assert "is gone, and the checkpoint is at batch" in job.refuse()
    (job.directory / "gold-kept").rename(job.gold)
    job.finish()
    job.check(shop)


@pytest.mark.torture
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_a_continuous_job_loads_its_input_and_ends_when_asked(job: Job) -> None:
    shop = Shop(4)
    drops = job.directory / "drops"
    drops.mkdir()
    (drops / "a.json").write_text("\n".join(shop.lines(300)) + "\n")
    job.set(input=str(drops))
    process = job.start("--continuous")
    end = time.monotonic() + PATIENCE_SECONDS
    while not job.merges():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_SECONDS) == 0
    (drops / "b.json").write_text("\n".join(shop.lines(300)) + "\n")
    assert job.finish()["lines_loaded"] > 300
    job.check(shop)
    files = {dict(one.headers)["file"] for one in job.records("orders-dead-letter")}
    assert files == {b"a.json", b"b.json"}
