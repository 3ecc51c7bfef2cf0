"""The command line: `python -m notebooks.runner [NAME...]` from the project's directory."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from notebooks.runner import page
from notebooks.runner.dbutils import WidgetError
from notebooks.runner.execution import CellFailed, Place, run
from notebooks.runner.source import Notebook, NotebookError, read

NOTEBOOKS = Path(__file__).parent.parent
CONSTRAINTS = NOTEBOOKS.parent / "constraints.txt"
# Small data: two cores, and no more tasks than these in a shuffle or in Delta's own jobs.
CONF = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.databricks.delta.snapshotPartitions": "1",
    # Notebooks are over before the better code of the JVM's second compiler would pay.
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--output", type=click.Path(path_type=Path), help="Write a page for each here.")
@click.option(
    "--workspace", type=click.Path(path_type=Path), help="Keep what they write, below this."
)
@click.option("--param", "params", multiple=True, help="NAME=VALUE of a widget.")
def main(
    names: Sequence[str], output: Path | None, workspace: Path | None, params: Sequence[str]
) -> None:
    """Run notebooks, all of them or those named, each on a log of its own."""
    try:
        given = dict(_pair(one) for one in params)
        chosen = [read(path) for path in _paths(names)]
    except NotebookError as error:
        raise click.ClickException(str(error)) from None
    with _workspace(workspace) as directory, _spark(directory) as spark:
        is_well = [_run(one, spark, directory, output, given) for one in chosen]
    if output is not None and not names and all(is_well):
        (output / "index.html").write_text(page.render_index(chosen), encoding="utf-8")
    sys.exit(0 if all(is_well) else 1)


def _pair(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there:
        raise NotebookError(f"--param {text}: use NAME=VALUE")
    return name, value


def _paths(names: Sequence[str]) -> list[Path]:
    if not names:
        return sorted(NOTEBOOKS.glob("[0-9]*.py"))
    return [
        Path(name).resolve() if name.endswith(".py") else NOTEBOOKS / f"{name}.py" for name in names
    ]


@contextlib.contextmanager
def _workspace(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="notebooks-", ignore_cleanup_errors=True) as made:
            yield Path(made)


@contextlib.contextmanager
def _spark(directory: Path) -> Iterator[Any]:
    """Yield one session for all notebooks; what they show must not depend on the time zone."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    import spark_log

    warehouse = {"spark.sql.warehouse.dir": str(directory / "warehouse")}
    with _aside(directory / "spark-output"):
        spark = spark_log.session("notebooks", delta=True, **CONF, **warehouse)
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[None]:
    """Let the JVM that is started meanwhile talk to a file; shown if it does not start."""
    kept = os.dup(2)
    with path.open("wb") as output:
        os.dup2(output.fileno(), 2)
    try:
        yield
    except BaseException:
        os.write(kept, path.read_bytes())
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _run(
    notebook: Notebook, spark: Any, directory: Path, output: Path | None, given: dict[str, str]
) -> bool:
    """Run a notebook and write its page; tell whether all went well."""
    started = time.monotonic()
    place = Place(directory / "packages", CONSTRAINTS if CONSTRAINTS.exists() else None)
    defaults = {"workspace": str(directory / notebook.name)}
    try:
        done = run(notebook, spark, place, given=given, defaults=defaults)
    except CellFailed as failed:
        click.echo(f"FAILED {failed}", err=True)
        return False
    except WidgetError as error:
        click.echo(f"FAILED {notebook.name}: {error}", err=True)
        return False
    written = ""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{notebook.name}.html"
        path.write_text(page.render(notebook, done), encoding="utf-8")
        written = f", {path}"
    slowest = max(done, key=lambda one: one.seconds)
    click.echo(
        f"{notebook.name}: {len(done)} cells, {time.monotonic() - started:.0f} s "
        f"(cell {slowest.cell.number}: {slowest.seconds:.0f} s){written}"
    )
    return True


if __name__ == "__main__":
    main()
