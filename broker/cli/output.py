"""What the command prints: tables for people, aligned text for pipes, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

# A name that begins with this is a column of numbers.
NUMBER = ">"


class OutputFailed(Exception):
    """Standard output takes no more, for the reason that the system gave."""


class Output:
    """Standard output whose errors can be told from those of all else. A closed pipe is none."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def buffer(self) -> Output:
        return Output(self._stream.buffer)

    def write(self, data: Any) -> Any:
        return self._do(lambda: self._stream.write(data))

    def flush(self) -> None:
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(error.strerror) from error


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their column names; a name that begins with `>` aligns to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, texts)
        return
    names = [column.lstrip(NUMBER).upper() for column in columns]
    widths = [max(map(len, cells)) for cells in zip(names, *texts, strict=True)]
    for row in [names, *texts]:
        cells = [
            cell.rjust(width) if column.startswith(NUMBER) else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith(NUMBER)
        table.add_column(
            column.lstrip(NUMBER), justify="right" if is_number else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one pair on a line."""
    width = max(len(name) for name, _ in facts)
    is_terminal = sys.stdout.isatty()
    for name, value in facts:
        label = f"\x1b[1m{name.ljust(width)}\x1b[0m" if is_terminal else name.ljust(width)
        print(f"{label}  {value}")


def say(message: object) -> None:
    """Print one line on stderr; that nobody reads it changes nothing."""
    text = " ".join(str(message).split())
    try:
        print(f"spark-log: {text}", file=sys.stderr, flush=True)
    except OSError:
        # At exit, Python would try to write it again, and say so by its exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def format_count(count: int) -> str:
    return f"{count:,}"


def format_bytes(count: float) -> str:
    """Return a size as a person says it."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def plural(count: int, noun: str) -> str:
    return f"{format_count(count)} {noun}" + ("" if count == 1 else "s")
