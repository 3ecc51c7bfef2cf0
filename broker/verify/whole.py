"""Verifying all topics and groups of a log, or one of them; also those that lost their journal."""

from __future__ import annotations

from collections.abc import Iterable

from broker.group import names
from broker.group.group import group_home
from broker.home import newest_incarnation
from broker.storage import Storage
from broker.verify.findings import GroupReport, TopicReport
from broker.verify.group import verify_group
from broker.verify.topic import verify_topic


def verify_topics(storage: Storage, name: str | None) -> list[TopicReport]:
    """Verify a topic, or all; a topic that is not there has no report."""
    reports = []
    for topic in storage.list("topics") if name is None else [name]:
        incarnation = _find(storage, f"topics/{topic}", ("checkpoint", "data", "index", "sealed"))
        report = None if incarnation is None else verify_topic(storage, topic, incarnation)
        if report is not None:
            reports.append(report)
    return reports


def verify_groups(storage: Storage, name: str | None) -> tuple[list[GroupReport], list[str]]:
    """Verify a group, or all; return the reports, and notes on what is no group's."""
    reports, notes = [], []
    for encoded in storage.list("groups") if name is None else [names.encode(name)]:
        group = names.decode(encoded)
        if names.encode(group) != encoded:
            notes.append(f"groups/{encoded} is not what a group's folder is named")
            continue
        incarnation = _find(storage, group_home(group, 1).parent, ("checkpoint", "leases"))
        report = None if incarnation is None else verify_group(storage, group, incarnation)
        if report is not None:
            reports.append(report)
    return reports, notes


def _find(storage: Storage, parent: str, folders: Iterable[str]) -> int | None:
    """Return the newest incarnation, if it has a journal or what is only there beside one."""
    incarnation, is_there = newest_incarnation(storage, parent)
    has_rest = any(storage.list(f"{parent}/{incarnation}/{each}") for each in folders)
    return incarnation if is_there or has_rest else None
