"""`spark-log produce`: lines from standard input become records."""

from __future__ import annotations

import os
import stat
import sys
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from broker.cli.ending import EXIT_INTERRUPTED, EXIT_REFUSED, Ending, pass_ending
from broker.cli.json_record import parse_record
from broker.cli.lines import LineReader, split_keys, split_lines
from broker.cli.output import format_bytes, format_count, plural, say
from broker.cli.root import metrics_port_option, pass_log
from broker.config import CODECS
from broker.errors import InvalidRecord, LogError
from broker.log import Log, TopicDescription
from broker.producer import Producer

_STDIN = 0


@dataclass(frozen=True, slots=True)
class Input:
    """How lines become records."""

    topic: str
    is_json: bool
    key_separator: str | None
    partition: int | None


@click.command()
@pass_log
@pass_ending
@click.argument("topic")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["lines", "json"]),
    default="lines",
    show_default=True,
    help="A line is a value, or a JSON object with value, key, "
    "headers, partition and timestamp (value_base64 and key_base64 for bytes).",
)
@click.option(
    "--key-separator",
    metavar="TEXT",
    help=r"What stands between key and value in a line; \t is a tab.",
)
@click.option("--partition", "-p", type=click.IntRange(min=0), help="Send all records here.")
@click.option("--compression", type=click.Choice(CODECS), help="How the records are compressed.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="How much goes into one commit.",
)
@click.option(
    "--linger-ms",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="MS",
    help="How long to wait for more before committing less.",
)
@click.option(
    "--durability",
    type=click.Choice(["buffered", "fsync"]),
    default="buffered",
    show_default=True,
    help="fsync: on disk before a record counts as sent.",
)
@metrics_port_option
def produce(
    ending: Ending,
    log: Log,
    topic: str,
    format_: str,
    key_separator: str | None,
    partition: int | None,
    compression: str | None,
    batch_size: int,
    linger_ms: int,
    durability: str,
    metrics_port: int | None,
) -> int:  # fmt: skip
    """Send each line of standard input as a record."""
    if format_ == "json" and (key_separator is not None or partition is not None):
        raise click.UsageError("--key-separator and --partition are for --format lines.")
    if key_separator == "":
        raise click.UsageError("--key-separator is empty.")
    source = Input(topic, format_ == "json", _unescape(key_separator), partition)
    found = log.describe_topic(topic)
    if sys.stdin.isatty():
        say("one record a line; Ctrl-D ends")
    options = {"linger_ms": linger_ms, "batch_size": batch_size, "durability": durability}
    with (
        ending.finish_first(),
        log.producer(
            compression_type=compression, metrics_port=metrics_port, **options
        ) as producer,
    ):
        lines = _open_lines(found, ending, batch_size, linger_ms)
        return _send_all(_Sending(producer, source, ending), lines, ending)  # fmt: skip


def _open_lines(
    found: TopicDescription, ending: Ending, batch_size: int, linger_ms: int
) -> LineReader:
    # A line may be longer than its record: by the separator; by escapes, base64 and field names.
    line_bytes_max = 8 * found.config["max.message.bytes"] + 4096
    return LineReader(_STDIN, batch_size, line_bytes_max, ending.wait_readable, linger_ms / 1000)


def _send_all(sending: _Sending, lines: LineReader, ending: Ending) -> int:
    try:
        with _Meter() as meter:
            while block := lines.next_block():
                sending.send(block)
                meter.show(sending.written_count, len(block))
            sending.finish()
            meter.show(sending.written_count, 0)
    except LogError as error:
        why = str(error)

        def tell() -> str:
            return f"{why} ({plural(sending.written_count, 'record')} written before)"

        ending.fail(error, tell)
        sending.wait_for_rest()
        ending.say(tell())
        return EXIT_REFUSED
    if ending.is_interrupted:
        ending.say(sending.tell())
        return EXIT_INTERRUPTED
    return 0


class _Sending:
    """Blocks of lines on their way into the log, and how many records have arrived."""

    def __init__(self, producer: Producer, source: Input, ending: Ending) -> None:
        self._producer = producer
        self._source = source
        self._ending = ending
        ending.tell = self.tell
        self._waiting: deque[tuple[Any, int]] = deque()
        self._line_count = 0
        self.written_count = 0

    def send(self, block: bytes) -> None:
        if self._source.is_json:
            self._send_json(block)
        else:
            self._send_lines(block)
        self._settle(wait=False)

    def finish(self) -> None:
        """Return when all is committed; raise why it is not."""
        self._begin_all()
        self._settle(wait=True)

    def wait_for_rest(self) -> None:
        """After a failure: others may have arrived all the same."""
        self._begin_all()
        while self._waiting:
            self._settle_next()

    def tell(self) -> str:
        """Say what an interruption has left."""
        open_count = sum(count for _, count in list(self._waiting))
        rest = f", of {format_count(open_count)} more it is not known" if open_count else ""
        return f"interrupted; {plural(self.written_count, 'record')} written{rest}"

    def _begin_all(self) -> None:
        """Let nothing linger; each is waited for by itself, to see whether there is progress."""
        with suppress(TimeoutError):
            self._producer.flush(timeout=0)

    def _settle(self, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0][0].done()):
            if (error := self._settle_next()) is not None:
                raise error

    def _settle_next(self) -> BaseException | None:
        future, count = self._waiting[0]
        # Not `result`: where each record of a buffer is takes time to say.
        error: BaseException | None = future.exception()
        self._waiting.popleft()
        self.written_count += count if error is None else 0
        self._ending.prolong()
        return error

    def _send_lines(self, block: bytes) -> None:
        source = self._source
        lines = values = split_lines(block)
        columns = {}
        if source.key_separator is not None:
            columns["key"], values = split_keys(lines, source.key_separator)
        if source.partition is not None:
            columns["partition"] = pa.array(np.full(len(values), source.partition))
        if len(values):
            batch = pa.RecordBatch.from_pydict({"value": values, **columns})
            self._waiting.append((self._producer.send_batch(source.topic, batch), len(values)))
        self._line_count += len(values)
        if len(values) < len(lines):
            raise InvalidRecord(
                f"line {self._line_count + 1} has no key separator {source.key_separator!r}"
            )

    def _send_json(self, block: bytes) -> None:
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            self._line_count += 1
            try:
                future = self._producer.send(self._source.topic, **parse_record(line))
            except LogError as error:
                raise InvalidRecord(f"line {self._line_count}: {error}") from error
            self._waiting.append((future, 1))


class _Meter:
    """A progress bar on stderr, if that is a terminal that nobody types into."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if not sys.stderr.isatty() or sys.stdin.isatty():
            return
        status = os.fstat(_STDIN)
        total = status.st_size if stat.S_ISREG(status.st_mode) else None
        self._progress = Progress(
            SpinnerColumn(), BarColumn(), TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, text="")

    def __enter__(self) -> _Meter:
        (self._progress or nullcontext()).__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, record_count: int, byte_count: int) -> None:
        if self._progress is None:
            return
        task = self._progress.tasks[0]
        done = task.completed + byte_count
        rate = done / max(task.elapsed or 0, 1e-3)
        text = f"{plural(record_count, 'record')}  {format_bytes(done)}  {format_bytes(rate)}/s"
        self._progress.update(self._task, advance=byte_count, text=text)


def _unescape(separator: str | None) -> str | None:
    """A shell does not make a tab of `\\t`."""
    return "\t" if separator == r"\t" else separator
