"""`spark-log topic`: make, list, describe, alter, empty and delete topics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from broker.cli.output import (
    format_bytes,
    format_count,
    plural,
    print_facts,
    print_json,
    print_table,
    say,
)
from broker.cli.root import Function, log_option, open_chosen, pass_log
from broker.errors import InvalidOption, LogError, TopicExists, UnknownTopic
from broker.log import Log, TopicDescription
from broker.records import TopicPartition

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def _parse_setting(text: str) -> tuple[str, str | None]:
    """Parse `name=value`; an empty value goes back to the default."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE.")
    return name, value or None


def config_option(noun: str, example: str) -> Callable[[Function], Function]:
    """Return the option `--config` for the settings of a topic or a group."""
    return click.option(
        "--config", "-c", "settings", type=_parse_setting, multiple=True, metavar="NAME=VALUE",
        help=f"A {noun} setting, as {example}. May be given several times.",
    )  # fmt: skip


_topic_config_option = config_option("topic", "retention.ms=60000")


@click.group()
@log_option
def topic() -> None:
    """Make, list, describe, alter, empty and delete topics."""


@topic.command()
@log_option
@click.argument("name")
@click.option("--partitions", "-p", type=int, default=1, show_default=True)
@_topic_config_option
@click.option("--if-not-exists", is_flag=True, help="Succeed if the topic is there already.")
def create(
    name: str, partitions: int, settings: tuple[tuple[str, str | None], ...], if_not_exists: bool
) -> None:
    """Make a topic, and the log if there is none yet."""
    log = open_chosen(create=True)
    try:
        log.create_topic(name, partitions, config=dict(settings))
    except TopicExists:
        if not if_not_exists:
            raise


@topic.command("list")
@pass_log
@json_option
def list_topics(log: Log, as_json: bool) -> int:
    """List the topics."""
    described, failures = _describe_all(log)
    if as_json:
        print_json([_summary(one) for one in described])
    else:
        rows = [_row(one) for one in described]
        rows += [[name, "?", "?", "damaged"] for name in failures]
        if rows or sys.stdout.isatty():
            print_table(["topic", ">partitions", ">records", ">size"], sorted(rows))
    for error in failures.values():
        say(error)
    return 1 if failures else 0


@topic.command()
@pass_log
@click.argument("name")
@json_option
def describe(log: Log, name: str, as_json: bool) -> None:
    """Show a topic's partitions, offsets and settings."""
    found = log.describe_topic(name)
    if as_json:
        print_json(
            {
                **_summary(found),
                "epoch": found.epoch,
                "commits": found.commit_count,
                "offsets": [
                    {
                        "partition": one.partition,
                        "start": one.start_offset,
                        "end": one.end_offset,
                        "records": one.record_count,
                    }
                    for one in found.partitions
                ],
                "config": found.config,
                "given_config": found.given_config,
            }
        )
        return
    print_facts(
        [
            ("topic", found.name),
            ("incarnation", found.incarnation),
            ("epoch", found.epoch),
            ("commits", format_count(found.commit_count)),
            ("records", format_count(found.record_count)),
            ("size", format_bytes(found.byte_count)),
        ]
    )
    print()
    print_table(
        [">partition", ">start", ">end", ">records"],
        [[p.partition, p.start_offset, p.end_offset, p.record_count] for p in found.partitions],
    )
    print()
    print_table(
        ["setting", "value", ""],
        [
            [name, value, "" if name in found.given_config else "default"]
            for name, value in sorted(found.config.items())
        ],
    )


@topic.command()
@pass_log
@click.argument("name")
@_topic_config_option
@click.option("--partitions", "-p", type=int, help="Let the topic have this many partitions.")
def alter(
    log: Log, name: str, settings: tuple[tuple[str, str | None], ...], partitions: int | None
) -> None:
    """Change settings or add partitions; `--config NAME=` goes back to the default."""
    if not settings and partitions is None:
        raise click.UsageError("nothing to change: give --config NAME=VALUE or --partitions N.")
    if settings:
        log.alter_topic(name, config=dict(settings))
    if partitions is not None:
        log.create_partitions(name, partitions)


@topic.command()
@pass_log
@click.argument("name")
@yes_option
def delete(log: Log, name: str, yes: bool) -> None:
    """Remove a topic and its records."""
    found = log.describe_topic(name)
    _confirm(f"Delete topic {name} with {plural(found.record_count, 'record')}?", yes)
    log.delete_topic(name)


@topic.command()
@pass_log
@click.argument("name")
@click.option(
    "--before",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help="Remove the records before this offset.",
)
@click.option("--all", "is_all", is_flag=True, help="Remove all records.")
@click.option(
    "--partition",
    "-p",
    "partitions",
    type=int,
    multiple=True,
    help="Only of this partition. May be given several times.",
)
@yes_option
def truncate(
    log: Log, name: str, before: int | None, is_all: bool, partitions: tuple[int, ...], yes: bool
) -> None:  # fmt: skip
    """Remove the oldest records of a topic, or all."""
    if is_all == (before is not None):
        raise click.UsageError("give either --before OFFSET or --all.")
    found = log.describe_topic(name)
    chosen = partitions or [one.partition for one in found.partitions]
    what = "all records" if before is None else f"the records before offset {before}"
    _confirm(f"Remove {what} of {plural(len(chosen), 'partition')} of topic {name}?", yes)
    offset = -1 if before is None else before
    log.delete_records({TopicPartition(name, partition): offset for partition in chosen})


def _confirm(question: str, yes: bool) -> None:
    """Ask before records go; scripts, which have nobody to ask, are taken at their word."""
    if yes or not sys.stdin.isatty():
        return
    if not click.confirm(question, err=True):
        raise InvalidOption("nothing was removed")


def _describe_all(log: Log) -> tuple[list[TopicDescription], dict[str, LogError]]:
    described, failures = [], {}
    for name in log.topics():
        try:
            described.append(log.describe_topic(name))
        except UnknownTopic:
            continue  # Deleted between the listing and here.
        except LogError as error:
            failures[name] = error
    return described, failures


def _row(found: TopicDescription) -> list[str]:
    return [
        found.name,
        format_count(len(found.partitions)),
        format_count(found.record_count),
        format_bytes(found.byte_count),
    ]


def _summary(found: TopicDescription) -> dict[str, Any]:
    return {
        "topic": found.name,
        "incarnation": found.incarnation,
        "partitions": len(found.partitions),
        "records": found.record_count,
        "bytes": found.byte_count,
    }
