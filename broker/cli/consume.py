"""`spark-log consume`: records to standard output."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.cli.ending import Ending, pass_ending
from broker.cli.json_record import format_records
from broker.cli.output import say
from broker.cli.root import metrics_port_option, pass_log
from broker.consumer import Consumer
from broker.errors import CommitFailed, LockTimeout
from broker.log import Log
from broker.records import TopicPartition

Write = Callable[[TopicPartition, pa.RecordBatch], bytes]

_POLL_MS = 1000
_SHARE_POLL_MS = 500
# How long a member without --follow waits for a share of the partitions.
_ASSIGNMENT_MS = 15_000
_KEY_WIDTH = 24
_VALUE_WIDTH = 120


@click.command()
@pass_log
@pass_ending
@click.argument("topic")
@click.option(
    "--from-beginning",
    is_flag=True,
    help="Begin with the first record; without --follow that is the default.",
)
@click.option("--offset", "-o", type=click.IntRange(min=0), help="Begin at this offset.")
@click.option(
    "--partition",
    "-p",
    "partitions",
    type=int,
    multiple=True,
    help="Only this partition. May be given several times.",
)
@click.option("--max-records", "-n", type=click.IntRange(min=0), help="Stop after so many.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["value", "json", "table"]),
    default="value",
    show_default=True,
    help="Values, one a line; whole records as JSON; or columns to look at.",
)
@click.option(
    "--follow", "-f", is_flag=True, help="Wait for new records; alone, begin with the next one."
)
@click.option(
    "--timeout-ms",
    type=click.IntRange(min=0),
    help="With --follow: stop when nothing has come for so long.",
)
@metrics_port_option
@click.option(
    "--group", "-g", help="Read as a member of this group, go on where it was, and commit."
)
def consume(
    ending: Ending,
    log: Log,
    topic: str,
    from_beginning: bool,
    offset: int | None,
    partitions: tuple[int, ...],
    max_records: int | None,
    format_: str,
    follow: bool,
    timeout_ms: int | None,
    metrics_port: int | None,
    group: str | None,
) -> None:  # fmt: skip
    """Print a topic's records: those that are there now, or with --follow for ever."""
    if group is not None and (partitions or offset is not None):
        raise click.UsageError(
            "--group goes on where the group was: leave --partition and --offset out."
        )
    if from_beginning and offset is not None:
        raise click.UsageError("give either --from-beginning or --offset.")
    if timeout_ms is not None and not follow:
        raise click.UsageError("--timeout-ms goes with --follow.")
    reset = "latest" if follow and not from_beginning else "earliest"
    printer = _Printer(_FORMATS[format_](), max_records)
    if group is not None:
        with (
            log.consumer(
                topic,
                group_id=group,
                auto_offset_reset=reset,
                enable_auto_commit=False,
                metrics_port=metrics_port,
            ) as member,
            ending.hurry_after_failure(),
        ):
            _share(member, printer, timeout_ms, follow=follow)
        return
    with log.consumer(
        auto_offset_reset=reset, metadata_max_age_ms=1000, metrics_port=metrics_port
    ) as consumer:
        if partitions:
            consumer.assign([TopicPartition(topic, number) for number in partitions])
        else:
            consumer.subscribe([topic])  # So that partitions added later are read as well.
        if offset is not None:
            for place in consumer.assignment():
                consumer.seek(place, offset)
        if follow:
            _follow(consumer, printer, timeout_ms)
        else:
            _read_to_end(consumer, printer)


def _follow(consumer: Consumer, printer: _Printer, timeout_ms: int | None) -> None:
    while not printer.is_done:
        batches = consumer.poll_batches(_POLL_MS if timeout_ms is None else timeout_ms)
        if not batches and timeout_ms is not None:
            return
        for place, batch in sorted(batches.items()):
            printer.print(place, batch)


def _share(consumer: Consumer, printer: _Printer, timeout_ms: int | None, *, follow: bool) -> None:
    """Print this member's share; without `follow`, until there is no more of it."""
    patience = _ASSIGNMENT_MS if not follow else timeout_ms
    idle_since = time.monotonic()
    share: set[TopicPartition] = set()
    while not printer.is_done:
        batches = consumer.poll_batches(_SHARE_POLL_MS)
        for place, batch in sorted(batches.items()):
            count = printer.print(place, batch)
            if count < batch.num_rows:
                # The group is to go on with the first that was not printed.
                consumer.seek(place, batch.column("offset")[count].as_py())
        # Only here, with all of it printed: who is interrupted before prints it again next time.
        # A new share is committed too, for where it begins is to be known.
        if batches or consumer.assignment() != share:
            share = consumer.assignment()
            _commit(consumer)
        if batches:
            idle_since = time.monotonic()
        elif not follow and consumer.assignment():
            return
        elif patience is not None and (time.monotonic() - idle_since) * 1000 >= patience:
            return


