"""Random operations on a topic, compared with a plain model after every step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

import broker
from broker import OffsetAndTimestamp, TopicPartition
from broker.batch import Frame, encode_records
from broker.commit import Author, results
from broker.config import CODECS
from broker.consumer import Consumer
from broker.ledger import new_token
from broker.reader import TopicReader
from broker.storage import LocalStorage
from broker.topic import Topic

TOPIC = "t"
PARTITIONS_MAX = 5
LAST_TIME = 9
# Time goes on between the moment at which a test looks at the clock and the log's own look.
GRACE_MS = 1
BEGINNING_NS = 1_700_000_000_000_000_000

# Key, value, header value, timestamp in milliseconds.
Row = tuple[bytes | None, bytes | None, bytes | None, int]

rows = st.tuples(
    st.none() | st.binary(max_size=3),
    st.none() | st.binary(max_size=40),
    st.none() | st.binary(max_size=3),
    st.integers(0, LAST_TIME),
)
batches = st.dictionaries(
    st.integers(0, PARTITIONS_MAX - 1), st.lists(rows, min_size=1, max_size=4), max_size=3
)
times = st.integers(0, LAST_TIME)


@dataclass
class ModelPartition:
    """All records ever appended; those before `start` are gone. A time of None: not known yet."""

    rows: list[Row] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return len(self.rows)

    def first_at(self, time: int) -> OffsetAndTimestamp | None:
        for offset in range(self.start, self.end):
            if self.rows[offset][3] >= time:
                return OffsetAndTimestamp(offset, self.rows[offset][3])
        return None


@dataclass
class Follower:
    """A consumer that reads the topic from its beginning, and what it has been given."""

    consumer: Consumer
    positions: dict[int, int]


class TopicMachine(RuleBasedStateMachine):
    """Two writers, a reader and some consumers on one topic; a list for each partition beside."""

    followers = Bundle("followers")

    @initialize(
        partitions=st.integers(1, 3),
        segment_bytes=st.sampled_from([1, 500, 2000, 1 << 20]),
        seal_bytes=st.sampled_from([1, 5000, 1 << 20]),
    )
    def open(self, partitions: int, segment_bytes: int, seal_bytes: int) -> None:
        self.root = tempfile.mkdtemp(prefix="model-")
        clock = count(BEGINNING_NS, 1000)
        self.log = broker.Log(LocalStorage(self.root, clock=lambda: next(clock)))
        self.incarnation = 0
        self.followed: list[Follower] = []
        self.config = {
            "segment.bytes": segment_bytes,
            "checkpoint.commits": 3,
            "seal.bytes": seal_bytes,
            "retention.ms": -1,  # The records are of 1970.
            "file.delete.delay.ms": 0,
            "table.delete.delay.ms": 0,
        }
        self.last: tuple[Callable[[], Any], dict[int, tuple[int, int]]] | None = None
        self.create(partitions)
        self.writers = [self.log._open_writer(TOPIC) for _ in range(2)]
        self.reader = self.log._open_reader(TOPIC)

    def create(self, partitions: int) -> None:
        self.log.create_topic(TOPIC, partitions, self.config)
        self.incarnation += 1
        self.partitions = [ModelPartition() for _ in range(partitions)]
        self.is_log_append = False
        self.last = None
        self.producer_id = 7
        self.sequence = 0
        self.version = self.version_offset = -1

    @rule(batch=batches, writer=st.integers(0, 1), codec=st.sampled_from(CODECS))
    def append(self, batch: dict[int, list[Row]], writer: int, codec: str) -> None:
        """One commit for several partitions, by either writer."""
        batch = self.existing(batch)
        if not batch:
            return
        frames = [(partition, encode(some, codec)) for partition, some in batch.items()]
        author = Author(new_token(), self.producer_id, self.sequence)
        self.sequence += 1
        topic = self.writers[writer]
        appended = topic.append(frames, author)
        found = results(appended.table)
        assert found == {
            partition: (self.partitions[partition].end, len(some))
            for partition, some in batch.items()
        }
        for partition, some in batch.items():
            self.add(partition, some, appended.time)
        self.last = (lambda: self.writers[1 - writer].append(frames, author)), found

    @rule(writer=st.integers(0, 1), batch=batches)
    def append_to_no_such_partition(self, writer: int, batch: dict[int, list[Row]]) -> None:
        """One wrong partition, and nothing of the commit is there."""
        batch = {**self.existing(batch), len(self.partitions): [(None, b"never", None, 1)]}
        frames = [(partition, encode(some, "none")) for partition, some in batch.items()]
        with pytest.raises(broker.UnknownPartition):
            self.writers[writer].append(frames, Author(new_token()))

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat_the_last_append(self) -> None:
        """The other writer sends the same commit again: the same answer, nothing new."""
        assert self.last is not None
        repeat, found = self.last
        assert results(repeat().table) == found

    @rule(batch=batches, is_committed=st.booleans(), codec=st.sampled_from(CODECS))
    def transaction(self, batch: dict[int, list[Row]], is_committed: bool, codec: str) -> None:
        """A user's transaction over all partitions, committed or left by an exception."""
        batch = self.existing(batch)
        started = None
        with self.log.producer(compression_type=codec) as producer:
            try:
                with producer.transaction():
                    for partition, some in batch.items():
                        for key, value, header, time in some:
                            started = producer.send(
                                TOPIC, value, key, header_list(header), partition, time
                            )
                    if not is_committed:
                        raise KeyError("changed my mind")
            except KeyError:
                pass
        if not is_committed:
            assert started is None or isinstance(started.exception(), broker.TransactionError)
            return
        for partition, some in batch.items():
            assert started is not None
            self.add(partition, some, started.result().timestamp)

    @rule(writer=st.integers(0, 1), version=st.integers(0, 5), time=times)
    def append_a_version_of_an_application(self, writer: int, version: int, time: int) -> None:
        """Committed if it is above the last one; otherwise the last one's answer, nothing new."""
        row: Row = None, b"version %d" % version, None, time
        appended = self.writers[writer].append(
            [(0, encode([row], "none"))], Author(new_token()), transaction=("app", version)
        )
        if version > self.version:
            self.version = version
            self.version_offset = self.partitions[0].end
            self.add(0, [row], appended.time)
        assert results(appended.table) == {0: (self.version_offset, 1)}

    @rule(writer=st.integers(0, 1))
    def reopen(self, writer: int) -> None:
        """Fresh handles, which start from a checkpoint."""
        self.writers[writer].close()
        self.writers[writer] = self.log._open_writer(TOPIC)
        self.reader.close()
        self.reader = self.log._open_reader(TOPIC)

    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.partitions) - 1))
        model = self.partitions[number]
        offset = data.draw(st.integers(0, model.end) | st.just(-1))
        place = TopicPartition(TOPIC, number)
        model.start = max(model.start, model.end if offset == -1 else offset)
        assert self.log.delete_records({place: offset}) == {place: model.start}

    @precondition(lambda self: len(self.partitions) < PARTITIONS_MAX)
    @rule()
    def add_a_partition(self) -> None:
        self.partitions.append(ModelPartition())
        self.log.create_partitions(TOPIC, len(self.partitions))

    @rule()
    def change_whose_clock_counts(self) -> None:
        self.is_log_append = not self.is_log_append
        kind = "LogAppendTime" if self.is_log_append else "CreateTime"
        self.log.alter_topic(TOPIC, {"message.timestamp.type": kind})

    @rule(is_forced=st.booleans())
    def maintain(self, is_forced: bool) -> None:
        """Seal, merge, trim and remove: readers see the same."""
        self.log.maintain(TOPIC, seal=is_forced)

    @rule(bytes_max=st.sampled_from([0, 500, 3000]))
    def remove_by_size(self, bytes_max: int) -> None:
        """The oldest go, as whole files; how many is not the model's to say."""
        self.log.alter_topic(TOPIC, {"retention.bytes": bytes_max})
        (done,) = self.log.maintain(TOPIC)
        self.log.alter_topic(TOPIC, {"retention.bytes": None})
        removed = 0
        for part in self.log.describe_topic(TOPIC).partitions:
            model = self.partitions[part.partition]
            assert model.start <= part.start_offset <= model.end
            removed += part.start_offset - model.start
            model.start = part.start_offset
        assert done.removed_records == removed

    @rule(time=st.integers(0, LAST_TIME))
    def remove_by_time(self, time: int) -> None:
        """What is older than a time goes while nothing younger is before it."""
        ago = self.log._storage.clock() // 1_000_000 - time
        self.log.alter_topic(TOPIC, {"retention.ms": ago})
        self.log.maintain(TOPIC)
        self.log.alter_topic(TOPIC, {"retention.ms": -1})
        for part in self.log.describe_topic(TOPIC).partitions:
            model = self.partitions[part.partition]
            gone = model.rows[model.start : part.start_offset]
            assert all(row[3] <= time + GRACE_MS for row in gone)
            model.start = part.start_offset

    @rule()
    def verify(self) -> None:
        assert self.log.verify(TOPIC).damage == ()

    @rule(partitions=st.integers(1, 3))
    def delete_and_create_the_topic(self, partitions: int) -> None:
        """Old handles say that it is gone; new ones see an empty topic."""
        self.log.delete_topic(TOPIC)
        for writer in self.writers:
            with pytest.raises(broker.UnknownTopic):
                writer.append([(0, encode([(None, b"x", None, 1)], "none"))], Author(new_token()))
        with pytest.raises(broker.UnknownTopic):
            self.reader.refresh()
        for follower in self.followed:
            with pytest.raises(broker.UnknownTopic):
                while follower.consumer.poll(0):
                    pass
        self.close_handles()
        self.create(partitions)
        self.writers = [self.log._open_writer(TOPIC) for _ in range(2)]
        self.reader = self.log._open_reader(TOPIC)
        assert self.log.describe_topic(TOPIC).incarnation == self.incarnation

    @rule(data=st.data(), byte_count=st.sampled_from([1, 200, 1000, 1 << 20]), fresh=st.booleans())
    def read(self, data: st.DataObject, byte_count: int, fresh: bool) -> None:
        """From any offset, with any limit, by an old or a fresh reader: at least one frame."""
        number = data.draw(st.integers(0, len(self.partitions) - 1))
        model = self.partitions[number]
        offset = data.draw(st.integers(0, model.end + 1))
        reader = self.log._open_reader(TOPIC) if fresh else self.reader
        try:
            reader.refresh()
            if not model.start <= offset <= model.end:
                with pytest.raises(broker.OffsetOutOfRange):
                    reader.fetch(number, offset, byte_count)
                return
            found = fetch(reader, number, offset, byte_count)
        finally:
            if fresh:
                reader.close()
        assert found == model.rows[offset : offset + len(found)]
        assert found or offset == model.end

    @rule(fresh=st.booleans())
    def look_up_times(self, fresh: bool) -> None:
        """Kafka's answer: the first offset whose timestamp is that time or later."""
        reader = self.log._open_reader(TOPIC) if fresh else self.reader
        reader.refresh()
        for number, model in enumerate(self.partitions):
            for time in range(LAST_TIME + 2):
                assert reader.offset_for_time(number, time * 1000) == model.first_at(time)
        if fresh:
            reader.close()

    @rule(target=followers)
    def follow(self) -> Follower:
        consumer = self.log.consumer(TOPIC, auto_offset_reset="earliest")
        starts = {number: model.start for number, model in enumerate(self.partitions)}
        follower = Follower(consumer, starts)
        self.followed.append(follower)
        return follower

    @rule(follower=followers, records_max=st.integers(1, 7))
    def poll(self, follower: Follower, records_max: int) -> None:
        """A follower gets the next records, or is told that they are gone."""
        if follower not in self.followed:
            return
        overtaken = [
            number
            for number, model in enumerate(self.partitions)
            if follower.positions.get(number, model.start) < model.start
        ]
        try:
            polled = follower.consumer.poll(0, max_records=records_max)
        except broker.OffsetOutOfRange as error:
            number = error.partition.partition
            assert number in overtaken
            follower.consumer.seek(error.partition, error.start)
            follower.positions[number] = self.partitions[number].start
            return
        for place, records in polled.items():
            model = self.partitions[place.partition]
            start = follower.positions.get(place.partition, model.start)
            assert [record.offset for record in records] == list(range(start, start + len(records)))
            found = [(r.key, r.value, header_of(r.headers), r.timestamp) for r in records]
            assert found == model.rows[start : start + len(records)]
            follower.positions[place.partition] = start + len(records)
        assert sum(map(len, polled.values())) <= records_max

    @rule(follower=consumes(followers))
    def stop_following(self, follower: Follower) -> None:
        if follower in self.followed:
            follower.consumer.close()
            self.followed.remove(follower)

    @invariant()
    def the_description_is_the_models(self) -> None:
        if not hasattr(self, "partitions"):
            return
        described = self.log.describe_topic(TOPIC)
        found = [(part.start_offset, part.end_offset) for part in described.partitions]
        assert found == [(model.start, model.end) for model in self.partitions]

    @rule()
    def read_everything(self) -> None:
        """A fresh reader, from start to end of every partition."""
        reader = self.log._open_reader(TOPIC)
        for number, model in enumerate(self.partitions):
            found: list[Row] = []
            while more := fetch(reader, number, model.start + len(found), 1 << 20):
                found += more
            assert found == model.rows[model.start :]
        reader.close()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.close_handles()
            shutil.rmtree(self.root)

    def close_handles(self) -> None:
        handles: list[Topic | TopicReader | Consumer] = [*self.writers, self.reader]
        handles += [follower.consumer for follower in self.followed]
        for handle in handles:
            handle.close()
        self.followed.clear()

    def existing(self, batch: dict[int, list[Row]]) -> dict[int, list[Row]]:
        return {number: some for number, some in batch.items() if number < len(self.partitions)}

    def add(self, partition: int, some: list[Row], commit_time: int) -> None:
        for key, value, header, time in some:
            row = key, value, header, commit_time if self.is_log_append else time
            self.partitions[partition].rows.append(row)


def header_list(value: bytes | None) -> list[tuple[str, bytes | None]] | None:
    return None if value is None else [("h", value)]


def header_of(headers: list[tuple[str, bytes]]) -> bytes | None:
    return headers[0][1] if headers else None


def encode(some: list[Row], codec: str) -> Frame:
    keys, values, headers, stamps = zip(*some, strict=True)
    listed = [header_list(header) for header in headers]
    return encode_records(
        list(keys),
        list(values),
        listed if any(listed) else None,
        [time * 1000 for time in stamps],
        codec,
    )


def fetch(reader: TopicReader, partition: int, offset: int, byte_count: int) -> list[Row]:
    """Read records as the model has them; their offsets follow each other."""
    found: list[Row] = []
    for fetched in reader.fetch(partition, offset, byte_count):
        assert fetched.base_offset == offset + len(found)
        for record in fetched.batch.to_pylist():
            headers = record["headers"]
            value = headers[0]["value"] if headers else None
            time = round(record["timestamp"].timestamp() * 1000)
            found.append((record["key"], record["value"], value, time))
    return found


TestTopic = TopicMachine.TestCase
TestTopic.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
