"""What the sink takes, what it refuses, and what is in the log afterwards."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import types as T
from pyspark.sql.types import StructType

import broker
from spark_log import staging
from spark_log.sink import BatchSink, TaskMessage, make_stream_writer, make_writer
from spark_log.staging import TaskStaging
from spark_log.write_columns import WriteColumns
from spark_log.write_options import WriteOptions

pytestmark = pytest.mark.spark

KEY_VALUE = "key string, value string"


HEADERS = "array<struct<key:string,value:binary>>"
TYPES = {
    "string": T.StringType(),
    "binary": T.BinaryType(),
    "int": T.IntegerType(),
    "bigint": T.LongType(),
    "void": T.NullType(),
    "variant": T.VariantType(),
    "timestamp": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "array<string>": T.ArrayType(T.StringType()),
    HEADERS: T.ArrayType(
        StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
    ),
    "array<struct<key:string,value:string>>": T.ArrayType(
        StructType([T.StructField("key", T.StringType()), T.StructField("value", T.StringType())])
    ),
}


def schema_of(text: str) -> StructType:
    """Return the schema that SQL would make of this, without asking a running Spark."""
    columns = [column.split(" ") for column in text.split(", ")]
    return StructType([T.StructField(name, TYPES[kind]) for name, kind in columns])


def read_all(log: broker.Log, topic: str) -> list[broker.ConsumerRecord]:
    """Return all records of a topic; those of one partition in their order."""
    count = log.describe_topic(topic).record_count
    records: list[broker.ConsumerRecord] = []
    with log.consumer(topic, auto_offset_reset="earliest") as consumer:
        while len(records) < count:
            for some in consumer.poll(timeout_ms=1000, max_records=10_000).values():
                records += some
    return records


def values(log: broker.Log, topic: str) -> list[bytes | None]:
    return sorted((record.value for record in read_all(log, topic)), key=lambda v: v or b"")


def data_files(root: Path, topic: str) -> list[Path]:
    return sorted(root.glob(f"topics/{topic}/1/data/*"))


def stage(writer: Any, columns: dict[str, Any], rows_per_batch: int = 2) -> Any:
    """Do what one task does."""
    return writer.write(iter(pa.table(columns).to_batches(max_chunksize=rows_per_batch)))


def write(root: Path, text: str, columns: dict[str, Any], **options: Any) -> None:
    """Do what one batch write of one task does."""
    given = {name: str(value) for name, value in options.items()}
    writer = make_writer({"path": str(root), **given}, schema_of(text), overwrite=False)
    writer.commit([stage(writer, columns)])


# Columns


def test_text_and_bytes_are_stored_as_bytes(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    write(root, KEY_VALUE, {"key": ["k", None], "value": ["ä", None]}, topic="t")
    write(root, "key binary, value binary", {"key": [b"\xff"], "value": [b"\x00"]}, topic="t")
    records = [(record.key, record.value) for record in read_all(log, "t")]
    assert records == [(b"k", "ä".encode()), (None, None), (b"\xff", b"\x00")]


def test_records_go_where_the_producer_would_put_them(log: broker.Log, root: Path) -> None:
    log.create_topic("ours", partitions=5)
    log.create_topic("theirs", partitions=5)
    keys = [f"key-{number}" for number in range(50)]
    write(root, KEY_VALUE, {"key": keys, "value": keys}, topic="ours")
    with log.producer() as producer:
        for key in keys:
            producer.send("theirs", key.encode(), key=key.encode())
    places = [
        sorted((record.key, record.partition) for record in read_all(log, topic))
        for topic in ("ours", "theirs")
    ]
    assert places[0] == places[1]


def test_a_given_partition_wins_over_the_key(log: broker.Log, root: Path) -> None:
    log.create_topic("t", partitions=3)
    columns = {
        "key": ["k"] * 3,
        "value": ["a", "b", "c"],
        "partition": pa.array([2, 0, 2], "int32"),
    }
    write(root, f"{KEY_VALUE}, partition int", columns, topic="t")
    placed = sorted((record.partition, record.value) for record in read_all(log, "t"))
    assert placed == [(0, b"b"), (2, b"a"), (2, b"c")]


def test_headers_are_kept_in_order_and_may_be_absent(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    given = [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], None, []]
    columns = {"value": ["x", "y", "z"], "headers": pa.array(given, kind)}
    write(root, f"value string, headers {HEADERS}", columns, topic="t")
    assert [record.headers for record in read_all(log, "t")] == [[("a", b"1"), ("a", None)], [], []]


def test_a_timestamp_of_any_zone_is_the_same_moment(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    moment = datetime(2024, 7, 1, 12, 30, 0, 123_000, tzinfo=UTC)
    stamps = pa.array([moment, None], pa.timestamp("us", tz="America/New_York"))
    write(
        root, "value string, timestamp timestamp", {"value": ["a", "b"], "timestamp": stamps},
        topic="t",
    )  # fmt: skip
    given, now = (record.timestamp for record in read_all(log, "t"))
    assert given == round(moment.timestamp() * 1000)
    assert abs(now - datetime.now(UTC).timestamp() * 1000) < 60_000


def test_other_columns_are_ignored_even_of_odd_types(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    columns = {"nothing": pa.nulls(1), "value": ["a"], "offset": pa.array([7])}
    write(root, "nothing void, value string, offset bigint", columns, topic="t")
    assert values(log, "t") == [b"a"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("key string", "Required attribute 'value' not found"),
        ("VALUE string", "Required attribute 'value' not found .there is 'VALUE'"),
        ("value int", "value attribute unsupported type int. value must be a.n. string or binary"),
        ("value void", "value attribute unsupported type void"),
        ("value variant", "value attribute unsupported type variant"),
        ("value string, key bigint", "key attribute unsupported type bigint"),
        ("value string, partition bigint", "partition attribute unsupported type bigint"),
        ("value string, timestamp string", "timestamp attribute unsupported type string"),
        ("value string, timestamp timestamp_ntz", "timestamp attribute unsupported type timest"),
        ("value string, headers array<string>", "headers attribute unsupported type array<string>"),
        (
            "value string, headers array<struct<key:string,value:string>>",
            "headers must be a.n. array<struct<key:string,value:binary>>",
        ),
    ],
)
def test_a_column_of_a_wrong_type_is_refused_before_any_task(
    log: broker.Log, root: Path, text: str, problem: str
) -> None:
    log.create_topic("t")
    for make in (make_writer, make_stream_writer):
        with pytest.raises(broker.InvalidRecord, match=problem):
            make({"path": str(root), "topic": "t"}, schema_of(text), overwrite=False)


def test_a_column_that_is_there_twice_is_refused(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    schema = StructType([*schema_of("value string").fields, *schema_of("value string").fields])
    with pytest.raises(broker.InvalidRecord, match="'value' is there more than once"):
        make_writer({"path": str(root), "topic": "t"}, schema, overwrite=False)


# Topics


def test_the_option_wins_over_the_column(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    columns = {"topic": [None, "elsewhere"], "value": ["a", "b"]}
    write(root, "topic string, value string", columns, topic=" t ")
    assert values(log, "t") == [b"a", b"b"]


def test_each_row_goes_to_the_topic_it_names(log: broker.Log, root: Path) -> None:
    for topic in ("a", "b", "c"):
        log.create_topic(topic, partitions=2)
    numbers = [str(number) for number in range(30)]
    topics = ["abc"[number % 3] for number in range(30)]
    write(root, "topic string, value string", {"topic": topics, "value": numbers})
    for remainder, topic in enumerate("abc"):
        expected = {str(number).encode() for number in range(remainder, 30, 3)}
        assert set(values(log, topic)) == expected


def test_without_option_and_column_there_is_no_topic(log: broker.Log, root: Path) -> None:
    with pytest.raises(broker.InvalidRecord, match="topic option required when no 'topic'"):
        make_writer({"path": str(root)}, schema_of("value string"), overwrite=False)
    with pytest.raises(broker.InvalidRecord, match="topic attribute unsupported type int"):
        make_writer({"path": str(root)}, schema_of("value string, topic int"), overwrite=False)


def test_a_missing_topic_is_an_error_that_names_the_option(log: broker.Log, root: Path) -> None:
    with pytest.raises(broker.UnknownTopic, match="'t' does not exist; .* createTopic to true"):
        make_writer({"path": str(root), "topic": "t"}, schema_of("value string"), overwrite=False)
    columns = {"topic": ["t"], "value": ["a"]}
    with pytest.raises(broker.UnknownTopic, match="createTopic to true"):
        write(root, "topic string, value string", columns)
    assert log.topics() == []


def test_a_missing_topic_is_created_on_demand(log: broker.Log, root: Path) -> None:
    write(root, "value string", {"value": ["a"]}, topic="t", createTopic="true", numPartitions=3)
    columns = {"topic": ["u", "v"], "value": ["a", "b"]}
    write(root, "topic string, value string", columns, createTopic="true")
    counts = {topic: len(log.describe_topic(topic).partitions) for topic in log.topics()}
    assert counts == {"t": 3, "u": 1, "v": 1}
    assert values(log, "t") == values(log, "u") == [b"a"]


def test_a_count_of_partitions_that_a_topic_does_not_have_is_said_to_be_ignored(
    log: broker.Log, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.create_topic("two", partitions=2)
    for count in (2, 7):
        options = {"topic": "two", "createTopic": "true", "numPartitions": count}
        write(root, "value string", {"value": ["a"]}, **options)
    assert caplog.messages == [
        "topic 'two' is there already, with 2 partitions and not 7; ignored: numPartitions"
    ]


def test_a_time_before_1970_is_refused_with_its_row(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    times = pa.array([0, None, -1], pa.timestamp("us", "UTC"))
    with pytest.raises(broker.InvalidRecord, match="row 2 of column 'timestamp' .* 1969-12-31"):
        write(root, "value string, timestamp timestamp",
              {"value": ["a", "b", "c"], "timestamp": times}, topic="t")  # fmt: skip
    assert values(log, "t") == []


def test_a_missing_log_is_an_error_and_is_not_made(root: Path) -> None:
    with pytest.raises(broker.LogNotFound):
        make_writer(
            {"path": str(root), "topic": "t", "createtopic": "true"},
            schema_of("value string"),
            overwrite=False,
        )
    assert not root.exists()


# Rows


@pytest.mark.parametrize(
    ("columns", "error", "problem"),
    [
        ({"topic": ["t", None]}, broker.InvalidRecord, "null topic present in the data"),
        ({"topic": ["t", "a/b"]}, broker.InvalidTopicName, "a/b"),
        ({"partition": pa.array([0, 2], "int32")}, broker.UnknownPartition, "no partition 2"),
        ({"partition": pa.array([0, -1], "int32")}, broker.InvalidRecord, "partition -1"),
        ({"value": ["a", "b" * 2000]}, broker.RecordTooLarge, "over max.message.bytes=1000"),
        (
            {
                "headers": pa.array(
                    [[{"key": None, "value": b""}], None],
                    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                )
            },
            broker.InvalidRecord,
            "a header without a key",
        ),
    ],
)
def test_one_bad_row_fails_the_batch_and_nothing_is_visible(
    log: broker.Log, root: Path, columns: dict[str, Any], error: type[Exception], problem: str
) -> None:
    log.create_topic("t", partitions=2, config={"max.message.bytes": 1000})
    table = {"value": ["a", "b"], "topic": ["t", "t"], **columns}
    types = {"value": "string", "topic": "string", "partition": "int", "headers": HEADERS}
    text = ", ".join(f"{name} {types[name]}" for name in table)
    with pytest.raises(error, match=problem):
        write(root, text, table)
    assert log.describe_topic("t").record_count == 0
    assert data_files(root, "t") == []


def test_a_record_without_a_key_is_refused_on_a_compacted_topic(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("t", config={"cleanup.policy": "compact"})
    with pytest.raises(broker.InvalidRecord, match="every record needs a key"):
        write(root, KEY_VALUE, {"key": ["k", None], "value": ["a", "b"]}, topic="t")


# Options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topic": " "}, "topic=' ' is empty"),
        ({"txnAppId": ""}, "txnAppId='' is empty"),
        ({"txnAppId": "a"}, "belong together"),
        ({"txnVersion": "1"}, "belong together"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion must be at least 0, got '-1'"),
        ({"txnAppId": "a", "txnVersion": "one"}, "txnVersion='one' is not a whole number"),
        ({"txnAppId": "a", "txnVersion": str(1 << 63)}, "txnVersion=.* is too large"),
        ({"createTopic": "yes"}, "createTopic='yes' is not true or false"),
        ({"createTopic": "true", "numPartitions": "0"}, "numPartitions must be positive"),
        ({"createTopic": "true", "numPartitions": "999999"}, "numPartitions=999999 is too large"),
        ({"numPartitions": "2"}, "set createTopic to true as well"),
        ({"compression": "brotli"}, "compression='brotli' is not one of none, gzip"),
        ({"kafka.key.serializer": "x"}, "'key.serializer' is not supported"),
        ({"txnAppID_": "a"}, "did you mean 'txnAppId'"),
        ({"nosuchthing": "a"}, "unknown option 'nosuchthing'"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    options: dict[str, str], problem: str
) -> None:
    with pytest.raises(broker.InvalidOption, match=problem):
        WriteOptions.parse({"path": "somewhere", **options})


def test_no_path_is_an_error_that_knows_about_tables_in_sql() -> None:
    with pytest.raises(broker.InvalidOption, match="CREATE TEMPORARY VIEW"):
        WriteOptions.parse({"topic": "t"})


def test_options_of_sparks_own_and_of_kafka_are_tolerated() -> None:
    given = {
        "path": "p", "topic": "t", "checkpointlocation": "c", "queryname": "q",
        "includeheaders": "true", "kafka.bootstrap.servers": "b", "kafka.acks": "all",
        "kafka.compression.type": "lz4",
    }  # fmt: skip
    parsed = WriteOptions.parse(given, is_streaming=True)
    assert parsed == WriteOptions("p", "t", compression="lz4")
    assert WriteOptions.parse({**given, "compression": "zstd"}).compression == "zstd"


def test_one_version_for_a_whole_stream_is_refused() -> None:
    options = {"path": "p", "txnAppId": "a", "txnVersion": "1"}
    with pytest.raises(broker.InvalidOption, match="each micro-batch has a number of its own"):
        WriteOptions.parse(options, is_streaming=True)
    del options["txnVersion"]
    assert WriteOptions.parse(options, is_streaming=True).application == "a"


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_records_are_compressed_as_asked(log: broker.Log, root: Path, codec: str) -> None:
    log.create_topic("t")
    write(root, "value string", {"value": ["a" * 10_000] * 20}, topic="t", compression=codec)
    assert sum(file.stat().st_size for file in data_files(root, "t")) < 50_000
    assert values(log, "t") == [b"a" * 10_000] * 20


def test_overwriting_and_complete_mode_are_refused_each_in_its_own_words(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("t")
    options, schema = {"path": str(root), "topic": "t"}, schema_of("value string")
    with pytest.raises(broker.InvalidOption, match="mode 'overwrite' is refused"):
        make_writer(options, schema, overwrite=True)
    with pytest.raises(broker.InvalidOption, match="output mode 'complete' is refused"):
        make_stream_writer(options, schema, overwrite=True)


# Commits


def stream_writer(root: Path, **options: str) -> Any:
    given = {"path": str(root), "txnappid": "app", **options}
    return make_stream_writer(given, schema_of("topic string, value string"), overwrite=False)


def test_nothing_is_visible_before_the_commit_and_all_of_it_after(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("t", partitions=2)
    writer = make_writer(
        {"path": str(root), "topic": "t"}, schema_of("value string"), overwrite=False
    )
    messages = [stage(writer, {"value": [f"{task}-{row}" for row in range(5)]}) for task in "abc"]
    assert log.describe_topic("t").record_count == 0
    commits = log.describe_topic("t").commit_count
    writer.commit(messages)
    assert log.describe_topic("t").commit_count == commits + 1
    assert log.describe_topic("t").record_count == 15


def test_tasks_are_committed_in_their_order(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    writer = make_writer(
        {"path": str(root), "topic": "t"}, schema_of("value string"), overwrite=False
    )
    messages = [stage(writer, {"value": [f"{task}{row}" for row in range(3)]}) for task in "ab"]
    writer.commit(messages)
    found = [record.value for record in read_all(log, "t")]
    assert found == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]


def test_a_batch_that_comes_again_adds_nothing(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    for batch in (0, 1, 1, 2):
        writer = stream_writer(root)
        writer.commit([stage(writer, {"topic": ["t"], "value": [str(batch)]})], batch)
    assert values(log, "t") == [b"0", b"1", b"2"]


def test_an_older_batch_is_skipped_with_a_warning(
    log: broker.Log, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.create_topic("t")
    for batch in (5, 4):
        writer = stream_writer(root)
        writer.commit([stage(writer, {"topic": ["t"], "value": [str(batch)]})], batch)
    assert values(log, "t") == [b"5"]
    assert "version 4 of app is below its last one, 5" in caplog.text


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_new_checkpoint_with_a_name_that_is_further_fails(
    log: broker.Log, root: Path, is_empty: bool
) -> None:
    log.create_topic("t")
    for batch in (0, 1):
        writer = stream_writer(root, topic="t")
        writer.commit([stage(writer, {"topic": ["t"], "value": [str(batch)]})], batch)
    rows = [] if is_empty else ["new"]
    columns = {"topic": pa.array(["t"] * len(rows), pa.string()), "value": pa.array(rows)}
    writer = stream_writer(root, topic="t")
    message = stage(writer, columns)
    with pytest.raises(broker.InvalidOption, match=r"txnAppId='app' .* batch 1 .* new txnAppId"):
        writer.commit([message], 0)
    assert values(log, "t") == [b"0", b"1"]


def test_a_first_batch_that_comes_again_adds_nothing(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    for _ in range(2):
        writer = stream_writer(root, topic="t")
        writer.commit([stage(writer, {"topic": ["t"], "value": ["0"]})], 0)
    assert values(log, "t") == [b"0"]


def test_a_batch_cut_off_between_two_topics_is_completed_and_not_repeated(
    log: broker.Log, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in ("a", "b", "c"):
        log.create_topic(topic)
    rows = {"topic": ["b", "c", "a"], "value": ["1", "2", "3"]}
    commit, done = broker.Log.commit_staged, []

    def stop_after_one(log: broker.Log, topic: str, *arguments: Any) -> broker.Committed:
        if done:
            raise broker.LockTimeout("lock", 0, "nobody")
        done.append(topic)
        return commit(log, topic, *arguments)

    writer = stream_writer(root)
    messages = [stage(writer, rows)]
    with monkeypatch.context() as patch:
        patch.setattr(broker.Log, "commit_staged", stop_after_one)
        with pytest.raises(broker.LockTimeout):
            writer.commit(messages, 0)
    writer.abort(messages, 0)
    assert [log.describe_topic(topic).record_count for topic in "abc"] == [1, 0, 0]
    writer = stream_writer(root)
    writer.commit([stage(writer, rows)], 0)
    assert [values(log, topic) for topic in "abc"] == [[b"3"], [b"1"], [b"2"]]


def test_a_load_done_again_with_the_same_pair_adds_nothing(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    for version in (1, 1, 2):
        columns = {"value": [str(version)]}
        write(root, "value string", columns, topic="t", txnAppId="load", txnVersion=version)
    write(root, "value string", {"value": ["1"]}, topic="t", txnAppId="other", txnVersion=1)
    assert values(log, "t") == [b"1", b"1", b"2"]


def test_without_a_pair_every_batch_write_counts(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    for _ in range(2):
        write(root, "value string", {"value": ["1"]}, topic="t")
    assert values(log, "t") == [b"1", b"1"]


def test_no_rows_are_no_commit(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    commits = log.describe_topic("t").commit_count
    write(root, "value string", {"value": pa.array([], "string")}, topic="t")
    writer = stream_writer(root)
    writer.commit([writer.write(iter([]))], 0)
    assert log.describe_topic("t").commit_count == commits
    assert data_files(root, "t") == []


def test_a_stream_without_an_identity_does_not_write(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    options = {"path": str(root), "topic": "t"}
    writer = make_stream_writer(options, schema_of("value string"), overwrite=False)
    with pytest.raises(broker.InvalidOption, match="txnAppId"):
        stage(writer, {"value": ["a"]})


def test_a_topic_made_anew_under_the_batch_fails_it(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    writer = stream_writer(root)
    message = stage(writer, {"topic": ["t"], "value": ["a"]})
    log.delete_topic("t")
    log.create_topic("t")
    with pytest.raises(broker.InvalidRecord, match="deleted and made again"):
        writer.commit([message], 0)
    assert log.describe_topic("t").record_count == 0


def test_abort_removes_the_files_of_a_batch_that_was_never_committed(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("t", partitions=2)
    writer = stream_writer(root)
    message = stage(writer, {"topic": ["t"] * 9, "value": ["a" * 50_000] * 9})
    assert data_files(root, "t")
    writer.abort([message, None], 0)
    assert data_files(root, "t") == []


def test_abort_after_a_commit_that_was_tried_removes_nothing(log: broker.Log, root: Path) -> None:
    log.create_topic("t", partitions=2)
    writer = stream_writer(root)
    message = stage(writer, {"topic": ["t"] * 9, "value": ["a" * 50_000] * 9})
    writer.commit([message], 0)
    writer.abort([message], 0)
    assert log.verify("t").damage == ()
    assert len(values(log, "t")) == 9


def test_abort_does_not_raise_when_the_topic_is_gone(log: broker.Log, root: Path) -> None:
    log.create_topic("t")
    writer = stream_writer(root)
    message = stage(writer, {"topic": ["t"], "value": ["a"]})
    log.delete_topic("t")
    writer.abort([message, None], 0)


# Tasks


def test_many_small_batches_become_few_frames(log: broker.Log, root: Path) -> None:
    log.create_topic("t", partitions=2)
    keys = [str(number) for number in range(10_000)]
    writer = make_writer({"path": str(root), "topic": "t"}, schema_of(KEY_VALUE), overwrite=False)
    message = stage(writer, {"key": keys, "value": keys}, rows_per_batch=100)
    assert [len(staged.frames) for staged in message.staged] == [2]


def test_a_task_over_many_topics_holds_few_files_open(
    log: broker.Log, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_OPEN_STAGES_MAX", 2)
    topics = [f"t{number % 7}" for number in range(200)]
    columns = WriteColumns.find(schema_of("topic string, value string"), has_topic_option=False)
    work = TaskStaging(
        WriteOptions(str(root), create_topic=True), columns, gather_bytes=200
    )  # fmt: skip
    table = pa.table({"topic": topics, "value": [str(number) for number in range(200)]})
    for batch in table.to_batches(max_chunksize=20):
        work.add(batch)
        assert len(work._open) <= 3
    writer = BatchSink(WriteOptions(str(root)), columns)
    writer.commit([TaskMessage(None, work.finish())])
    for number in range(7):
        found = [int(record.value or b"") for record in read_all(log, f"t{number}")]
        assert found == list(range(number, 200, 7))


def test_an_executor_without_the_package_says_how_to_install_it(
    log: broker.Log, root: Path, tmp_path: Path
) -> None:
    log.create_topic("t")
    writer = make_writer(
        {"path": str(root), "topic": "t"}, schema_of("value string"), overwrite=False
    )
    assert isinstance(pickle.loads(cloudpickle.dumps(writer)), BatchSink)
    (tmp_path / "pickled").write_bytes(cloudpickle.dumps(writer))
    script = (
        "import sys, pickle; sys.modules['spark_log'] = None\npickle.load(open(sys.argv[1], 'rb'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pickled")], capture_output=True, text=True
    )
    assert "has no module 'spark_log" in done.stderr
    assert "pip install spark-log" in done.stderr


# Through Spark


def failure(action: Any) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "mode", "problem"),
    [
        ("'a' AS value", "overwrite", "mode 'overwrite' is refused: a log is only ever appended"),
        ("1 AS value", "append", "value attribute unsupported type int"),
        ("'a' AS value, CAST(9 AS INT) AS partition", "append", "no partition 9"),
    ],
)
def test_spark_hands_our_errors_on(
    spark: Any, log: broker.Log, root: Path, columns: str, mode: str, problem: str
) -> None:
    log.create_topic("t")
    writer = spark.sql(f"SELECT {columns}").write.format("log").option("topic", "t")
    assert problem in failure(lambda: writer.mode(mode).save(str(root)))
    assert log.describe_topic("t").record_count == 0


@pytest.fixture
def totals(spark: Any, log: broker.Log, root: Path) -> Any:
    """A running count for each value of topic `in`."""
    log.create_topic("in")
    log.create_topic("out")
    with log.producer() as producer:
        for value in (b"a", b"b", b"a"):
            producer.send("in", value)
    stream = spark.readStream.format("log").option("subscribe", "in")
    counts = stream.option("startingOffsets", "earliest").load(str(root)).groupBy("value").count()
    return counts.selectExpr("concat(cast(value AS string), '=', count) AS value")


def test_output_mode_complete_is_refused_by_its_name(
    totals: Any, root: Path, tmp_path: Path
) -> None:
    writer = totals.writeStream.format("log").option("topic", "out").outputMode("complete")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(root))
    assert "output mode 'complete' is refused" in failure(query.awaitTermination)


def test_update_mode_goes_by_foreach_batch_and_a_pair(
    totals: Any, log: broker.Log, root: Path, tmp_path: Path
) -> None:
    def write_twice(frame: Any, number: int) -> None:
        writer = frame.write.format("log").option("topic", "out").mode("append")
        for _ in range(2):
            writer.option("txnAppId", "totals").option("txnVersion", number).save(str(root))

    query = totals.writeStream.outputMode("update").foreachBatch(write_twice)
    query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    with log.producer() as producer:
        producer.send("in", b"b")
    query.trigger(availableNow=True).start().awaitTermination()
    assert values(log, "out") == [b"a=2", b"b=1", b"b=2"]
