"""Maintains a topic until it is killed: python maintainer.py ROOT TOPIC."""

from __future__ import annotations

import sys

import broker


def main() -> None:
    root, topic = sys.argv[1:]
    log = broker.open(root)
    while True:
        log.maintain(topic, seal=True)


if __name__ == "__main__":
    main()
