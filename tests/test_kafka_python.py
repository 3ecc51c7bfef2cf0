"""A script written for kafka-python's KafkaConsumer runs on ours with the constructor changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import broker
from broker import ConsumerRebalanceListener, OffsetAndMetadata, TopicPartition


def script(make_consumer: Callable[..., Any]) -> dict[str, Any]:
    """Written against kafka-python's documentation; only `make_consumer` is ours."""
    heard: list[str] = []

    class Listener(ConsumerRebalanceListener):
        def on_partitions_revoked(self, revoked: Any) -> None:
            heard.append(f"revoked {len(revoked)}")

        def on_partitions_assigned(self, assigned: Any) -> None:
            heard.append(f"assigned {len(assigned)}")

    consumer = make_consumer(
        group_id="scripted",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        value_deserializer=lambda data: data.decode(),
        max_poll_records=50,
        session_timeout_ms=10000,
        heartbeat_interval_ms=3000,
        max_poll_interval_ms=300000,
        consumer_timeout_ms=2000,
    )
    consumer.subscribe(["orders"], listener=Listener())
    values = []
    while len(values) < 100:
        for partition, messages in consumer.poll(timeout_ms=1000).items():
            assert isinstance(partition.topic, str)
            values += [message.value for message in messages]
        consumer.commit()
    first = TopicPartition("orders", 0)
    assert consumer.committed(first) == consumer.position(first)
    consumer.seek(first, 40)
    again = next(consumer)
    consumer.commit({first: OffsetAndMetadata(41, "by hand")})
    consumer.pause(first)
    paused = consumer.paused()
    consumer.resume(first)
    ends = consumer.end_offsets([first])
    begins = consumer.beginning_offsets([first])
    rest = [message.offset for message in consumer]
    consumer.commit_async().result()
    consumer.close()
    return {
        "values": values,
        "again": again.offset,
        "paused": paused,
        "range": (begins[first], ends[first]),
        "rest": rest,
        "heard": heard,
    }


def test_the_script_runs_with_the_constructor_changed(root: Path) -> None:
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    with log.producer() as producer:
        for number in range(100):
            producer.send("orders", str(number).encode(), partition=number % 2)
    told = script(log.consumer)
    assert sorted(map(int, told["values"])) == list(range(100))
    assert told["again"] == 40
    assert told["paused"] == {TopicPartition("orders", 0)}
    assert told["range"] == (0, 50)
    assert told["rest"] == list(range(41, 50))
    assert told["heard"] == ["assigned 2", "revoked 2"]
    assert log.group_positions("scripted") == {
        TopicPartition("orders", 0): 50,
        TopicPartition("orders", 1): 50,
    }
