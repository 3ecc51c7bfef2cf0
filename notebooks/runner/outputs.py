"""What a cell shows: text, tables, pictures and HTML, as values that a page is made of."""

from __future__ import annotations

import io
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More rows than these are left off, and the table says so.
ROWS_MAX = 40


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_numeric: tuple[bool, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    svg: str


@dataclass(frozen=True, slots=True)
class Html:
    html: str


Output = Text | Table | Picture | Html


class DisplayError(Exception):
    """A value that cannot be shown."""


def of_display(value: Any) -> Output:
    """Return what `display(value)` shows."""
    if _is_from(value, "pyspark") and hasattr(value, "toPandas"):
        if value.isStreaming:
            raise DisplayError(
                "display() of a streaming DataFrame: start it with writeStream, then show what "
                "it wrote"
            )
        rows = [tuple(row) for row in value.limit(ROWS_MAX + 1).collect()]
        return table(value.columns, rows)
    shown = of_expression(value)
    if isinstance(shown, Text) and isinstance(value, Sequence) and not isinstance(value, str):
        return _of_records(value) or shown
    return shown


def of_expression(value: Any) -> Output:
    """Return what the last expression of a cell shows."""
    if _is_from(value, "matplotlib") and hasattr(value, "savefig"):
        return picture(value)
    if _is_from(value, "pandas") and hasattr(value, "itertuples"):
        frame = value.head(ROWS_MAX + 1)
        return table(list(map(str, frame.columns)), list(frame.itertuples(index=False, name=None)))
    if hasattr(value, "_repr_html_") and not _is_from(value, "pyspark"):
        html = value._repr_html_()
        if html is not None:
            return Html(html)
    return Text(value if isinstance(value, str) else repr(value))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> Table:
    """Return a table of at most ROWS_MAX of the rows."""
    if len(rows) > ROWS_MAX:
        note = note or f"the first {ROWS_MAX} rows"
        rows = rows[:ROWS_MAX]
    is_numeric = tuple(
        any(row[at] is not None for row in rows)
        and all(row[at] is None or _is_number(row[at]) for row in rows)
        for at in range(len(columns))
    )
    text = tuple(tuple(_text(value) for value in row) for row in rows)
    return Table(tuple(columns), text, is_numeric, note or ("no rows" if not rows else ""))


def picture(figure: Any) -> Picture:
    """Return a figure of matplotlib as a picture whose text stays text."""
    import matplotlib

    out = io.StringIO()
    # Without these the same figure would have other names of its parts, and a date, every time.
    with matplotlib.rc_context({"svg.hashsalt": "notebook", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = out.getvalue()
    return Picture(svg[svg.index("<svg") :])


def _of_records(values: Iterable[Any]) -> Output | None:
    """Return a table of a list of dicts or of Spark's rows; None for other lists."""
    records = [value.asDict() if hasattr(value, "asDict") else value for value in values]
    if not records or not all(isinstance(record, Mapping) for record in records):
        return None
    columns = list(records[0])
    return table(columns, [[record.get(name) for name in columns] for record in records])


def _is_from(value: Any, module: str) -> bool:
    """Tell whether a value's type, or one it inherits from, is of this package."""
    return any(one.__module__.split(".")[0] == module for one in type(value).mro())


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return value.hex(" ")
    if isinstance(value, float):
        return f"{value:.10g}"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(" ")) if hasattr(value, "hour") else str(value.isoformat())
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
