"""An open topic: commits, repetitions, what is forgotten and what is not."""

from __future__ import annotations

import threading

import pytest

import broker
from broker import batch
from broker.commit import Author
from broker.ledger import new_token
from broker.state import PRODUCER_EXPIRY_MS
from broker.storage import Storage
from broker.topic import Topic, create

WEEK = PRODUCER_EXPIRY_MS

pytestmark = pytest.mark.every_store


class Clock:
    """A clock that stands until it is moved; milliseconds."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now * 1_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def topic(storage: Storage, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Topic:
    monkeypatch.setattr(storage, "clock", clock)
    create(storage, "t", 1, partitions=2, config={"segment.bytes": 2000})
    return Topic(storage, "t", 1, write=True)


def frame(value: bytes = b"v") -> batch.Frame:
    return batch.encode_records([None], [value], None, [1])


def fill_a_file(topic: Topic) -> None:
    files = len(topic.state.files)
    while len(topic.state.files) == files:
        topic.append([(0, frame())], Author(new_token()))


def test_a_repetition_gets_the_answer_of_the_first_time(topic: Topic) -> None:
    author = Author(new_token(), 7, 0, 0)
    first = topic.append([(1, frame()), (0, frame())], author)
    again = topic.append([(1, frame()), (0, frame())], author)
    assert again.table == first.table
    assert topic.state.ends == [1, 1]


def test_a_gap_in_a_producers_sequence_is_refused(topic: Topic) -> None:
    topic.append([(0, frame())], Author(new_token(), 7, 0, 0))
    with pytest.raises(broker.SequenceError, match="sent sequence 2, expected 1"):
        topic.append([(0, frame())], Author(new_token(), 7, 2, 0))
    with pytest.raises(broker.SequenceError, match="sent sequence 5, expected 0"):
        topic.append([(0, frame())], Author(new_token(), 8, 5, 0))
    assert topic.state.ends == [1, 0]


def test_another_commit_under_the_same_sequence_is_not_taken_for_a_repetition(
    topic: Topic,
) -> None:
    topic.append([(0, frame())], Author(new_token(), 7, 0, 0))
    with pytest.raises(broker.SequenceError):
        topic.append([(0, frame())], Author(new_token(), 7, 0, 0))


def test_the_newest_owner_of_a_transactional_id_fences_the_others(topic: Topic) -> None:
    old, new = topic.fence(9), topic.fence(9)
    with pytest.raises(broker.ProducerFenced):
        topic.append([(0, frame())], Author(new_token(), 9, 1, old.epoch, True))
    topic.append([(0, frame())], Author(new_token(), 9, 1, new.epoch, True))
    assert topic.state.ends == [1, 0]


def test_a_silent_producer_is_forgotten_after_a_week(topic: Topic, clock: Clock) -> None:
    topic.append([(0, frame())], Author(new_token(), 7, 0, 0))
    clock.now += WEEK
    fill_a_file(topic)
    assert 7 in topic.state.producers
    clock.now += 1
    fill_a_file(topic)
    assert 7 not in topic.state.producers
    with pytest.raises(broker.SequenceError):
        topic.append([(0, frame())], Author(new_token(), 7, 1, 0))
    reopened = Topic(topic.storage, "t", 1)
    assert reopened.state.producers == topic.state.producers


def test_a_transactional_id_is_never_forgotten(topic: Topic, clock: Clock) -> None:
    topic.fence(9)
    clock.now += 100 * WEEK
    fill_a_file(topic)
    assert 9 in topic.state.producers


def test_an_applications_version_is_committed_once(topic: Topic) -> None:
    first = topic.append([(0, frame())], Author(new_token()), transaction=("job", 3))
    again = topic.append([(0, frame())], Author(new_token()), transaction=("job", 3))
    older = topic.append([(0, frame())], Author(new_token()), transaction=("job", 2))
    other = topic.append([(0, frame())], Author(new_token()), transaction=("other", 2))
    assert again.table == first.table
    assert (again.number, older.number) == (-1, -1)
    assert other.number > first.number
    assert topic.state.ends == [2, 0]


def test_the_versions_survive_a_reopening(topic: Topic) -> None:
    topic.append([(0, frame())], Author(new_token()), transaction=("job", 3))
    fill_a_file(topic)
    topic.close()
    reopened = Topic(topic.storage, "t", 1, write=True)
    assert reopened.append([(0, frame())], Author(new_token()), transaction=("job", 3)).number == -1
    reopened.close()


def test_commit_times_do_not_go_back_with_the_clock(topic: Topic, clock: Clock) -> None:
    before = topic.append([(0, frame())], Author(new_token())).time
    clock.now -= 60_000
    assert topic.append([(0, frame())], Author(new_token())).time == before


def test_log_append_time_is_the_commits_time(log: broker.Log) -> None:
    log.create_topic("t", config={"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        sent = producer.send("t", b"v", timestamp_ms=5).result(30)
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        (records,) = consumer.poll(1000).values()
    assert (records[0].timestamp, records[0].timestamp_type) == (sent.timestamp, 1)
    assert sent.timestamp > 5


def test_a_commit_stands_when_no_thread_can_begin_to_finish_its_file(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == topic._finisher._name:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fill_a_file(topic)
    topic.append([(0, frame(b"next"))], Author(new_token()))
    again = Topic(topic.storage, "t", 1)
    again.refresh()
    assert again.state.ends == topic.state.ends
    monkeypatch.undo()
    fill_a_file(topic)
