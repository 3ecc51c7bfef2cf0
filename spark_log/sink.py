"""The sink: tasks stage records, the driver commits them, each batch once.

One commit for each topic makes all records of a batch visible at once. It carries the name and
version of the batch: the query's id and the batch's number, or what the user gave. A batch that
comes again, after whatever failure, is recognised inside that commit and adds nothing. Nothing is
kept on these objects between batches; Spark makes new ones, in other processes, for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import broker
from spark_log.shipping import Shipped
from spark_log.staging import TaskStaging, ensure_topic
from spark_log.write_columns import WriteColumns
from spark_log.write_options import WriteOptions

logger = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Check everything that can be checked before a task runs, and return the batch writer."""
    if overwrite:
        raise broker.InvalidOption(
            "mode 'overwrite' is refused: a log is only ever appended to. Use mode('append'); to "
            "remove records, use delete_records, or delete the topic and create it again"
        )
    return BatchSink(*_check(WriteOptions.parse(options), schema))


def make_stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> StreamSink:
    """Check everything that can be checked before a task runs, and return the stream writer."""
    if overwrite:
        raise broker.InvalidOption(
            "output mode 'complete' is refused: it writes the whole result again in each batch, "
            "and a log keeps all of it. Use output mode 'append', or 'update' with foreachBatch "
            "and the options txnAppId and txnVersion"
        )
    return StreamSink(*_check(WriteOptions.parse(options, is_streaming=True), schema))


def _check(options: WriteOptions, schema: StructType) -> tuple[WriteOptions, WriteColumns]:
    columns = WriteColumns.find(schema, has_topic_option=options.topic is not None)
    log = broker.open(options.path, create=False, storage=options.storage)
    if options.topic is not None:
        ensure_topic(log, options.topic, options)
    return options, columns


class TaskMessage(WriterCommitMessage):
    """What a task tells the driver: what it has staged, and for which query."""

    def __init__(self, query_id: str | None, staged: tuple[broker.Staged, ...]) -> None:
        self.query_id = query_id
        self.staged = staged


Messages = Sequence[WriterCommitMessage | None]


class _Sink(Shipped):
    """What batch and stream have in common."""

    def __init__(self, options: WriteOptions, columns: WriteColumns) -> None:
        self._options = options
        self._columns = columns

    def _stage(self, batches: Iterator[pa.RecordBatch], query_id: str | None) -> TaskMessage:
        staging = TaskStaging(self._options, self._columns)
        try:
            for batch in batches:
                staging.add(batch)
            return TaskMessage(query_id, staging.finish())
        except BaseException:
            staging.discard()
            raise

    def _commit(self, messages: Messages, transaction: tuple[str, int] | None) -> None:
        """Commit each topic; the order is fixed, so that two who do the same meet in it."""
        log = broker.open(self._options.path, create=False, storage=self._options.storage)
        for topic, staged in sorted(_by_topic(messages).items()):
            committed = log.commit_staged(topic, staged, transaction)
            if committed.is_repeated:
                assert transaction is not None
                _report_repeated(committed, *transaction)

    def _discard(self, messages: Messages) -> None:
        """Remove what was staged, if it is certain that no commit names it.

        A message is missing if its task failed, and then the driver did not try to commit. If all
        are there, a commit was tried; its outcome is not known here, so all files stay.
        """
        if None not in messages:
            return
        try:
            log = broker.open(self._options.path, create=False, storage=self._options.storage)
            for topic, staged in _by_topic(messages).items():
                log.discard_staged(topic, staged)
        except broker.LogError as error:
            logger.warning("files of a batch that failed are left as garbage: %s", error)


class BatchSink(_Sink, DataSourceArrowWriter):
    """Writes a DataFrame. Its identity is never guessed: it is what the user gave, or none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        return self._stage(iterator, query_id=None)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, self._options.transaction)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """Writes a streaming query, each micro-batch once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        if query_id is None and self._options.application is None:
            raise broker.InvalidOption(
                "Spark does not tell the id of this query; set the option txnAppId to a name that "
                "stays the same when the query is started again"
            )
        return self._stage(iterator, query_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        query_ids = {message.query_id for message in messages if isinstance(message, TaskMessage)}
        application = self._options.application
        if application is None:
            (application,) = query_ids
        elif batchId == 0:
            self._check_is_first(application, messages)
        assert application is not None
        self._commit(messages, (application, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._discard(messages)

    def _check_is_first(self, application: str, messages: Messages) -> None:
        """Refuse the first batch of a checkpoint if its application is further already.

        This batch, and all up to that version, would be taken for repetitions and dropped. An
        empty one is refused too: the next would be dropped as well. A repetition of the first
        batch itself finds its own version, and is let through.
        """
        log = broker.open(self._options.path, create=False, storage=self._options.storage)
        for topic in sorted({*_by_topic(messages), *filter(None, [self._options.topic])}):
            last = log.transaction_version(topic, application)
            if last is not None and last > 0:
                raise broker.InvalidOption(
                    f"txnAppId={application!r} has written up to batch {last} of topic {topic!r}, "
                    "and this query begins with batch 0: all its batches up to that one would be "
                    "taken for repetitions and dropped. Nothing was written. Start it with the "
                    "checkpointLocation it had, or, with a new one, give it a new txnAppId"
                )


def _by_topic(messages: Messages) -> dict[str, list[broker.Staged]]:
    """Return what was staged for each topic, in the order of the tasks."""
    topics: dict[str, list[broker.Staged]] = {}
    for message in messages:
        if isinstance(message, TaskMessage):
            for staged in message.staged:
                topics.setdefault(staged.topic, []).append(staged)
    return topics


def _report_repeated(committed: broker.Committed, application: str, version: int) -> None:
    assert committed.last_version is not None
    if version == committed.last_version:
        logger.info(
            "%s has version %d of %s already: nothing added", committed.topic, version, application
        )
        return
    logger.warning(
        "topic %s: version %d of %s is below its last one, %d; its %d records are taken for ones "
        "that are there already, and were not added. If they are new, use another txnAppId: "
        "versions of one application must grow",
        committed.topic, version, application, committed.last_version, committed.record_count,
    )  # fmt: skip
