"""`format("log")`: the entry through which Spark finds source and sink."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

import broker
from spark_log import schema as schemas
from spark_log import sql_table
from spark_log.options import ReadOptions
from spark_log.shipping import Shipped
from spark_log.sink import make_stream_writer, make_writer
from spark_log.source import LogBatchReader, LogStreamReader
from spark_log.topics import TopicSet


class LogDataSource(Shipped, DataSource):
    """A log as a data source of Spark: `format("log")`, batch and streaming, reads and writes.

    Rows of a read are those of Spark's Kafka connector: key, value (binary), topic (string),
    partition (int), offset (bigint), timestamp (timestamp), timestampType (int: 0 the producer's
    time, 1 the log's) and, with `includeHeaders`, headers (array<struct<key, value>>). A schema
    that names fewer of them, `.schema("value BINARY")`, is faster: only those are sent to Spark.

    The options are the connector's as well, so that a job moves by changing the format and the
    address. `kafka.*` options are ignored with a warning; an unknown option is an error.

    | option of a read | default | |
    |---|---|---|
    | `subscribe` | | topics, separated by commas; one of these three is needed |
    | `subscribePattern` | | a regular expression, searched in the names of topics |
    | `assign` | | `{"orders":[0,1]}` |
    | `startingOffsets` | stream: latest, batch: earliest | earliest, latest, group, JSON |
    | | | `{"orders":{"0":23,"1":-1,"2":-2}}`: -1 is latest, -2 earliest |
    | | | group: where the group `groupId` is; if it is nowhere, at `startingOffsetsFallback` |
    | `startingTimestamp` | | milliseconds since 1970; wins over the next, and that over the above |
    | `startingOffsetsByTimestamp` | | `{"orders":{"0":1700000000000}}` |
    | `startingOffsetsByTimestampStrategy` | error | if no record is as late: error or latest |
    | `endingOffsets`, `endingTimestamp`, `endingOffsetsByTimestamp` | latest | batch only |
    | `groupId` | | a streaming query publishes its position to this consumer group |
    | `metricsPort` | | a streaming query serves its metrics there, in Prometheus' form |
    | `failOnDataLoss` | true | false: go on, with a warning that names the offsets that are gone |
    | `includeHeaders` | false | |
    | `maxOffsetsPerTrigger`, `maxBytesPerTrigger` | | how much one micro-batch reads, about |
    | `minOffsetsPerTrigger` | | wait for so many, but no longer than `maxTriggerDelay` (15m) |
    | `minPartitions` | as many as are worth it | tasks, at least about so many |
    | `maxRecordsPerPartition` | | records that one task reads, at most |

    | option of a write | default | |
    |---|---|---|
    | `topic` | | where to; wins over a column `topic` |
    | `createTopic`, `numPartitions` | false, 1 | make a topic that is missing |
    | `txnAppId`, `txnVersion` | stream: query id, batch id | the same pair adds nothing twice |
    | `compression` | none | none, gzip, snappy, lz4, zstd |

    What is promised:
    - The position of a streaming query is in its checkpoint, and nowhere else. The options for the
      start count only without a checkpoint.
    - A driver killed while Spark writes the first file of a checkpoint leaves one that Spark 4.2
      refuses: "should be empty on batch 0". `spark_log.session` lets it go on; in a session of
      your own set `spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart` to false.
    - The same two offsets always give the same records, in the order of their offsets within each
      partition. A batch DataFrame is fixed at its first action.
    - New partitions, and new topics under a pattern, are read from their first record.
    - Records that are gone (removed, topic or log deleted or made again, end lost in a power cut)
      end the query with an error that names them; it never goes on in silence.
    - Each micro-batch is written exactly once. A batch write is written exactly once if it is
      given `txnAppId` and `txnVersion`; without them a job that is run twice writes twice.
    - The version of a micro-batch is its number, which begins at 0 with each new checkpoint. So a
      stream with `txnAppId` and a new checkpoint needs a new name, too: if the name has got beyond
      batch 0, the query fails before it writes anything.

    Positions and metrics of a streaming query:
    - A position is published to `groupId` when Spark next asks what there is to read: after each
      batch, and when idle. `Trigger.Once` never asks again after its one batch, and tells a Python
      source nothing of its success, so its last position is published by the next run. Use
      `Trigger.AvailableNow`, which asks.
    - Spark has no metrics of Python sources in a query's progress. `metricsPort` serves them from
      the source's process on the driver: batches, tasks, records and bytes planned, the time that
      took, losses, publications, and the lag in records. One port serves one query; 0 takes any
      that is free, and a warning tells which.

    >>> orders = spark.readStream.format("log").option("subscribe", "orders").load("/data/log")
    >>> query = (orders.writeStream.format("log").option("topic", "copies")
    ...     .option("checkpointLocation", "/data/checkpoint").start("/data/log"))
    >>> spark.read.format("log").option("subscribe", "orders").load("/data/log").count()
    """

    @classmethod
    def name(cls) -> str:
        return "log"

    def schema(self) -> StructType:
        """Return the row schema. Called when a read is made, so wrong options are found here."""
        if sql_table.is_definition(self.options):
            return self._table_schema(sql_table.given(self.options))
        return self._schema(ReadOptions.parse(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogBatchReader(sql_table.restore(schema, self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LogStreamReader(sql_table.restore(schema, self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return make_writer(sql_table.restore(schema, self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return make_stream_writer(sql_table.restore(schema, self.options), schema, overwrite)

    def _schema(self, options: ReadOptions) -> StructType:
        log = broker.open(options.path, create=False, storage=options.storage)
        TopicSet(log, options.selection).check()
        if options.group_id is not None:
            log.group_positions(options.group_id)  # Its name may be one that no group can have.
        return schemas.row_schema(include_headers=options.include_headers)

    def _table_schema(self, options: dict[str, str]) -> StructType:
        return sql_table.carry(self._schema(ReadOptions.parse(options)), options)


def register(spark: SparkSession) -> None:
    """Let a session know `format("log")`. A session of `spark_log.session` knows it already."""
    spark.dataSource.register(LogDataSource)
