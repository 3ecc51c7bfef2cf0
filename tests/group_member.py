"""A member of a group as a process of its own: reads, commits, and keeps a journal of both.

Usage: group_member.py ROOT OUT [name=value ...]. Each line of OUT is a JSON list:
    ["read", time, time of the last look at the group, member, generation of ownership,
     partition, first offset, end offset]
    ["commit", time, partition, offset]
    ["error", time, class name]
Times are seconds of the machine's boot clock, which all processes share. SIGTERM leaves in order.
`begin_at=PATH` waits for a file of this name before it joins.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import broker
from broker.boot import boot_seconds
from broker.log import Log
from broker.storage import LocalStorage

is_stopped = False


def stop(*_: Any) -> None:
    global is_stopped
    is_stopped = True


def main() -> None:
    root, out, *given = sys.argv[1:]
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in given)
    clock_seconds = float(options.pop("clock_seconds", 0))
    begin_at = options.pop("begin_at", None)
    poll_seconds = float(options.pop("poll_seconds", 0))
    storage = LocalStorage(root, clock=lambda: time.time_ns() + int(clock_seconds * 1e9))
    journal = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    signal.signal(signal.SIGTERM, stop)

    def note(*line: Any) -> None:
        os.write(journal, json.dumps(line).encode() + b"\n")

    note("ready", boot_seconds(), os.getpid())
    while begin_at is not None and not os.path.exists(begin_at):
        time.sleep(0.005)
    options = {"group_id": "g", "auto_offset_reset": "earliest", **options}
    with Log(storage).consumer("t", enable_auto_commit=False, **options) as consumer:
        note("begun", boot_seconds(), os.getpid())
        while not is_stopped:
            try:
                step(consumer, note)
                time.sleep(poll_seconds)
            except broker.LogError as error:
                note("error", boot_seconds(), type(error).__name__)
                if not isinstance(error, broker.CommitFailed | broker.LockTimeout):
                    return


def step(consumer: Any, note: Any) -> None:
    polled = consumer.poll(50)
    now = boot_seconds()
    for place, records in polled.items():
        owner = consumer._view.owned[place]
        first, last = records[0].offset, records[-1].offset
        assert [record.offset for record in records] == list(range(first, last + 1))
        note("read", now, consumer._membership._read, owner.member_id, owner.generation,
             place.partition, first, last + 1)  # fmt: skip
    if polled and random.random() < 0.5:
        reached = {place: consumer.position(place) for place in polled}
        consumer.commit()
        for place, offset in reached.items():
            note("commit", boot_seconds(), place.partition, offset)


if __name__ == "__main__":
    main()
