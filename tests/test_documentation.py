"""README and docs: every block of code runs and prints what is printed below it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import broker
from spark_log.options import READ_OPTIONS, WRITE_OPTIONS, ReadOptions

PROJECT = Path(__file__).parent.parent
PAGES = [
    PROJECT / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
    *sorted(PROJECT.glob("*/README.md")),
]
# What a block is, by the words after its fence. All of these are held to something by a test.
RUN = ("python", "sql", "bash")
OUTPUT = "output"
OTHERS = ("python kafka", "python hdfs", "tree", "hex commit")
# Set-up and tests do not run inside a test: of these two commands is shown what they would do.
PROLOGUE = """
set -euo pipefail
pip() { "$PYTHON" -m pip --disable-pip-version-check "$@" --quiet --dry-run --no-deps \
        --no-build-isolation; }
make() { command make --dry-run "$@" >/dev/null; }
"""
PATIENCE_SECONDS = 280


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Token]:
    return [token for token in tokens(page) if token.type in ("fence", "code_block")]


def name_of(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    for page in PAGES:
        before = ""
        for block in blocks(page):
            kind = block.info.strip()
            assert kind in (*RUN, OUTPUT, *OTHERS), f"{name_of(page)}: a block of kind {kind!r}"
            assert kind != OUTPUT or before in RUN, f"{name_of(page)}: output of no code"
            before = kind


# Running them.


class Reader:
    """Somebody who types what a page says, block by block, with /tmp as a place of its own."""

    def __init__(self, spark: Any, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def type(self, kind: str, text: str) -> str:
        """Run a block and return what it prints."""
        text = text.replace("/tmp/", f"{self._directory}/")
        return {"python": self._python, "sql": self._sql, "bash": self._bash}[kind](text)

    def _python(self, text: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, "block", "exec"), self._names)
        return printed.getvalue()

    def _sql(self, text: str) -> str:
        for statement in text.split(";"):
            if statement.strip():
                self._spark.sql(statement).collect()
        return ""

    def _bash(self, text: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", PROLOGUE + text],
            cwd=PROJECT,
            env=os.environ | {"PYTHON": sys.executable, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def reader(spark: Any, tmp_path: Path) -> Iterator[Reader]:
    yield Reader(spark, tmp_path)
    for view in spark.catalog.listTables():
        if view.isTemporary:
            spark.catalog.dropTempView(view.name)


@pytest.mark.spark
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_a_page_runs_from_top_to_bottom(
    reader: Reader, page: Path, request: pytest.FixtureRequest
) -> None:
    printed = ""
    for block in blocks(page):
        kind = block.info.strip()
        assert block.map is not None
        where = f"{name_of(page)}, line {block.map[0] + 1}"
        text = block.content
        if kind == "python hdfs":
            # What `make hdfs` starts, at the address that it prints.
            cluster = request.getfixturevalue("hdfs_cluster")
            kind, text = "python", text.replace("hdfs://127.0.0.1:8020", cluster.address)
        if kind in RUN:
            try:
                printed = reader.type(kind, text)
            except Exception as error:
                raise AssertionError(f"{where}: {error}\n{block.content}") from error
        elif kind == OUTPUT:
            assert printed == block.content, f"{where}: it prints something else"
        elif kind == "python kafka":
            compile(block.content, where, "exec")


# What else can be held to the code.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for token in tokens(page):
        for child in token.children or []:
            target = str(child.attrs.get("href", "")).split("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


def test_the_readme_names_what_make_can_do() -> None:
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)", (PROJECT / "README.md").read_text()))
    assert {"demo", "test", "notebooks"} <= named <= targets


def rows_of(page: Path, heading: str) -> list[tuple[list[str], str]]:
    """Return the names in the first column of a table, and the text of the second."""
    text = page.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", first), second.strip()) for first, second in cells]


def test_the_way_from_the_connector_names_every_option_as_it_is() -> None:
    page = PROJECT / "docs" / "MIGRATION.md"
    text = page.read_text()
    for option in (*READ_OPTIONS, *WRITE_OPTIONS):
        assert f"`{option}`" in text, f"{option} is missing"
    for heading, known in (
        ("Options of a read", READ_OPTIONS),
        ("Options of a write", (*WRITE_OPTIONS, "kafka.compression.type")),
    ):
        for names, what in rows_of(page, heading):
            for name in names:
                if what.startswith("the same"):
                    assert name in known, name
                elif what.startswith("ignored"):
                    ReadOptions.parse({"path": "/log", "subscribe": "orders", name: "1"})
                else:
                    assert name not in known, name


def patterns(tree: str) -> list[str]:
    """Return a regular expression for each file, or place of files, in the listing of a log."""
    lines = [
        (len(line) - len(line.lstrip()), line.strip().split("  ")[0]) for line in tree.splitlines()
    ]
    found = []
    above: list[tuple[int, str]] = []
    for (depth, name), (next_depth, _) in zip(lines[1:], [*lines[2:], (0, "")], strict=True):
        above = [one for one in above if one[0] < depth]
        path = re.sub("<[^>]*>", "*", "".join([*(one[1] for one in above), name]))
        pattern = re.escape(path).replace(r"\*", "[^/]+")
        if next_depth > depth:
            above.append((depth, name))
        else:
            found.append(f"{pattern}.*" if name.endswith("/") else pattern)
    return found


def test_the_protocol_names_every_file_of_a_log(log: broker.Log, root: Path) -> None:
    config = {"segment.bytes": 1000, "checkpoint.commits": 2}
    for topic in ("orders", "gone"):
        log.create_topic(topic, partitions=2, config=config)
        for number in range(20):
            with log.producer() as producer:
                producer.send(topic, b"x" * 300, key=b"%d" % number)
    log.maintain("orders", seal=True)
    log.delete_topic("gone")
    (tree,) = [
        block.content
        for block in blocks(PROJECT / "docs" / "PROTOCOL.md")
        if block.info.strip() == "tree"
    ]
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert len(files) > 20
    for file in files:
        assert any(re.fullmatch(pattern, file) for pattern in patterns(tree)), (
            f"{file} is not in the page"
        )