def _commit(consumer: Consumer) -> None:
    try:
        consumer.commit()
    except (CommitFailed, LockTimeout) as error:
        say(error)  # Whoever has the partitions now prints these records again.


def _read_to_end(consumer: Consumer, printer: _Printer) -> None:
    """Print what was there at the start, however much others add meanwhile."""
    ends = consumer.end_offsets(consumer.assignment())
    finished = [place for place, end in ends.items() if consumer.position(place) == end]
    while True:
        for place in finished:
            del ends[place]
        consumer.pause(*finished)
        if not ends or printer.is_done:
            return
        for place, batch in sorted(consumer.poll_batches(_POLL_MS).items()):
            if place in ends:  # Not one that was added meanwhile.
                offsets = batch.column("offset").to_numpy()
                printer.print(place, batch.slice(0, int(np.searchsorted(offsets, ends[place]))))
        # Behind the end, if compaction has left nothing before it.
        finished = [place for place, end in ends.items() if consumer.position(place) >= end]


class _Printer:
    """Writes batches to standard output, up to a number of records."""

    def __init__(self, write: Write, count_max: int | None) -> None:
        self._write = write
        self._rest = count_max

    @property
    def is_done(self) -> bool:
        return self._rest == 0

    def print(self, place: TopicPartition, batch: pa.RecordBatch) -> int:
        """Print what is still wanted of a batch; return how many records that was."""
        if self._rest is not None:
            batch = batch.slice(0, self._rest)
            self._rest -= batch.num_rows
        if batch.num_rows:
            _write_all(self._write(place, batch))
        return int(batch.num_rows)


def _write_all(data: bytes) -> None:
    """Write to standard output, to the last byte."""
    rest = memoryview(data)
    while rest:  # Without a buffer (PYTHONUNBUFFERED) a write may fall short.
        rest = rest[sys.stdout.buffer.write(rest) :]
    sys.stdout.buffer.flush()


def _values(_place: TopicPartition, batch: pa.RecordBatch) -> bytes:
    """Return the values, one a line, joined as a whole; a null is an empty line."""
    values = pc.fill_null(batch.column("value"), b"")
    lines = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    joined: bytes = pc.binary_join(lines, b"\n")[0].as_py()
    return joined + b"\n"


def _json(place: TopicPartition, batch: pa.RecordBatch) -> bytes:
    text = "\n".join(format_records(place, batch)) + "\n"
    return text.encode("utf-8", "surrogatepass")


class _Columns:
    """Rows of fixed columns: a stream has no widest cell."""

    def __init__(self) -> None:
        self._is_begun = False
        self._value_width = _VALUE_WIDTH
        self._is_terminal = sys.stdout.isatty()
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            self._value_width = max(10, columns - len(self._row("", "", "", "", "")))

    def __call__(self, place: TopicPartition, batch: pa.RecordBatch) -> bytes:
        rows = []
        if not self._is_begun:
            self._is_begun = True
            head = self._row("PARTITION", "OFFSET", "TIME (UTC)", "KEY", "VALUE")
            rows.append(f"\x1b[1m{head}\x1b[0m" if self._is_terminal else head)
        stamps = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
        columns = (batch.column(name).to_pylist() for name in ("offset", "key", "value"))
        for stamp, offset, key, value in zip(np.asarray(stamps).tolist(), *columns, strict=True):
            row = self._row(
                place.partition, offset, _show_time(stamp), _show(key, _KEY_WIDTH),
                _show(value, self._value_width),
            )  # fmt: skip
            rows.append(row.rstrip())
        return ("\n".join(rows) + "\n").encode()

    def _row(self, partition: object, offset: object, time: str, key: str, value: str) -> str:
        return f"{partition:>9}  {offset:>10}  {time:<23}  {key:<{_KEY_WIDTH}}  {value}"


def _show_time(stamp: int) -> str:
    """Return a time as a person says it; milliseconds since 1970 where no calendar goes."""
    try:
        moment = datetime.fromtimestamp(stamp / 1000, UTC)
    except (OSError, OverflowError, ValueError):
        return f"{stamp} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _show(data: bytes | None, width: int) -> str:
    """Return bytes as text that a terminal can show, cut to a width."""
    if data is None:
        return "-"
    text = data[: 4 * width].decode(errors="backslashreplace")
    text = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )
    return text if len(text) <= width else text[: width - 1] + "…"


_FORMATS: dict[str, Callable[[], Write]] = {
    "value": lambda: _values,
    "json": lambda: _json,
    "table": _Columns,
}
