"""What clients count, as totals and rates, in Python and in Prometheus' form."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

import broker
from broker import Log, TopicPartition
from broker.metrics import Metrics


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
    import socket

    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(broker.InvalidOption, match=f"metrics_port={port}: cannot listen"):
            log.producer(metrics_port=port)


def test_without_a_port_nothing_listens(log: Log) -> None:
    with log.producer() as producer, log.consumer("t") as consumer:
        assert producer.metrics_port is None
        assert consumer.metrics_port is None
