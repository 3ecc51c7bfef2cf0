"""`spark-log load` and `spark-log etl`: jobs of Spark, in the package `pipelines`.

That package, and Spark with it, is imported only when one of them runs: all else works without.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from broker.cli.ending import Ending, pass_ending
from broker.cli.output import print_facts, print_json, say
from broker.cli.root import log_option, pass_log
from broker.config import CODECS
from broker.errors import LogError
from broker.log import Log

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class SparkMissing(LogError):
    """A job needs Spark, and this Python has none."""


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("pyspark", "pandas", "py4j"):
            raise
        raise SparkMissing(
            f"this command needs Spark, and {sys.executable} has no module {error.name!r}: "
            "pip install 'spark-log[spark]'"
        ) from error


def _parse_setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.startswith("spark."):
        raise click.BadParameter(f"{text!r} is not of the form spark.NAME=VALUE.")
    return name, value


@click.command()
@pass_log
@click.argument("directory")
@click.argument("topic")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["csv", "json", "parquet", "text"]),
    required=True,
    help="What the files are: CSV with a header, lines of JSON, Parquet, lines of text.",
)
@click.option("--key", metavar="COLUMN", help="The column that is the key; else there is none.")
@click.option(
    "--timestamp",
    metavar="COLUMN",
    help="The column that is the time, as text or in milliseconds since 1970; else it is now.",
)
@click.option(
    "--value", metavar="COLUMN", help="The column that is the value; else the row, as JSON."
)
@click.option("--file-header", is_flag=True, help="Add a header `file`, the name of the file.")
@click.option("--name", help="What the load is known by; else the directory.")
@click.option("--partitions", type=click.IntRange(min=1), help="Make the topic if it is not there.")
@click.option("--compression", type=click.Choice(CODECS), default="none", show_default=True)
@click.option(
    "--chunk-bytes",
    type=click.IntRange(min=1),
    default=256 << 20,
    show_default=True,
    metavar="BYTES",
    help="How much of the files goes into one commit, about.",
)
@click.option(
    "--spark",
    "settings",
    type=_parse_setting,
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark, as spark.master=local[4]. May be given several times.",
)
@json_option
def load(
    log: Log,
    directory: str,
    topic: str,
    format_: str,
    key: str | None,
    timestamp: str | None,
    value: str | None,
    file_header: bool,
    name: str | None,
    partitions: int | None,
    compression: str,
    chunk_bytes: int,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Load a directory of files into a topic, each file once.

    What was killed is run again: it goes on where it was. Files that are new are added.
    """
    jobs = _import("pipelines.load")
    rows = jobs.RowFormat(format_, key, timestamp, value, file_header)
    wanted = jobs.Load(directory, topic, rows, name, partitions, compression, chunk_bytes)
    if partitions is None:
        log.describe_topic(topic)  # Spark takes its time to start; this is known before.
    with Meter() as meter:
        done = jobs.run(log, wanted, dict(settings), meter.show)
    facts = {
        "records": done.record_count,
        "files": done.file_count,
        "files loaded before": done.known_file_count,
        "commits": done.chunk_count,
    }
    _print(facts, as_json=as_json)


@click.command()
@log_option
@pass_ending
@click.argument("config")
@click.option("--continuous", is_flag=True, help="Go on until Ctrl-C, instead of ending.")
@json_option
@click.pass_context
def etl(
    context: click.Context, ending: Ending, config: str, continuous: bool, as_json: bool
) -> None:
    """Take orders from raw lines to totals, as the file CONFIG says; see conf/etl.toml."""
    jobs = _import("pipelines.etl")
    parsed = jobs.EtlConfig.load(config, log=context.find_root().obj)
    if continuous:
        ending.wait_for_batch()
        jobs.follow(parsed, lambda: say("all queries run; Ctrl-C ends"))
        return
    with Meter() as meter:
        done = jobs.run(parsed, meter.show)
    facts = {
        "lines loaded": done.loaded,
        "lines read": done.read,
        "orders": done.silver,
        "too late": done.too_late,
        "dead letters": done.dead_letters,
    }
    _print(facts, as_json=as_json)


def _print(facts: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        print_json({name.replace(" ", "_"): count for name, count in facts.items()})
    else:
        print_facts([(name, f"{count:,}") for name, count in facts.items()])


class Meter:
    """A progress bar on stderr, if that is a terminal; it appears with the first bytes."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done: float, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True),
                TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._progress.add_task("", total=total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)
