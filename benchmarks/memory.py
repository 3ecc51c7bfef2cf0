"""One role over 10 GB, in a process of its own; prints the megabytes it held beyond its start."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

import broker

VALUE = b"x" * 1000
TOTAL = 10_000_000_000
ROWS = 10_000


def main() -> None:
    role, root = sys.argv[1:]
    log = broker.open(root)
    # The kernel's own account of the most memory ever held is handed down by the process that
    # started this one: begin it anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = held_kib("VmRSS")
    # The topic holds both producers' bytes in the end: half is sent in each way.
    {"send": send, "send_batch": send_batch, "iterate": iterate, "poll_batches": poll_batches}[
        role
    ](log)
    print((held_kib("VmHWM") - before) / 1024)


def held_kib(what: str) -> int:
    """Return a figure of this process's memory, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == what:
            return int(value.split()[0])
    raise KeyError(what)


def send(log: broker.Log) -> None:
    with log.producer() as producer:
        for _ in range(TOTAL // len(VALUE) // 2):
            producer.send("t", VALUE)


def send_batch(log: broker.Log) -> None:
    table = pa.record_batch({"value": pa.array([VALUE] * ROWS, pa.binary())})
    with log.producer() as producer:
        for _ in range(TOTAL // len(VALUE) // ROWS // 2):
            producer.send_batch("t", table)


def iterate(log: broker.Log) -> None:
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        for _ in consumer:
            pass


def poll_batches(log: broker.Log) -> None:
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        while consumer.poll_batches(0):
            pass


if __name__ == "__main__":
    main()
