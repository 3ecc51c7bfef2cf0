"""What clients count, as totals and rates, in Python and in Prometheus' form."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import Log, TopicPartition
from broker.maintenance.keeping import hold
from broker.maintenance.units import write_here
from broker.metrics import Metrics
from broker.storage import LocalStorage


@pytest.fixture
def log(root: Path) -> Log:
    log = broker.open(root)
    log.create_topic("t", partitions=2)
    return log


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_that_of_the_last_half_minute() -> None:
    clock = Clock()
    metrics = Metrics("g", ["thing"], clock=clock)
    for _ in range(100):
        clock.now += 1
        metrics.add("thing", 5)
        reading = metrics.read()["g"]
    assert reading["thing-total"] == 500
    assert reading["thing-rate"] == pytest.approx(5)
    clock.now += 20
    assert metrics.read()["g"]["thing-rate"] == pytest.approx(1.6, abs=1.5)
    clock.now += 100
    assert metrics.read()["g"]["thing-rate"] == pytest.approx(0, abs=0.1)


def test_a_latency_has_an_average_over_its_count() -> None:
    metrics = Metrics("g", ["commit"], {"commit-latency": "commit"})
    assert metrics.read()["g"]["commit-latency-avg"] == 0
    for seconds in (0.1, 0.3):
        metrics.add("commit")
        metrics.add("commit-latency", seconds)
    assert metrics.read()["g"]["commit-latency-avg"] == pytest.approx(0.2)


def test_looks_in_quick_succession_do_not_pile_up() -> None:
    clock = Clock()
    metrics = Metrics("g", ["thing"], clock=clock)
    for _ in range(10_000):
        clock.now += 0.01
        metrics.read()
    assert len(metrics._samples) < 50


def test_a_producer_counts_what_it_sends(log: Log) -> None:
    with log.producer() as producer:
        for number in range(10):
            producer.send("t", b"x" * 100, partition=number % 2).result(30)
        counted = producer.metrics()["producer-metrics"]
    assert counted["record-send-total"] == 10
    assert counted["batch-total"] == 10
    assert counted["byte-total"] > 1000
    assert counted["record-send-rate"] > 0
    assert counted["commit-latency-avg"] > 0
    assert (counted["record-error-total"], counted["record-retry-total"]) == (0, 0)


def test_commits_of_others_in_between_are_conflicts(log: Log) -> None:
    with log.producer() as one, log.producer() as two:
        for _ in range(3):
            one.send("t", b"1").result(30)
            two.send("t", b"2").result(30)
        assert one.metrics()["producer-metrics"]["conflict-total"] >= 2


def test_what_could_not_be_sent_is_counted(log: Log) -> None:
    with log.producer() as producer:
        producer.send("t", b"x").result(30)
        log.delete_topic("t")
        with pytest.raises(broker.UnknownTopic):
            producer.send("t", b"x").result(30)
        assert producer.metrics()["producer-metrics"]["record-error-total"] == 1


def test_a_consumer_counts_what_it_reads_and_how_far_it_is_behind(log: Log) -> None:
    with log.producer() as producer:
        for number in range(10):
            producer.send("t", b"x" * 100, partition=number % 2)
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        while sum(map(len, consumer.poll(1000, max_records=3).values())) == 0:
            pass
        counted = consumer.metrics()["consumer-fetch-manager-metrics"]
        assert counted["records-consumed-total"] == 3
        assert counted["records-lag"] == 7
        assert counted["records-lag-max"] == 5
        assert counted["fetch-total"] >= 1
        assert counted["bytes-consumed-total"] > 1000
        assert counted["fetch-latency-avg"] > 0


@pytest.mark.parametrize("way", ["poll_batches", "iterate"])
def test_every_way_of_reading_is_counted(log: Log, way: str) -> None:
    with log.producer() as producer:
        for _ in range(10):
            producer.send("t", b"x", partition=0)
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        if way == "iterate":
            assert len(list(consumer)) == 10
        else:
            assert sum(each.num_rows for each in consumer.poll_batches(1000).values()) == 10
        counted = consumer.metrics()["consumer-fetch-manager-metrics"]
    assert counted["records-consumed-total"] == 10


def test_a_member_counts_commits_and_rebalances(log: Log) -> None:
    with log.consumer("t", group_id="g") as consumer:
        while not consumer.assignment():
            consumer.poll(100)
        consumer.commit({TopicPartition("t", 0): 0})
        counted = consumer.metrics()["consumer-coordinator-metrics"]
    assert counted["commit-total"] == 1
    assert counted["commit-latency-avg"] > 0
    assert counted["rebalance-total"] >= 1


def test_maintenance_counts_what_it_does(log: Log) -> None:
    with log.producer() as producer:
        for _ in range(10):
            producer.send("t", b"x", partition=0)
    log.maintain(seal=True)
    counted = log.metrics()["maintenance-metrics"]
    assert counted["round-total"] >= 1
    assert counted["sealed-records-total"] == 10
    assert counted["round-latency-avg"] > 0


def sealed_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "topics/t/1/sealed").rglob("*.parquet"))


def test_maintenance_counts_bytes_and_files_as_they_lie_there(log: Log, root: Path) -> None:
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
    log.alter_topic("t", {**settings, "table.delete.delay.ms": 0, "file.delete.delay.ms": 0})
    for turn in range(2):
        with log.producer() as producer:
            for number in range(100):
                producer.send("t", bytes(str(turn * number), "ascii") * 50, b"k", partition=0)
        log.maintain(seal=True)
    counted = log.metrics()["maintenance-metrics"]
    assert counted["sealed-records-total"] == 200
    assert counted["sealed-files-total"] == 2
    assert counted["compacted-records-total"] == 199
    assert counted["compacted-bytes-total"] > 0
    log.maintain()
    counted = log.metrics()["maintenance-metrics"]
    made = counted["sealed-bytes-total"] + counted["merged-bytes-total"]
    assert counted["removed-files-total"] > 0
    assert counted["removed-bytes-total"] > made - counted["compacted-bytes-total"]
    assert 0 < sealed_bytes(root) < made
    assert counted["round-error-total"] == 0


def test_a_round_that_another_is_at_is_counted_as_held(log: Log, storage: LocalStorage) -> None:
    with hold(storage, "t") as is_ours:
        assert is_ours
        log.maintain("t")
    log.maintain("t")
    counted = log.metrics()["maintenance-metrics"]
    assert (counted["held-round-total"], counted["round-total"]) == (1, 1)


def test_work_that_others_made_void_is_counted(log: Log) -> None:
    with log.producer() as producer:
        for _ in range(10):
            producer.send("t", b"x", partition=0)

    def write(reader: Any, units: Any, progress: Any) -> Any:
        for unit, written in write_here(reader, units, progress):
            log.delete_records({TopicPartition("t", 0): 5})
            yield unit, written

    (done,) = log.maintain("t", seal=True, write=write)
    assert (done.dropped_units, done.sealed_records) == (1, 0)
    counted = log.metrics()["maintenance-metrics"]
    assert counted["dropped-unit-total"] == 1
    assert counted["conflict-total"] >= 1


def test_a_round_that_fails_is_counted(log: Log, root: Path) -> None:
    with log.producer() as producer:
        producer.send("t", b"x" * 500, partition=0)
    (path,) = (root / "topics/t/1/journal").iterdir()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(broker.CorruptLog):
        log.maintain("t", seal=True)
    assert log.metrics()["maintenance-metrics"]["round-error-total"] == 1


def test_the_command_that_maintains_for_ever_serves_its_metrics(log: Log, root: Path) -> None:
    with log.producer() as producer:
        producer.send("t", b"x", partition=0)
    port = free_port()
    command = [sys.executable, "-m", "broker.cli", "maintain", "--seal", "--forever"]
    options = ["--interval", "0.1", "--metrics-port", str(port)]
    process = subprocess.Popen(
        [*command, *options], env={**os.environ, "SPARK_LOG_ROOT": str(root)}
    )
    try:
        text = scrape_until(port, 'maintenance_metrics_sealed_records_total{client_id="maintain"}')
        assert "spark_log_maintenance_metrics_round_latency_avg" in text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def scrape_until(port: int, wanted: str) -> str:
    """Wait until somebody serves a metric that is not zero."""
    deadline = time.monotonic() + 60
    while True:
        try:
            text = scrape(port)
        except OSError:
            text = ""
        found = [line for line in text.splitlines() if wanted in line]
        if found and float(found[0].rpartition(" ")[2]) > 0:
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.1)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def test_metrics_are_exported_for_prometheus_when_asked(log: Log) -> None:
    with log.producer(metrics_port=0, client_id="me") as producer:
        producer.send("t", b"x").result(30)
        port = producer.metrics_port
        text = scrape(port)
        assert 'spark_log_producer_metrics_record_send_total{client_id="me"} 1.0' in text
        assert "# TYPE spark_log_producer_metrics_record_send_rate gauge" in text
        with log.consumer("t", metrics_port=port, client_id="me") as consumer:
            consumer.poll(10)
            text = scrape(port)
            assert 'spark_log_consumer_fetch_manager_metrics_fetch_total{client_id="me-2"}' in text
        assert "consumer" not in scrape(port)
    with pytest.raises(OSError):
        scrape(port)


def test_a_port_that_is_taken_is_refused_in_one_line(log: Log, root: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(broker.InvalidOption, match=f"metrics port {port}: cannot listen there"):
            log.producer(metrics_port=port)


def test_without_a_port_nothing_listens(log: Log) -> None:
    with log.producer() as producer, log.consumer("t") as consumer:
        assert producer.metrics_port is None
        assert consumer.metrics_port is None
