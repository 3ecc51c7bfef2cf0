"""The ETL job: bronze to silver and dead letters, silver to gold, each by a query of its own.

A query's place is in its checkpoint. What it writes is written once: to topics by query id and
batch id (the sink of `format("log")`), to gold by the same pair in Delta's own record. So the job
may be killed anywhere and started again, and goes on as if nothing had been.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import broker
from broker import LogError
from pipelines import orders
from pipelines.config import EtlConfig
from pipelines.gold import GoldTable
from pipelines.load import Load, Progress, load
from pipelines.paths import exists
from pipelines.rows import TEXT, RowFormat
from pipelines.session import running
from pipelines.step import Step

# Steps, and the names of their checkpoints.
SILVER, DEAD_LETTER, GOLD = "silver", "dead-letter", "gold"
_POLL_SECONDS = 0.2


class EtlRefused(LogError):
    """The job would do something wrong, or nothing at all."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run has done: records read and written, orders that came too late."""

    loaded: int
    read: int
    silver: int
    dead_letters: int
    too_late: int


def run(config: EtlConfig, progress: Progress = lambda done, total: None) -> Report:
    """Take everything that is there now through all steps, and end.

    Args:
        progress: told how many bytes of new files are loaded, of how many.
    """
    log = _open(config)
    _check_input(log, config, is_continuous=False)
    with running("etl", _settings(config), delta=True) as spark:
        return _run(spark, log, config, progress)


def _run(spark: SparkSession, log: broker.Log, config: EtlConfig, progress: Progress) -> Report:
    loaded = _load(spark, log, config, progress)
    if not _written(log, config.bronze):
        raise EtlRefused(
            f"topic {config.bronze!r} of {log.root} is empty: produce to it first, or set `input` "
            "to a directory of JSON lines"
        )
    job = _Job(spark, log, config, {"availableNow": True})
    before = _ends(log, config)
    silver, dead_letter = job.start_silver(), job.start_dead_letter()
    silver.finish()
    dead_letter.finish()
    job.start_gold().finish()
    after = _ends(log, config)
    return Report(
        loaded=loaded,
        read=silver.read_count,
        silver=after[0] - before[0],
        dead_letters=after[1] - before[1],
        too_late=silver.late_count,
    )


def follow(config: EtlConfig, is_ready: Callable[[], None] = lambda: None) -> None:
    """Run all steps until SIGINT or SIGTERM; each then ends after the batch it is in.

    Args:
        is_ready: called when all queries run.
    """
    log = _open(config)
    _check_input(log, config, is_continuous=True)
    with running("etl", _settings(config), delta=True) as spark:
        _follow(spark, log, config, is_ready)


def _follow(
    spark: SparkSession, log: broker.Log, config: EtlConfig, is_ready: Callable[[], None]
) -> None:
    stopped = threading.Event()
    # Spark has handlers of its own by now, which would end the driver under the queries.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    _load(spark, log, config, lambda done, total: None)
    job = _Job(spark, log, config, {"processingTime": config.interval})
    steps = [job.start_silver(), job.start_dead_letter(), job.start_gold()]
    is_ready()
    while not stopped.wait(_POLL_SECONDS) and all([step.is_running() for step in steps]):
        pass
    for step in steps:
        step.stop()
    for step in steps:
        step.finish()


class _Job:
    """The queries of one run."""

    def __init__(
        self, spark: SparkSession, log: broker.Log, config: EtlConfig, trigger: dict[str, Any]
    ) -> None:
        self._spark = spark
        self._root = log.root
        self._config = config
        self._trigger = trigger
        self._gold = GoldTable(config.gold, window=config.window)
        for topic in (config.silver, config.dead_letter):
            if topic not in log.topics():
                log.create_topic(topic, config.partitions)
        for step, topic in ((SILVER, config.silver), (DEAD_LETTER, config.dead_letter)):
            self._check_checkpoint(log, step, topic)

    def start_silver(self) -> Step:
        return Step(SILVER, lambda: self._to_topic(SILVER, self._orders(), self._config.silver))

    def start_dead_letter(self) -> Step:
        topic = self._config.dead_letter
        return Step(DEAD_LETTER, lambda: self._to_topic(DEAD_LETTER, self._rejected(), topic))

    def start_gold(self) -> Step:
        return Step(GOLD, self._to_gold)

    def _orders(self) -> DataFrame:
        parsed = orders.parse(self._stream(self._config.bronze))
        return orders.valid(parsed, self._config.late)

    def _rejected(self) -> DataFrame:
        return orders.rejected(orders.parse(self._stream(self._config.bronze)))

    def _to_gold(self) -> Any:
        silver = self._stream(self._config.silver)
        return self._writer(GOLD, silver).foreachBatch(self._gold.add).start()

    def _stream(self, topic: str) -> DataFrame:
        return (
            self._spark.readStream.format("log")
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("includeHeaders", "true")
            .option("maxOffsetsPerTrigger", self._config.records_per_batch)
            .load(self._root)
        )

    def _to_topic(self, step: str, result: DataFrame, topic: str) -> Any:
        writer = self._writer(step, result).format("log").option("topic", topic)
        return writer.start(self._root)

    def _writer(self, step: str, result: DataFrame) -> Any:
        return (
            result.writeStream.queryName(step)
            .option("checkpointLocation", self._config.checkpoint(step))
            .trigger(**self._trigger)
        )

    def _check_checkpoint(self, log: broker.Log, step: str, topic: str) -> None:
        """Refuse to begin anew what has been written already: all of it would be there twice."""
        if not _written(log, topic):
            return
        if not exists(self._spark, f"{self._config.checkpoint(step)}/metadata"):
            raise EtlRefused(
                f"topic {topic!r} has records, but there is no checkpoint of the query that wrote "
                f"them in {self._config.checkpoint(step)}: use that checkpoint, or another topic"
            )


def _open(config: EtlConfig) -> broker.Log:
    return broker.open(config.log, create=False)


def _check_input(log: broker.Log, config: EtlConfig, *, is_continuous: bool) -> None:
    """Find out what can be found out before Spark is started."""
    if config.input:
        return
    if not _written(log, config.bronze) and not is_continuous:
        raise EtlRefused(
            f"topic {config.bronze!r} of {log.root} is empty: produce to it first, or set `input` "
            "to a directory of JSON lines"
        )


def _settings(config: EtlConfig) -> dict[str, str]:
    return {
        # The tasks of the state, fixed by the first run.
        "spark.sql.shuffle.partitions": str(config.partitions),
        # A run ends with all its batches in its report.
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        **config.spark,
        # Hours of one table must not change with where the job runs.
        "spark.sql.session.timeZone": "UTC",
    }


def _load(
    spark: SparkSession,
    log: broker.Log,
    config: EtlConfig,
    progress: Progress,
) -> int:
    if not config.input:
        return 0
    job = Load(
        directory=config.input,
        topic=config.bronze,
        rows=RowFormat(TEXT, has_file_header=True),
        partitions=config.partitions,
    )
    return load(spark, log, job, progress).record_count


def _ends(log: broker.Log, config: EtlConfig) -> list[int]:
    topics = (config.silver, config.dead_letter)
    return [_written(log, topic) for topic in topics]


def _written(log: broker.Log, topic: str) -> int:
    """Return how many records a topic has ever had."""
    return sum(partition.end_offset for partition in log.describe_topic(topic).partitions)
