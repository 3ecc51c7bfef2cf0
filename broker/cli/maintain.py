"""`spark-log maintain`: what producers do in the background, as a command."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from broker.cli.output import format_count, print_json, print_table, say
from broker.cli.root import metrics_port_option, pass_log
from broker.cli.topics import json_option
from broker.errors import LogError, LogNotFound, MaintenanceFailed, UnknownTopic
from broker.log import Log
from broker.maintenance.keeping import TopicMaintenance
from broker.metrics import export_if_asked


@click.command()
@pass_log
@click.argument("name", metavar="[TOPIC]", required=False)
@click.option("--seal", is_flag=True, help="Seal everything that is committed, due or not.")
@click.option("--forever", is_flag=True, help="Do it again and again, until interrupted.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="With --forever: seconds between two rounds.",
)
@metrics_port_option
@json_option
def maintain(
    log: Log,
    name: str | None,
    seal: bool,
    forever: bool,
    interval: float,
    metrics_port: int | None,
    as_json: bool,
) -> None:
    """Do what is due for a topic, or for all: sealing, retention, compaction, removal of files.

    Producers do the same in the background. It may run beside them, and more than once.
    """
    export_if_asked(metrics_port, "maintain", log)
    while True:
        done, failure = _maintain(log, name, seal)
        if failure is not None and not forever and not done:
            raise failure
        if not forever or any(map(_is_worth_saying, done)):
            _print(done, as_json)
        if not forever:
            if failure is not None:
                raise failure
            return
        if failure is not None:
            say(failure)  # It may pass, and the other topics are not to wait for that.
        time.sleep(interval)


def _maintain(
    log: Log, name: str | None, seal: bool
) -> tuple[Sequence[TopicMaintenance], LogError | None]:
    """Return what was done, and what kept the rest from being done."""
    try:
        with Bar() as bar:
            return log.maintain(name, seal=seal, progress=bar), None
    except (LogNotFound, UnknownTopic):
        raise
    except MaintenanceFailed as failure:
        return failure.done, failure
    except LogError as failure:
        return [], failure


def _is_worth_saying(done: TopicMaintenance) -> bool:
    return bool(
        done.sealed_records or done.compacted_files or done.removed_records or done.removed_files
    )


def _print(done: Sequence[TopicMaintenance], as_json: bool) -> None:
    if as_json:
        print_json([asdict(one) for one in done])
    elif not done:
        print("no topics")
    else:
        rows = [
            [
                one.topic,
                format_count(one.sealed_records),
                format_count(one.sealed_files),
                format_count(one.merged_files),
                format_count(one.compacted_records),
                format_count(one.removed_records),
                format_count(len(one.removed_files)),
                "somebody else is at it" if one.is_held else "",
            ]
            for one in done
        ]
        names = ["topic", ">sealed", ">into files", ">merged files", ">superseded"]
        print_table([*names, ">records removed", ">files removed", ""], rows)
    sys.stdout.flush()


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str, total: int) -> None:
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)

    def advance(self, count: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)
