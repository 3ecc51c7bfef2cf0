"""Files into a topic: what becomes of rows, what is loaded once, what is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import broker
from broker.cli.jobs import Meter
from pipelines.failure import JobFailed
from pipelines.load import Load, Loaded, load
from pipelines.plan import TOPIC as PLANS
from pipelines.plan import LoadRefused
from pipelines.rows import RowFormat

pytestmark = pytest.mark.spark

COMMAND = [sys.executable, "-m", "pipelines", "load"]
# Spark starts in ten seconds; on a busy machine it takes minutes.
PATIENCE_SECONDS = 280
TABLE = pa.table(
    {
        "id": pa.array([1, 2, 3]),
        "name": pa.array(["a", None, "ü"]),
        "at": pa.array([1_000, 2_000, 3_000], pa.timestamp("ms", tz="UTC")),
    }
)


@pytest.fixture
def files(tmp_path: Path, log: broker.Log) -> Path:
    """A directory for files; the topic `t` is there."""
    log.create_topic("t", partitions=2)
    directory = tmp_path / "files [1] {a}"
    directory.mkdir()
    return directory


def run(spark: Any, log: broker.Log, files: Path, format_: str, **options: Any) -> Loaded:
    rows = {
        name: options.pop(name)
        for name in ("key", "timestamp", "value", "has_file_header")
        if name in options
    }
    return load(spark, log, Load(str(files), "t", RowFormat(format_, **rows), **options))


def records(log: broker.Log, topic: str = "t") -> list[Any]:
    with log.consumer(topic, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return sorted(consumer, key=lambda record: record.value)


def values(log: broker.Log) -> list[bytes]:
    return [record.value for record in records(log)]


# What becomes of rows.


def test_rows_of_parquet_are_json_or_a_column(spark: Any, log: broker.Log, files: Path) -> None:
    pa.parquet.write_table(TABLE, files / "a.parquet")
    done = run(spark, log, files, "parquet", key="id", timestamp="at")
    assert done == Loaded(record_count=3, file_count=1, known_file_count=0, chunk_count=1)
    found = records(log)
    assert [json.loads(one.value) for one in found] == [
        {"id": 1, "name": "a", "at": "1970-01-01T00:00:01.000Z"},
        {"id": 2, "name": None, "at": "1970-01-01T00:00:02.000Z"},
        {"id": 3, "name": "ü", "at": "1970-01-01T00:00:03.000Z"},
    ]
    assert [one.key for one in found] == [b"1", b"2", b"3"]
    assert [one.timestamp for one in found] == [1000, 2000, 3000]
    log.create_topic("names")
    names = Load(str(files), "names", RowFormat("parquet", value="name", has_file_header=True))
    load(spark, log, names)
    with log.consumer("names", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        found = list(consumer)
    assert [one.value for one in found] == [b"a", None, "ü".encode()]
    assert {tuple(one.headers) for one in found} == {(("file", b"a.parquet"),)}


def test_rows_of_csv_are_json_packed_files_too(spark: Any, log: broker.Log, files: Path) -> None:
    (files / "a.csv").write_text('id,text,ms\n1,"x, y",1700000000000\n')
    (files / "deep").mkdir()
    with gzip.open(files / "deep" / "b.csv.gz", "wt") as file:
        file.write("id,text,ms\n2,,2023-11-14T22:13:20Z\n")
    (files / "c.txt").write_text("not for this load")
    assert run(spark, log, files, "csv", key="id", timestamp="ms").file_count == 2
    found = records(log)
    assert [json.loads(one.value) for one in found] == [
        {"id": "1", "text": "x, y", "ms": "1700000000000"},
        {"id": "2", "text": None, "ms": "2023-11-14T22:13:20Z"},
    ]
    assert {one.timestamp for one in found} == {1_700_000_000_000}


def test_lines_of_json_stay_as_they_are(spark: Any, log: broker.Log, files: Path) -> None:
    lines = ['{"id": 1,  "at": 5}', '{"at":"1970-01-01T00:00:00.007Z","id":{"a":2}}']
    (files / "a.jsonl").write_text(lines[0] + "\n\n" + lines[1] + "\n")
    run(spark, log, files, "json", key="id", timestamp="at")
    found = sorted(records(log), key=lambda record: record.timestamp)
    assert [one.value.decode() for one in found] == lines
    assert [(one.key, one.timestamp) for one in found] == [(b"1", 5), (b'{"a":2}', 7)]


# What is loaded once.


def test_a_file_is_loaded_once_and_new_ones_are_added(
    spark: Any, log: broker.Log, files: Path
) -> None:
    for name in "bc":
        (files / f"{name}.log").write_text(f"{name}1\n{name}2\n")
    options = {"chunk_bytes": 6}
    assert run(spark, log, files, "text", **options).chunk_count == 2
    again = run(spark, log, files, "text", **options)
    assert again == Loaded(record_count=0, file_count=0, known_file_count=2, chunk_count=0)
    # One that sorts before the others must not move them into other chunks.
    (files / "a.log").write_text("a1\n")
    (files / "b.log").unlink()
    assert run(spark, log, files, "text", **options).file_count == 1
    assert values(log) == [b"a1", b"b1", b"b2", b"c1", b"c2"]
    assert len(records(log, PLANS)) == 3


def test_another_name_or_a_topic_made_again_is_another_load(
    spark: Any, log: broker.Log, files: Path
) -> None:
    (files / "a.log").write_text("a\n")
    for name in (None, None, "other", "other"):
        run(spark, log, files, "text", name=name)
    assert values(log) == [b"a", b"a"]
    log.delete_topic("t")
    assert run(spark, log, files, "text", partitions=3).record_count == 1
    assert values(log) == [b"a"]
    assert len(log.describe_topic("t").partitions) == 3


def test_a_chunk_that_fails_adds_nothing_and_is_loaded_when_it_is_mended(
    spark: Any, log: broker.Log, files: Path
) -> None:
    (files / "a.json").write_text('{"a": 1}\n')
    (files / "b.json").write_text('{"a": 2}\n{"a": \n')
    with pytest.raises(JobFailed) as caught:
        run(spark, log, files, "json", chunk_bytes=1)
    assert '/b.json: not a JSON object: {"a":' in str(caught.value)
    assert values(log) == [b'{"a": 1}']
    (files / "b.json").write_text('{"a": 2}\n{"a": 3}\n')
    done = run(spark, log, files, "json", chunk_bytes=1)
    assert (done.record_count, done.known_file_count) == (2, 1)
    assert values(log) == [b'{"a": 1}', b'{"a": 2}', b'{"a": 3}']


def test_a_bar_shows_on_a_terminal_how_much_of_the_files_is_loaded(
    spark: Any, log: broker.Log, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (files / f"{number}.json").write_text('{"a": 1}\n' * 1000)
    main, other = pty.openpty()
    parts: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(main, parts))
    reader.start()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Meter() as meter:
            wanted = Load(str(files), "t", RowFormat("json"), chunk_bytes=9000)
            load(spark, log, wanted, meter.show)
    reader.join()
    shown = b"".join(parts).decode(errors="replace")
    assert "loading" in shown and "26.4/26.4 KiB" in shown, shown
    assert len(values(log)) == 3000


def read_all(terminal: int, parts: list[bytes]) -> None:
    """Read what a terminal is to show, until its last user has closed it."""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 1 << 16):
            parts.append(data)
    os.close(terminal)


def test_a_bar_is_not_shown_in_a_file(
    spark: Any, log: broker.Log, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "a.json").write_text('{"a": 1}\n')
    with Meter() as meter:
        load(spark, log, Load(str(files), "t", RowFormat("json")), meter.show)
    assert "loading" not in capsys.readouterr().err


# What is refused.


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.csv", "id,at\n1,2\n", {"key": "idd"}, "unknown key column 'idd'; did you mean 'id'?"),
        ("a.csv", "id,at\n1,soon\n", {"timestamp": "at"}, "/a.csv: not a time: soon"),
        ("a.csv", "id,at\n1,\n", {"timestamp": "at"}, "/a.csv: not a time: null"),
        ("a.csv", "id,at\n1,2,3\n", {}, "Malformed"),
        ("a.json", '{"id": 1}\n', {"key": "ib"}, "/a.json: a line has no field 'ib': {"),
        ("a.json", "[1]\n", {}, "/a.json: not a JSON object: [1]"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(
    spark: Any, log: broker.Log, files: Path, name: str, text: str, options: Any, message: str
) -> None:
    (files / name).write_text(text)
    with pytest.raises(broker.LogError) as caught:
        run(spark, log, files, name.split(".")[1], **options)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert values(log) == []


def test_a_changed_schema_is_refused_where_rows_would_be_wrong(
    spark: Any, log: broker.Log, files: Path
) -> None:
    (files / "a.csv").write_text("id,name\n1,x\n")
    (files / "b.csv").write_text("name,id\nx,1\n")
    with pytest.raises(JobFailed, match="CSV header does not conform"):
        run(spark, log, files, "csv")
    pa.parquet.write_table(TABLE, files / "a.parquet")
    pa.parquet.write_table(pa.table({"id": ["x"]}), files / "b.parquet")
    with pytest.raises(JobFailed, match="(?i)merge"):
        run(spark, log, files, "parquet", name="other")
    assert values(log) == []


def test_a_load_that_is_not_the_same_is_refused(spark: Any, log: broker.Log, files: Path) -> None:
    with pytest.raises(LoadRefused, match="holds no files of format csv"):
        run(spark, log, files, "csv")
    with pytest.raises(JobFailed, match="(?i)cannot list .*none.*"):
        run(spark, log, files / "none", "csv")
    (files / "a.csv").write_text("id\n1\n")
    run(spark, log, files, "csv", key="id")
    with pytest.raises(LoadRefused, match="begun with key='id', not None"):
        run(spark, log, files, "csv")
    (files / "a.csv").write_text("id\n1\n2\n")
    with pytest.raises(LoadRefused, match="a.csv has changed since it was loaded"):
        run(spark, log, files, "csv", key="id")
    with pytest.raises(broker.UnknownTopic):
        load(spark, log, Load(str(files), "none", RowFormat("csv")))
    with pytest.raises(broker.InvalidOption, match="did you mean 'csv'"):
        RowFormat("cvs")
    with pytest.raises(broker.InvalidOption, match="lines of text have no columns"):
        RowFormat("text", key="id")
    assert len(values(log)) == 1


# Killed at any moment.


@pytest.mark.timeout(900)
def test_a_load_that_is_killed_goes_on_where_it_was(log: broker.Log, files: Path) -> None:
    kill_and_check(log, files, row_count=60_000, file_count=20, kill_count=1, chunk_files=2)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_five_million_records_killed_twice_are_all_there_once(log: broker.Log, files: Path) -> None:
    kill_and_check(log, files, row_count=5_000_000, file_count=40, kill_count=2, chunk_files=4)


def kill_and_check(
    log: broker.Log, files: Path, *, row_count: int, file_count: int, kill_count: int,
    chunk_files: int,
) -> None:  # fmt: skip
    """Kill a load some time after its first commits; let it end; count every number."""
    chance = random.Random(row_count)
    size = row_count // file_count
    for number in range(file_count):
        ids = np.arange(number * size, (number + 1) * size)
        table = pa.table({"id": ids, "text": pa.array(ids).cast("string")})
        write = (pa.parquet.write_table, pa.csv.write_csv)[row_count < 1_000_000]
        write(table, files / f"{number:03}.{'csv' if row_count < 1_000_000 else 'parquet'}")
    paths = sorted(files.iterdir())
    options = [
        "--log", log.root, "--format", paths[0].suffix[1:], "--key", "id", "--value", "text",
        "--chunk-bytes", str(chunk_files * paths[-1].stat().st_size), "--json",
        "--spark", "spark.master=local[2]",
    ]  # fmt: skip
    command = [*COMMAND, str(files), "t", *options]
    for _ in range(kill_count):
        kill_in_a_chunk(log, command, chance)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["files"] + report["files_loaded_before"] == file_count
    assert report["files_loaded_before"] > 0
    counts = np.zeros(row_count, np.int64)
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        while batches := consumer.poll_batches(timeout_ms=0):
            for batch in batches.values():
                ids = pa.compute.cast(batch.column("value").cast("string"), pa.int64()).to_numpy()
                np.add.at(counts, ids, 1)
                assert batch.column("key").equals(batch.column("value"))
    assert Counter(counts.tolist()) == {1: row_count}
    assert log.verify("t").is_sound


def kill_in_a_chunk(log: broker.Log, command: list[str], chance: random.Random) -> None:
    before = log.describe_topic("t").record_count
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while log.describe_topic("t").record_count == before:
            assert process.poll() is None, "the load ended"
            assert time.monotonic() < end, "the load does nothing"
            time.sleep(0.01)
        time.sleep(chance.random() * 0.5)
        assert process.poll() is None, "the load ended"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
