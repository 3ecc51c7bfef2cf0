"""Running a notebook: its cells one after the other, in one namespace, with what each showed."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebooks.runner import magics, outputs, plots
from notebooks.runner.dbutils import DbUtils, NotebookExit, WidgetError, Widgets
from notebooks.runner.outputs import DisplayError, Html, Output, Text
from notebooks.runner.source import Cell, Notebook, NotebookError, read

# An error of ours that Spark has wrapped into pages of its own.
_WRAPPED = re.compile(r"^(?:broker|spark_log)\.[\w.]*?(\w+: .+)$", re.MULTILINE)


class CellFailed(Exception):
    """A cell failed: which one, its text, and why."""

    def __init__(self, notebook: str, cell: Cell, reason: str, trace: str = "") -> None:
        super().__init__(notebook, cell, reason, trace)
        self.notebook, self.cell, self.reason, self.trace = notebook, cell, reason, trace

    @property
    def line(self) -> str:
        """Return what failed and why, in one line."""
        return f"{self.notebook}, cell {self.cell.number}: {self.reason}"

    def __str__(self) -> str:
        text = "\n".join(f"    {line}" for line in self.cell.text.split("\n"))
        trace = f"\n{self.trace.rstrip()}" if self.trace else ""
        return f"{self.line}\n{text}{trace}"


@dataclass(frozen=True, slots=True)
class Done:
    """A cell that was run, and what it showed."""

    cell: Cell
    outputs: tuple[Output, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run keeps what it needs: packages of its own, and the pins for them."""

    packages: Path
    constraints: Path | None = None


def run(
    notebook: Notebook,
    spark: Any,
    place: Place,
    *,
    given: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> list[Done]:
    """Run all cells of a notebook.

    Args:
        given: values of widgets; each must be there.
        defaults: values of widgets that may be there.

    Raises:
        CellFailed: a cell failed.
        WidgetError: a value was given for a widget that is not there.
    """
    runner = _Runner(spark, place, Widgets(given or {}, defaults or {}))
    done = []
    with contextlib.suppress(NotebookExit):
        for cell in notebook.cells:
            started = time.monotonic()
            runner.run_cell(notebook, cell)
            done.append(Done(cell, runner.take_outputs(), time.monotonic() - started))
    runner.widgets.check_given()
    return done


class _Runner:
    """One namespace and what the cell that is running has shown so far."""

    def __init__(self, spark: Any, place: Place, widgets: Widgets) -> None:
        self.widgets = widgets
        self._spark = spark
        self._place = place
        self._shown: list[Output] = []
        self._running: list[Path] = []
        self._printed = io.StringIO()
        # Functions of this module are sent to executors by value: nobody else can import them.
        self._names: dict[str, Any] = {
            "__name__": "__main__",
            "spark": spark,
            "dbutils": DbUtils(widgets),
            "display": self._display,
            "displayHTML": lambda html: self._show(Html(html)),
        }
        plots.use(lambda figure: self._show(outputs.picture(figure)))

    def run_cell(self, notebook: Notebook, cell: Cell) -> None:
        do: Callable[[Notebook, Cell], None] = getattr(self, f"_do_{cell.kind}")
        try:
            with self._capture():
                do(notebook, cell)
                plots.show()
        except (CellFailed, NotebookExit):
            raise
        except (NotebookError, WidgetError, DisplayError) as error:
            raise CellFailed(notebook.name, cell, str(error)) from error
        except Exception as error:
            trace = _trace(error, notebook.path)
            raise CellFailed(notebook.name, cell, describe(error), trace) from error

    def take_outputs(self) -> tuple[Output, ...]:
        taken, self._shown = tuple(self._shown), []
        return taken

    # A method for each kind of cell.

    def _do_md(self, notebook: Notebook, cell: Cell) -> None:
        """The page shows it."""

    def _do_python(self, notebook: Notebook, cell: Cell) -> None:
        # Empty lines before the text give it its line numbers in the file.
        text = "\n" * (cell.line - 1) + cell.text
        tree = ast.parse(text, filename=str(notebook.path))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(notebook.path), "exec"), self._names)
        if last is not None:
            assert isinstance(last, ast.Expr)
            expression = ast.Expression(last.value)
            value = eval(compile(expression, str(notebook.path), "eval"), self._names)
            if value is not None:
                self._show(outputs.of_expression(value))
                plots.forget(value)

    def _do_sql(self, notebook: Notebook, cell: Cell) -> None:
        frame = None
        for statement in magics.statements(cell.text):
            frame = self._spark.sql(statement, args=self.widgets.getAll())
        if frame is None:
            raise NotebookError("the %sql cell has no statement")
        self._names["_sqldf"] = frame
        if frame.columns:
            self._show(outputs.of_display(frame))

    def _do_run(self, notebook: Notebook, cell: Cell) -> None:
        path = (notebook.path.parent / cell.text.strip().strip("\"'")).resolve()
        other = read(path if path.suffix == ".py" else path.with_name(f"{path.name}.py"))
        if other.path in self._running or path == notebook.path:
            raise NotebookError(f"%run {cell.text}: {other.name} runs itself")
        self._running.append(other.path)
        with contextlib.suppress(NotebookExit):
            for inner in other.cells:
                self.run_cell(other, inner)
        self._running.pop()

    def _do_pip(self, notebook: Notebook, cell: Cell) -> None:
        place = self._place
        print(
            magics.pip(
                cell.text,
                directory=notebook.path.parent,
                target=place.packages,
                constraints=place.constraints,
            )
        )

    # What it shows.

    @contextlib.contextmanager
    def _capture(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
            try:
                yield
            finally:
                self._flush()

    def _display(self, value: Any) -> None:
        self._show(outputs.of_display(value))
        plots.forget(value)

    def _show(self, output: Output) -> None:
        self._flush()
        self._shown.append(output)

    def _flush(self) -> None:
        """Let what was printed stand before what is shown next."""
        printed = self._printed.getvalue()
        if printed:
            self._shown.append(Text(printed.rstrip("\n")))
            self._printed.seek(0)
            self._printed.truncate()


def describe(error: BaseException) -> str:
    """Say in one line what an error says, also where Spark has wrapped it in a page."""
    text = str(error)
    wrapped = _WRAPPED.search(text)
    if wrapped is not None:
        return wrapped[1].strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _trace(error: Exception, path: Path) -> str:
    """Return where in the notebook it failed, and what that called; no lines of the runner."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename == str(path)]
    return "".join(traceback.format_list(frames[own[0] :])) if own else ""
