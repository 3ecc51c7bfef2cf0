"""The notebooks, all of them executed; and what their runner does with any notebook."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import broker
from notebooks.runner import CellFailed, Done, NotebookError, Place, WidgetError, read, render, run
from notebooks.runner.magics import statements
from notebooks.runner.outputs import Picture, Table, Text

PROJECT = Path(__file__).parent.parent
NOTEBOOKS = PROJECT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.py"))
# Two minutes on two cores that are free; the first test waits for all of them.
PATIENCE_SECONDS = 900


class Executed:
    """What one run of all notebooks left."""

    def __init__(self, pages: Path, failures: str) -> None:
        self._pages = pages
        self._failures = failures

    def page(self, name: str) -> str:
        """Return the page of a notebook; if a cell failed, fail with its text and number."""
        path = self._pages / f"{name}.html"
        if not path.exists():
            pytest.fail(f"{name} has failed:\n{self._failures}", pytrace=False)
        return path.read_text()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    pages = tmp_path_factory.mktemp("pages")
    # Delta Lake must be loaded when a JVM starts, so this is another one than the tests'.
    done = subprocess.run(
        [sys.executable, "-m", "notebooks.runner", "--output", str(pages)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return Executed(pages, done.stdout + done.stderr)


@pytest.mark.spark
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_to_its_end(executed: Executed, name: str) -> None:
    page = executed.page(name)
    assert "Traceback (most recent call last)" not in page
    assert page.count('<div class="output">') > 5


@pytest.mark.spark
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_bad_orders_are_dead_letters_with_their_reason(executed: Executed) -> None:
    page = executed.page("03_etl")
    for reason in (
        "not a JSON object",
        "unknown field currency",
        "missing or unusable: amount",
        "missing or unusable: at",
        "negative amount",
    ):
        assert f"<td>{reason}</td>" in page


def test_all_subjects_are_there() -> None:
    assert NAMES == [
        "01_first_steps",
        "02_exactly_once",
        "03_etl",
        "04_event_sourcing",
        "05_clickstream",
        "06_operating",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_in_docs_is_of_the_notebook_as_it_is(name: str) -> None:
    pages = PROJECT / "docs" / "notebooks"
    page = (pages / f"{name}.html").read_text()
    notebook = read(NOTEBOOKS / f"{name}.py")
    bare = render(notebook, [Done(cell, (), 0) for cell in notebook.cells])
    sections = re.findall(r"<section.*?</section>", bare, re.DOTALL)
    assert len(sections) == len(notebook.cells)
    for section in sections:
        is_there = section.removesuffix("</section>") in page
        assert is_there, f"{name}.html is old: run `make notebooks`\n{section}"
    assert "Traceback (most recent call last)" not in page
    assert f'href="{name}.html"' in (pages / "index.html").read_text()


# Logs and topics that are not as a notebook expects them.


def run_in(tmp_path: Path, *cells: str, spark: Any = None, **given: str) -> list[Done]:
    """Run a notebook of these cells."""
    path = tmp_path / "notebook.py"
    separator = "\n\n# COMMAND ----------\n\n"
    path.write_text("# Databricks notebook source\n" + separator.join(cells) + "\n")
    return run(read(path), spark, Place(tmp_path / "packages"), given=given)


def outputs_of(tmp_path: Path, *cells: str, **options: Any) -> list[Any]:
    return [output for done in run_in(tmp_path, *cells, **options) for output in done.outputs]


SETUP = f"# MAGIC %run {NOTEBOOKS / 'setup'}"


@pytest.mark.spark
def test_a_log_that_does_not_exist_is_one_line(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(CellFailed) as failed:
        run_in(tmp_path, SETUP, spark=spark, log=str(tmp_path / "nowhere"))
    assert failed.value.line.startswith("setup, cell 4: LogNotFound: ")
    assert str(tmp_path / "nowhere") in failed.value.line
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.spark
def test_an_empty_topic_is_one_line(spark: Any, log: broker.Log, tmp_path: Path) -> None:
    log.create_topic("orders")
    with pytest.raises(CellFailed) as failed:
        run_in(tmp_path, SETUP, 'require_records("orders")', spark=spark, log=log.root)
    assert failed.value.line == (
        f"notebook, cell 2: ValueError: topic 'orders' of {log.root} is empty: produce to it first"
    )


@pytest.mark.spark
def test_an_error_that_spark_has_wrapped_is_one_line(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    cell = f'spark.read.format("log").option("subscribe", "none").load("{log.root}").count()'
    with pytest.raises(CellFailed) as failed:
        run_in(tmp_path, cell, spark=spark)
    assert failed.value.line.startswith("notebook, cell 1: UnknownTopic: ")
    assert "\n" not in failed.value.line


@pytest.mark.spark
def test_no_orders_to_load_is_one_line(spark: Any, tmp_path: Path) -> None:
    notebook = read(NOTEBOOKS / "03_etl.py")
    empty = tmp_path / "empty"
    empty.mkdir()
    given = {"orders": str(empty), "workspace": str(tmp_path / "workspace")}
    with pytest.raises(CellFailed, match="there are no .*json files in .*: nothing to load"):
        run(notebook, spark, Place(tmp_path / "packages"), given=given)


# What the runner does with any notebook.


def test_a_cell_that_fails_is_told_with_its_number_its_text_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(CellFailed) as failed:
        run_in(tmp_path, "# MAGIC %md\n# MAGIC # Title", "one = 1", "two = one\ntwo / 0")
    text = str(failed.value)
    assert text.startswith("notebook, cell 3: ZeroDivisionError: division by zero\n    two = one\n")
    assert f'File "{tmp_path / "notebook.py"}", line 12' in text
    assert "two / 0" in text


def test_cells_after_one_that_failed_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(CellFailed):
        run_in(tmp_path, "1 / 0", f"open({str(mark)!r}, 'w')")
    assert not mark.exists()


def test_prints_the_last_expression_and_what_is_displayed_stand_in_order(tmp_path: Path) -> None:
    found = outputs_of(
        tmp_path, "print('a')\ndisplay([{'x': 1, 'y': b'k'}])\nprint('b')\n'last'", "None", "x = 5"
    )
    assert found == [
        Text("a"),
        Table(("x", "y"), (("1", "k"),), (True, False)),
        Text("b"),
        Text("last"),
    ]


def test_a_figure_is_shown_once_however_it_is_shown(tmp_path: Path) -> None:
    make = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot([1, 2]);"
    for end in ("display(figure)", "figure", "plt.show()", "pass"):
        found = outputs_of(tmp_path, f"{make}\n{end}")
        assert len(found) == 1, end
        assert isinstance(found[0], Picture)
        assert found[0].svg.startswith("<svg")


def test_a_pandas_frame_is_a_table_and_says_what_it_leaves_off(tmp_path: Path) -> None:
    (found,) = outputs_of(tmp_path, "import pandas as pd\npd.DataFrame({'n': range(1000)})")
    assert isinstance(found, Table)
    assert len(found.rows) == 40
    assert found.note == "the first 40 rows"


@pytest.mark.spark
def test_sql_cells_take_widgets_and_show_the_last_statement(spark: Any, tmp_path: Path) -> None:
    sql = "# MAGIC %sql\n# MAGIC SELECT 'a;b' AS no;\n# MAGIC SELECT :least + 1 AS n -- why; not\n"
    (found,) = outputs_of(tmp_path, "dbutils.widgets.text('least', '4')", sql, spark=spark)
    assert found == Table(("n",), (("5",),), (True,))


def test_semicolons_in_quotes_and_comments_end_no_statement() -> None:
    text = "SELECT ';' /* ; */, \"a;\" -- ;\n; ; SELECT `x;y`; -- the end;"
    assert statements(text) == ["SELECT ';' /* ; */, \"a;\" -- ;", "SELECT `x;y`"]


def test_run_shares_the_names_of_another_notebook(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("# Databricks notebook source\nshared = 7\nprint('ran')\n")
    assert outputs_of(tmp_path, "# MAGIC %run ./other", "shared + 1") == [Text("ran"), Text("8")]


def test_a_failure_in_a_notebook_that_is_run_names_that_one(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("# Databricks notebook source\nraise ValueError('no')\n")
    with pytest.raises(CellFailed, match=r"^other, cell 1: ValueError: no"):
        run_in(tmp_path, "# MAGIC %run ./other")


def test_a_notebook_that_runs_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CellFailed, match="runs itself"):
        run_in(tmp_path, "# MAGIC %run ./notebook")


def test_widgets_have_defaults_and_take_what_is_given(tmp_path: Path) -> None:
    cells = [
        "dbutils.widgets.text('root', '/a'); dbutils.widgets.dropdown('mode', 'x', ['x', 'y'])",
        "print(dbutils.widgets.getAll()); dbutils.widgets.remove('mode')",
        "print(dbutils.widgets.getAll())",
    ]
    found = outputs_of(tmp_path, *cells, mode="y")
    assert found == [Text("{'root': '/a', 'mode': 'y'}"), Text("{'root': '/a'}")]
    with pytest.raises(CellFailed, match=r"does not take 'z'; it takes \['x', 'y'\]"):
        run_in(tmp_path, *cells, mode="z")
    with pytest.raises(WidgetError, match="no widget 'rot'; did you mean 'root'"):
        run_in(tmp_path, *cells, rot="/b")
    with pytest.raises(CellFailed, match="no widget 'rood'; did you mean 'root'"):
        run_in(tmp_path, cells[0], "dbutils.widgets.get('rood')")


def test_what_is_missing_of_dbutils_says_so(tmp_path: Path) -> None:
    with pytest.raises(CellFailed, match=r"dbutils\.fs is not there: this runner knows"):
        run_in(tmp_path, "dbutils.fs.ls('/')")


def test_exit_ends_a_notebook_without_a_failure(tmp_path: Path) -> None:
    done = run_in(tmp_path, "1", "dbutils.notebook.exit('enough')", "1 / 0")
    assert [one.cell.number for one in done] == [1]


def test_pip_leaves_what_is_there_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    (found,) = outputs_of(tmp_path, f'# MAGIC %pip install -q click "{PROJECT}[table]"')
    assert found.text.startswith("click 8")
    assert found.text.endswith("spark-log 0.1.0 is installed")
    assert not (tmp_path / "packages").exists()
    for wrong, reason in (
        ("uninstall click", "only '%pip install PACKAGE...' is known here"),
        ("install --user click", "option --user is not known here"),
        ("install ===", "Expected package name"),
    ):
        with pytest.raises(CellFailed, match=reason):
            run_in(tmp_path, f"# MAGIC %pip {wrong}")


def test_pip_installs_what_is_missing_for_this_run_only(tmp_path: Path) -> None:
    wheel = tmp_path / "nb_probe-3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nb_probe.py", "answer = 42\n")
        about = "nb_probe-3.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: nb-probe\nVersion: 3\n")
        tags = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        archive.writestr(f"{about}/RECORD", "")
    install = f"# MAGIC %pip install {wheel}"
    before = list(sys.path)
    try:
        assert outputs_of(tmp_path, install, "import nb_probe; nb_probe.answer")[-1] == Text("42")
    finally:
        sys.path[:] = before
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("nb-probe")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print(1)\n", "is no notebook: its first line is not"),
        ("# Databricks notebook source\n# MAGIC %scala\n# MAGIC 1\n", "'%scala' is not a magic"),
        ("# Databricks notebook source\n# MAGIC %md\nx = 1\n", "stands between lines of # MAGIC"),
    ],
)
def test_what_is_no_notebook_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(NotebookError, match=reason):
        read(path)


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(NotebookError, match="did you mean 03_etl"):
        read(NOTEBOOKS / "03_elt.py")


def test_a_page_shows_text_tables_and_titles_as_they_are(tmp_path: Path) -> None:
    cells = [
        "# MAGIC %md\n# MAGIC # A <title>\n# MAGIC | a | b |\n# MAGIC |---|---|\n# MAGIC | 1 | 2 |",
        "# DBTITLE 1,Counting\ndisplay([{'x': '<b>', 'n': None}])",
    ]
    done = run_in(tmp_path, *cells)
    page = render(read(tmp_path / "notebook.py"), done)
    assert "<title>A &lt;title&gt;</title>" in page
    assert '<td>&lt;b&gt;</td><td class="null">null</td>' in page
    assert "Counting" in page
    assert "<th>a</th>" in page
