"""A notebook as Databricks stores it in files: Python source, cut into cells by comments.

    # Databricks notebook source
    # MAGIC %md
    # MAGIC # A title

    # COMMAND ----------

    print("a cell")

A cell whose lines all begin with `# MAGIC` is no Python, but what its first word, a magic, says.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

HEADER = "# Databricks notebook source"
SEPARATOR = "# COMMAND ----------"
MAGIC = "# MAGIC"
TITLE = "# DBTITLE"
KINDS = ("md", "pip", "python", "run", "sql")


class NotebookError(Exception):
    """A notebook cannot be read or run; one line says where and why."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its number from 1, what it is, its text, and the line of the file it begins at."""

    number: int
    kind: str
    text: str
    line: int
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Notebook:
    path: Path
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        """Return its first heading."""
        lines = [line for cell in self.cells if cell.kind == "md" for line in cell.text.split("\n")]
        return next((line[2:].strip() for line in lines if line.startswith("# ")), self.name)


def read(path: Path) -> Notebook:
    """Read the notebook in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotebookError(f"there is no notebook {path}{_suggestion(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotebookError(f"the notebook {path} cannot be read: {error}") from None
    lines = text.split("\n")
    if lines[0].rstrip() != HEADER:
        raise NotebookError(f"{path} is no notebook: its first line is not {HEADER!r}")
    return Notebook(path, tuple(_cells(path, lines)))


def _suggestion(path: Path) -> str:
    known = [other.stem for other in path.parent.glob("*.py")]
    near = difflib.get_close_matches(path.stem, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _cells(path: Path, lines: list[str]) -> list[Cell]:
    """Cut the lines after the header into cells; cells without text have no number."""
    cells: list[Cell] = []
    start = 1
    for end in range(1, len(lines) + 1):
        if end == len(lines) or lines[end].rstrip() == SEPARATOR:
            cell = _cell(path, lines[start:end], number=len(cells) + 1, line=start + 1)
            if cell is not None:
                cells.append(cell)
            start = end + 1
    return cells


def _cell(path: Path, lines: list[str], *, number: int, line: int) -> Cell | None:
    while lines and not lines[0].strip():
        lines, line = lines[1:], line + 1
    title = None
    if lines and lines[0].startswith(TITLE):
        # "# DBTITLE 1,The title": the number says whether the title is shown.
        title = lines[0].partition(",")[2].strip()
        lines, line = lines[1:], line + 1
    if not any(one.strip() for one in lines):
        return None
    if not lines[0].startswith(MAGIC):
        return Cell(number, "python", "\n".join(lines).rstrip(), line, title)
    where = f"{path.name}, cell {number}"
    kind, text = _magic(where, [one for one in lines if one.strip()])
    return Cell(number, kind, text, line, title)


def _magic(where: str, lines: list[str]) -> tuple[str, str]:
    """Return the kind of a cell and its text, without the magic and the comment signs."""
    for line in lines:
        if not line.startswith(MAGIC):
            raise NotebookError(f"{where}: {line.strip()!r} stands between lines of {MAGIC}")
    first, *rest = [line[len(MAGIC) :].removeprefix(" ").rstrip() for line in lines]
    word, _, argument = first.partition(" ")
    kind = word.removeprefix("%")
    if not word.startswith("%") or kind not in KINDS:
        known = ", ".join(f"%{one}" for one in KINDS)
        raise NotebookError(f"{where}: {word!r} is not a magic of this runner; it knows {known}")
    return kind, "\n".join([argument, *rest]).strip("\n")
