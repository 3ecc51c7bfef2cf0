"""`spark-log group`: list, describe, reset, alter and delete consumer groups."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

from broker.cli.output import format_count, plural, print_facts, print_json, print_table, say
from broker.cli.root import log_option, pass_log
from broker.cli.topics import config_option, json_option, yes_option
from broker.errors import InvalidOption, LogError, UnknownGroup
from broker.group import GroupDescription, MemberDescription, PartitionLag, Reset
from broker.log import Log
from broker.records import TopicPartition

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@click.group()
@log_option
def group() -> None:
    """List, describe, reset, alter and delete consumer groups."""


@group.command("list")
@pass_log
@json_option
def list_groups(log: Log, as_json: bool) -> int:
    """List the groups."""
    described, failures = _describe_all(log)
    if as_json:
        print_json([_summary(one) for one in described])
    elif described or failures or sys.stdout.isatty():
        rows = [
            [one.name, one.state, len(one.members), len(one.partitions), format_count(one.lag)]
            for one in described
        ]
        rows += [[name, "damaged", "?", "?", "?"] for name in failures]
        print_table(["group", "state", ">members", ">partitions", ">lag"], rows)
    for error in failures.values():
        say(error)
    return 1 if failures else 0


@group.command()
@pass_log
@click.argument("name")
@json_option
def describe(log: Log, name: str, as_json: bool) -> None:
    """Show a group's members, positions and lag."""
    found = log.describe_group(name)
    if as_json:
        print_json(_everything(found))
        return
    print_facts(
        [
            ("group", found.name),
            ("state", found.state),
            ("generation", found.generation),
            ("strategy", found.strategy or "-"),
            ("lag", f"{plural(found.lag, 'record')}, {_seconds(found.lag_seconds)} s"),
            *sorted(found.config.items()),
        ]
    )
    if found.members:
        print()
        print_table(
            ["member", "client", "instance", "host", ">partitions", ">silent seconds"],
            [_member_row(one) for one in found.members],
        )
    if found.partitions:
        print()
        print_table(
            ["topic", ">partition", ">position", ">end", ">lag", ">seconds", "member", "metadata"],
            [_row(one) for one in found.partitions],
        )
    silent = sum(member.is_silent for member in found.members)
    if silent:
        say(
            f"{silent} of {plural(len(found.members), 'member')} silent for longer than the "
            "session timeout: dead, if that lasts, and then evicted by the others or by a reset"
        )
    for one in found.partitions:
        if one.is_lost:
            place = f"{one.partition.topic}-{one.partition.partition}"
            say(
                f"{place}: a power cut took records before position {one.position} that the group "
                "had read; reset the group there before it reads on"
            )


