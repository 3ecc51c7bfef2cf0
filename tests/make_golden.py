"""Make the golden files of the current format, once: `.venv/bin/python tests/make_golden.py`.

They are never made again for a format that has been released: a later version must read these.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
from test_protocol import asdict_of_group, read_all

import broker
from broker import TopicPartition, sending
from broker.group import Position, group
from broker.group.assignment import STRATEGIES
from broker.group.group import Group
from broker.group.rebalance import make_assignment
from broker.group.state import KnownTopic, Member
from broker.storage import LocalStorage

TARGET = Path(__file__).parent / "golden" / f"format-{broker.log.FORMAT_VERSION}"


def main() -> None:
    made = [make for path, make in PARTS.items() if not (TARGET / path).exists()]
    for make in made:
        make(TARGET / "log")
    if not made:
        raise SystemExit(f"{TARGET} is complete; golden files are not made twice")


def make_topics(root: Path) -> None:
    log = broker.open(root)
    log.create_topic(
        "orders", partitions=3, config={"segment.bytes": 6000, "checkpoint.commits": 7}
    )
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        with log.producer(compression_type=codec) as producer:
            for number in range(4):
                producer.send(
                    "orders",
                    value=f"{codec} {number}".encode() * 9 if number else None,
                    key=None if number == 1 else f"key-{number}".encode(),
                    headers=[("codec", codec.encode()), ("none", None)] if number == 2 else None,
                    timestamp_ms=1_700_000_000_000 + 1000 * number,
                ).result(30)
            values = [f"{codec} row {row}" for row in range(20)]
            stamps = [1_700_000_100_000 + row for row in range(20)]
            producer.send_batch(
                "orders", pa.table({"value": values, "key": values, "timestamp": stamps})
            ).result(30)
    sending._INLINE_BYTES_MAX = 0  # So that a small transaction goes to a file.
    with log.producer(transactional_id="golden", batch_size=200) as producer:
        with producer.transaction():
            for number in range(12):
                producer.send(
                    "orders", f"transaction {number}".encode(), timestamp_ms=1_700_000_200_000
                )
    log.delete_records({TopicPartition("orders", 0): 2})
    log.create_partitions("orders", 4)
    log.create_topic("logged", config={"message.timestamp.type": "LogAppendTime"})
    log.delete_topic("logged")
    log.create_topic("logged", config={"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        producer.send("logged", b"at the log's time", timestamp_ms=1).result(30)
    shutil.rmtree(root / "locks")
    expected = {}
    for topic in log.topics():
        described = log.describe_topic(topic)
        expected[topic] = {
            "incarnation": described.incarnation,
            "config": described.given_config,
            "offsets": [[p.start_offset, p.end_offset] for p in described.partitions],
            "records": read_all(root, topic),
        }
    (TARGET / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def make_groups(root: Path) -> None:
    """A group with a past: every kind of commit, files that are gone, and checkpoints."""
    group._FILE_BYTES_MAX, group._CHECKPOINT_COMMITS = 3000, 7
    storage = LocalStorage(str(root))
    group.create(storage, "a/b", 1)
    opened = Group(storage, "a/b", 1, write=True)
    places = [TopicPartition("orders", number) for number in range(3)]
    topics = {"orders": KnownTopic(1, 3)}
    opened.publish({place: Position(1, 1, 0, 0) for place in places})
    opened.forget(places[2:])
    opened.configure({"offsets.retention.minutes": 60})
    for name, instance in (("one", None), ("two", "static"), ("three", "static"), ("four", None)):
        opened.join(Member(name, "c", "h", instance, ("orders",), None, ("sticky",), 1000))
        opened.assign(lambda state: (topics, make_assignment(state, topics, STRATEGIES)))
        for member_id in list(opened.state.members):
            opened.release(member_id, opened.state.to_release(member_id))
    for number in range(60):
        place, owner = list(opened.state.owners.items())[number % 3]
        position = Position(number % 5, 1, 0, 0, "note" if number % 2 else "")
        opened.commit_positions({place: position}, member_id=owner.member_id, generation=4)
    opened.evict(["one"], by="three", is_dead=lambda _: True)
    opened.leave("four")
    opened.close()
    shutil.rmtree(root / "locks")
    expected = json.dumps(asdict_of_group(opened.state), indent=1)
    (TARGET / "expected-group.json").write_text(expected + "\n")


PARTS = {"expected.json": make_topics, "expected-group.json": make_groups}

if __name__ == "__main__":
    main()
