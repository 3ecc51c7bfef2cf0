"""`spark-log verify` and `spark-log info`: the log as a whole."""

from __future__ import annotations

import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import click
import pyarrow as pa
from rich.console import Console

from broker.cli.output import (
    format_bytes,
    format_count,
    plural,
    print_facts,
    print_json,
    print_table,
    say,
)
from broker.cli.root import pass_log
from broker.cli.topics import json_option
from broker.errors import LogError
from broker.log import FORMAT_VERSION, Log
from broker.verify import GroupReport, TopicReport, VerifyReport

_LABELS = {"cluster_id": "cluster id", "bytes": "size"}


@click.command()
@pass_log
@click.argument("name", metavar="[TOPIC]", required=False)
@click.option("--group", "-g", metavar="GROUP", help="Only this consumer group, not all.")
@json_option
def verify(log: Log, name: str | None, group: str | None, as_json: bool) -> int:
    """Read every byte of a topic, or of all topics and groups, and list all damage.

    Nothing is changed, and others may write meanwhile. Exits with 1 if there is damage.
    """
    with _spinner(f"reading {name or group or 'all topics and groups'}"):
        report = log.verify(name, group=group)
    if as_json:
        print_json(_as_json(report))
    else:
        _print_report(report)
    sys.stdout.flush()
    if not report.is_sound:
        say(f"{plural(len(report.damage), 'damaged place')} in {log.root}")
    return 0 if report.is_sound else 1


@click.command()
@pass_log
@json_option
def info(log: Log, as_json: bool) -> None:
    """Show where the log is, what it holds, and the versions in use."""
    names = log.topics()
    facts: dict[str, Any] = {
        "root": log.root,
        "cluster_id": log.cluster_id,
        "format": FORMAT_VERSION,
        "topics": len(names),
        **_totals(log, names),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
    }
    if as_json:
        print_json(facts)
        return
    shown = {**facts, "bytes": format_bytes(facts["bytes"])}
    for name in ("topics", "partitions", "records"):
        shown[name] = format_count(facts[name])
    print_facts([(_LABELS.get(name, name), value) for name, value in shown.items()])


def _totals(log: Log, names: list[str]) -> dict[str, int]:
    totals = {"partitions": 0, "records": 0, "bytes": 0}
    for name in names:
        try:
            found = log.describe_topic(name)
        except LogError as error:
            say(error)
            continue
        totals["partitions"] += len(found.partitions)
        totals["records"] += found.record_count
        totals["bytes"] += found.byte_count
    return totals


def _spinner(text: str) -> AbstractContextManager[Any]:
    if not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True).status(text)


def _print_report(report: VerifyReport) -> None:
    rows = [
        [
            one.topic,
            format_count(one.commit_count),
            format_count(one.frame_count),
            format_count(one.record_count),
            format_count(one.sealed_record_count),
            format_bytes(one.byte_count),
            _result(one),
        ]
        for one in report.topics
    ]
    if rows:
        print_table(
            ["topic", ">commits", ">frames", ">records", ">sealed", ">size", "result"], rows
        )
    if report.groups:
        if rows:
            print()
        print_table(
            ["group", ">commits", ">members", ">positions", ">size", "result"],
            [
                [
                    one.group,
                    format_count(one.commit_count),
                    format_count(one.member_count),
                    format_count(one.position_count),
                    format_bytes(one.byte_count),
                    _result(one),
                ]
                for one in report.groups
            ],
        )
    for damage in report.damage:
        print(f"damage: {damage}")
    for note in report.notes:
        print(f"note: {note}")


def _result(report: TopicReport | GroupReport) -> str:
    return "sound" if report.is_sound else plural(len(report.damage), "damaged place")


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "root": report.root,
        "is_sound": report.is_sound,
        "topics": [
            {
                "topic": one.topic,
                "incarnation": one.incarnation,
                "is_sound": one.is_sound,
                "commits": one.commit_count,
                "frames": one.frame_count,
                "records": one.record_count,
                "sealed_files": one.sealed_file_count,
                "sealed_records": one.sealed_record_count,
                "bytes": one.byte_count,
            }
            for one in report.topics
        ],
        "groups": [
            {
                "group": one.group,
                "incarnation": one.incarnation,
                "is_sound": one.is_sound,
                "commits": one.commit_count,
                "members": one.member_count,
                "positions": one.position_count,
                "bytes": one.byte_count,
            }
            for one in report.groups
        ],
        "damage": [asdict(damage) for damage in report.damage],
        "notes": list(report.notes),
    }