@group.command()
@pass_log
@click.argument("name")
@click.option(
    "--topic", "-t", "topics", multiple=True, metavar="TOPIC[:PARTITION,...]",
    help="Reset this topic, or some of its partitions. May be given several times.",
)  # fmt: skip
@click.option("--all-topics", is_flag=True, help="Reset all partitions that have a position.")
@click.option("--to-earliest", is_flag=True, help="To the first record.")
@click.option("--to-latest", is_flag=True, help="Behind the last record.")
@click.option("--to-offset", type=click.IntRange(min=0), metavar="N", help="To this offset.")
@click.option(
    "--to-datetime",
    metavar="TIME",
    help="To the first record at or after 2026-01-31T12:00:00 (UTC).",
)
@click.option(
    "--by-duration", metavar="DURATION", help="To the first record of the last 90s, 5m, 2h or 1d."
)
@click.option("--shift-by", type=int, metavar="N", help="So many records on, or back if negative.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@json_option
def reset(
    log: Log,
    name: str,
    topics: tuple[str, ...],
    all_topics: bool,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_datetime: str | None,
    by_duration: str | None,
    shift_by: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Put a group's positions somewhere else. Refused while it has active members."""
    rule = _rule(
        earliest=Reset("earliest") if to_earliest else None,
        latest=Reset("latest") if to_latest else None,
        offset=None if to_offset is None else Reset("offset", to_offset),
        time=None if to_datetime is None else Reset("time", _parse_time(to_datetime)),
        duration=None if by_duration is None else Reset("time", _ago(by_duration)),
        shift=None if shift_by is None else Reset("shift", shift_by),
    )
    if bool(topics) == all_topics:
        raise click.UsageError("give --topic TOPIC, or --all-topics.")
    before = log.group_positions(name)
    places = sorted(before) if all_topics else _places(log, topics)
    planned = log.plan_reset(name, places, rule)
    if not planned:
        raise InvalidOption(f"group {name!r} has no positions; name topics with --topic")
    if not dry_run:
        log.reset_group(name, planned)
    changes = [(place, before.get(place), offset) for place, offset in planned.items()]
    if as_json:
        print_json(
            [
                {"topic": p.topic, "partition": p.partition, "position": old, "new_position": new}
                for p, old, new in changes
            ]
        )
        return
    print_table(
        ["topic", ">partition", ">position", ">new position"],
        [[p.topic, p.partition, "-" if old is None else old, new] for p, old, new in changes],
    )
    if dry_run:
        say("nothing was changed; leave out --dry-run to do it")


@group.command()
@pass_log
@click.argument("name")
@config_option("group", "offsets.retention.minutes=1440")
def alter(log: Log, name: str, settings: tuple[tuple[str, str | None], ...]) -> None:
    """Change settings; `--config NAME=` goes back to the default."""
    if not settings:
        raise click.UsageError("nothing to change: give --config NAME=VALUE.")
    log.alter_group(name, dict(settings))


@group.command()
@pass_log
@click.argument("name")
@yes_option
def delete(log: Log, name: str, yes: bool) -> None:
    """Remove a group and its positions. Refused while it has active members."""
    found = log.describe_group(name)
    question = f"Delete group {name} with {plural(len(found.partitions), 'position')}?"
    if not yes and sys.stdin.isatty() and not click.confirm(question, err=True):
        raise InvalidOption("nothing was removed")
    log.delete_group(name)


def _describe_all(log: Log) -> tuple[list[GroupDescription], dict[str, LogError]]:
    described, failures = [], {}
    for name in log.groups():
        try:
            described.append(log.describe_group(name))
        except UnknownGroup:
            continue  # Deleted between the listing and here.
        except LogError as error:
            failures[name] = error
    return described, failures


def _rule(**given: Reset | None) -> Reset:
    rules = [rule for rule in given.values() if rule is not None]
    if len(rules) != 1:
        raise click.UsageError(
            "give one of --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration, "
            "--shift-by."
        )
    return rules[0]


def _places(log: Log, topics: tuple[str, ...]) -> list[TopicPartition]:
    places = []
    for text in topics:
        topic, _, numbers = text.partition(":")
        if numbers:
            if not re.fullmatch(r"\d+(,\d+)*", numbers):
                raise click.BadParameter(f"{text!r} is not of the form TOPIC:0,1.")
            chosen = [int(number) for number in numbers.split(",")]
        else:
            chosen = [one.partition for one in log.describe_topic(topic).partitions]
        places += [TopicPartition(topic, number) for number in chosen]
    return places


def _parse_time(text: str) -> int:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time as 2026-01-31T12:00:00.") from None
    return round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)


def _ago(text: str) -> int:
    """Return the time of so long ago, in milliseconds."""
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration as 90s, 5m, 2h or 1d.")
    return time.time_ns() // 1_000_000 - int(found[1]) * _UNITS_MS[found[2]]


def _member_row(one: MemberDescription) -> list[object]:
    return [
        one.member_id,
        one.client_id or "-",
        one.instance_id or "-",
        one.host,
        len(one.partitions),
        "-" if one.silent_seconds is None else _seconds(one.silent_seconds),
    ]


def _row(one: PartitionLag) -> list[object]:
    return [
        one.partition.topic,
        one.partition.partition,
        "-" if one.position is None else one.position,
        one.end_offset,
        "-" if one.lag is None else one.lag,
        "-" if one.lag_seconds is None else _seconds(one.lag_seconds),
        one.member_id or "-",
        one.metadata,
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _summary(found: GroupDescription) -> dict[str, Any]:
    return {
        "group": found.name,
        "state": found.state,
        "generation": found.generation,
        "members": len(found.members),
        "partitions": len(found.partitions),
        "lag": found.lag,
        "lag_seconds": round(found.lag_seconds, 3),
    }


def _everything(found: GroupDescription) -> dict[str, Any]:
    return {
        **_summary(found),
        "strategy": found.strategy,
        "config": found.config,
        "members": [
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.host,
                "instance": member.instance_id,
                "partitions": [
                    {"topic": place.topic, "partition": place.partition}
                    for place in member.partitions
                ],
                "silent_seconds": member.silent_seconds,
                "is_silent": member.is_silent,
            }
            for member in found.members
        ],
        "partitions": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "position": one.position,
                "start": one.start_offset,
                "end": one.end_offset,
                "lag": one.lag,
                "lag_seconds": None if one.lag_seconds is None else round(one.lag_seconds, 3),
                "member": one.member_id,
                "metadata": one.metadata,
                "is_lost": one.is_lost,
            }
            for one in found.partitions
        ],
    }
