"""Load a directory of files into a topic, by Spark, each file once.

The files become chunks (`plan.py`), and each chunk is one job of Spark and one commit of the log,
under the load's name and the chunk's number. Within a chunk, Spark's tasks read parts of files and
stage records at the same time. A load that is killed goes on with the first chunk that is not
committed; one that comes again adds nothing but the files that are new.

Order is kept within a file. Chunks come in the order of their files' names, the files of one chunk
in any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

import broker
from pipelines.failure import explain
from pipelines.paths import qualified
from pipelines.plan import Chunk, LoadRefused, make_plan
from pipelines.rows import RowFormat, find_files, read_records
from pipelines.session import running

CHUNK_BYTES = 256 << 20
# Told how many bytes are done, of how many.
Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What is loaded where.

    Attributes:
        name: under which the load is known; by default, the directory.
        partitions: of a topic that is not there yet; None: it must be there.
        chunk_bytes: of files that are loaded by one commit, about.
    """

    directory: str
    topic: str
    rows: RowFormat
    name: str | None = None
    partitions: int | None = None
    compression: str = "none"
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run of a load has done, and how many files were there from earlier runs."""

    record_count: int
    file_count: int
    known_file_count: int
    chunk_count: int


def run(
    log: broker.Log,
    wanted: Load,
    settings: Mapping[str, str],
    progress: Progress = lambda done, total: None,
) -> Loaded:
    """Load in a session of its own; see `load`."""
    with running("load", settings) as spark:
        return load(spark, log, wanted, progress)


def load(
    spark: SparkSession,
    log: broker.Log,
    wanted: Load,
    progress: Progress = lambda done, total: None,
) -> Loaded:
    """Load what is not loaded yet.

    Raises:
        LoadRefused: there is nothing to load, or a file has changed since it was loaded.
        JobFailed: a file cannot be read; the chunks before it are in the topic.
    """
    with explain(f"cannot list {wanted.directory}"):
        name = wanted.name or qualified(spark, wanted.directory)
        found = find_files(spark, wanted.directory, wanted.rows.format)
    if not found:
        raise LoadRefused(f"{wanted.directory} holds no files of format {wanted.rows.format}")
    _ensure_topic(log, wanted)
    incarnation = log.describe_topic(wanted.topic).incarnation
    application = f"load {name}"
    last = log.transaction_version(wanted.topic, application)
    done = 0 if last is None else last + 1
    chunks = make_plan(
        log,
        f"{wanted.topic}#{incarnation} {name}",
        found,
        rows=wanted.rows.describe(),
        chunk_bytes=wanted.chunk_bytes,
        done=done,
    )
    known, new = chunks[:done], chunks[done:]
    count = 0
    total = sum(chunk.byte_count for chunk in chunks)
    before = total - sum(chunk.byte_count for chunk in new)
    progress(before, total)
    for chunk in new:
        with _Watch(spark, chunk, partial(_tell, progress, before, total)):
            count += _load_chunk(spark, log, wanted, chunk, application)
        before += chunk.byte_count
        progress(before, total)
    return Loaded(
        record_count=count,
        file_count=sum(len(chunk.files) for chunk in new),
        known_file_count=sum(len(chunk.files) for chunk in known),
        chunk_count=len(new),
    )


def _tell(progress: Progress, before: int, total: int, part: float) -> None:
    progress(before + part, total)


def _load_chunk(
    spark: SparkSession, log: broker.Log, wanted: Load, chunk: Chunk, application: str
) -> int:
    counted = Observation()
    with explain(f"{wanted.directory} is not loaded"):
        records = read_records(spark, [file.path for file in chunk.files], wanted.rows)
        (
            records.observe(counted, F.count(F.lit(1)).alias("records"))
            .write.format("log")
            .option("topic", wanted.topic)
            .option("txnAppId", application)
            .option("txnVersion", chunk.number)
            .option("compression", wanted.compression)
            .mode("append")
            .save(log.root)
        )
        return int(counted.get["records"])


def _ensure_topic(log: broker.Log, wanted: Load) -> None:
    if wanted.partitions is not None and wanted.topic not in log.topics():
        with suppress(broker.TopicExists):
            log.create_topic(wanted.topic, wanted.partitions)


class _Watch:
    """Says how far the Spark job of a chunk is, by the tasks that have ended."""

    def __init__(
        self, spark: SparkSession, chunk: Chunk, progress: Callable[[float], None]
    ) -> None:
        self._context = spark.sparkContext
        self._group = f"load-{id(self)}"
        self._bytes = chunk.byte_count
        self._progress = progress
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._context.setJobGroup(self._group, "load a chunk of files")
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        tracker = self._context.statusTracker()
        while not self._is_over.wait(0.5):
            tasks = done = 0
            for job in tracker.getJobIdsForGroup(self._group):
                found = tracker.getJobInfo(job)
                for stage in found.stageIds if found is not None else ():
                    if (info := tracker.getStageInfo(stage)) is not None:
                        tasks += info.numTasks
                        done += info.numCompletedTasks
            if tasks:
                self._progress(self._bytes * done / tasks)
