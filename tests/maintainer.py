"""Maintains topics until it is killed: python maintainer.py ROOT TOPIC...

Prints a line after its first round, from when on a kill meets it at work.
"""

from __future__ import annotations

import sys
import time

import broker


def main() -> None:
    root, *topics = sys.argv[1:]
    log = broker.open(root)
    is_first = True
    while True:
        done = [log.maintain(topic, seal=True)[0] for topic in topics]
        if all(one.is_held for one in done):
            time.sleep(0.005)
        if is_first:
            print("ready", flush=True)
            is_first = False


if __name__ == "__main__":
    main()
