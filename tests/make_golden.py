"""Make the golden files of the current format, once: `.venv/bin/python tests/make_golden.py`.

They are never made again for a format that has been released: a later version must read these.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
from test_protocol import read_all

import broker
from broker import TopicPartition, sending

TARGET = Path(__file__).parent / "golden" / f"format-{broker.log.FORMAT_VERSION}"


def main() -> None:
    if TARGET.exists():
        raise SystemExit(f"{TARGET} exists; golden files are not made twice")
    root = TARGET / "log"
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


if __name__ == "__main__":
    main()
