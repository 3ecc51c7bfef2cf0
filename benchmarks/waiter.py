"""A consumer that waits, in a process of its own: what waiting costs, and how late it hears."""

from __future__ import annotations

import sys
import time

import broker

IDLE_SECONDS = 2.0


def main() -> None:
    late = []
    with broker.open(sys.argv[1]).consumer("t", auto_offset_reset="earliest") as consumer:
        consumer.poll(10)
        print("ready", flush=True)
        begun, used = time.monotonic(), time.process_time()
        consumer.poll(IDLE_SECONDS * 1000)
        idle = (time.process_time() - used) / (time.monotonic() - begun) * 100
        for record in consumer:
            now = time.monotonic_ns()
            if record.value == b"end":
                break
            late.append((now - int(record.value)) / 1e6)
    print(idle, *late)


if __name__ == "__main__":
    main()
