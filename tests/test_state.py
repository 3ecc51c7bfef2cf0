"""The state is a function of the commits: who read the same commits agrees on everything."""

from __future__ import annotations

import pytest

import broker
from broker import TopicPartition
from broker.batch import Frame, encode_records
from broker.commit import Author, Commit, FramePlace, Kind, pack, unpack
from broker.errors import CorruptLog, ProducerFenced, SequenceError
from broker.ledger import new_token
from broker.state import PRODUCER_EXPIRY_MS, TopicState
from broker.topic import Topic

FRAME = encode_records([None, None], [b"a", b"b"], None, [5000, 3000])


class Story:
    """Commits one after the other, applied to a state."""

    def __init__(self, partitions: int = 2) -> None:
        self.state = TopicState(incarnation=1)
        self.time = 1000
        self.tell(Kind.CREATE, details={"partitions": partitions, "config": {"retention.ms": 5}})

    def tell(
        self,
        kind: Kind,
        author: Author | None = None,
        frames: list[tuple[int, int, Frame | FramePlace]] | None = None,
        details: dict[str, object] | None = None,
    ) -> Commit:
        state = self.state
        place = {"incarnation": 1, "number": state.number, "position": state.position}
        parts, _, _ = pack(
            kind,
            author or Author(new_token()),
            time=self.time,
            frames=frames or [],
            details=details,
            **place,
        )
        data = b"".join(bytes(part) for part in parts)
        commit, _ = unpack(data, 0, path="a file", **place)
        assert commit is not None
        state.apply(commit, "a file")
        return commit

    def append(self, partition: int, author: Author | None = None) -> Commit:
        return self.tell(Kind.APPEND, author, [(partition, self.state.ends[partition], FRAME)])


def test_creation_gives_empty_partitions_and_settings() -> None:
    state = Story(3).state
    assert (state.starts, state.ends) == ([0, 0, 0], [0, 0, 0])
    assert state.given == {"retention.ms": 5}
    assert state.settings["retention.ms"] == 5
    assert (state.number, state.time) == (1, 1000)


def test_appends_move_the_ends_and_the_largest_time() -> None:
    story = Story()
    first = story.append(1)
    assert (story.state.ends, story.state.file_max_timestamp) == ([0, 2], 5000)
    assert story.state.position == first.position + first.length
    story.append(1)
    assert story.state.ends == [0, 4]


@pytest.mark.parametrize(("partition", "base"), [(0, 1), (0, -1), (1, 3), (2, 0)])
def test_an_append_that_does_not_follow_is_corruption(partition: int, base: int) -> None:
    story = Story()
    story.append(1)
    with pytest.raises(CorruptLog, match="do not follow"):
        story.tell(Kind.APPEND, frames=[(partition, base, FRAME)])


def test_new_partitions_are_empty_and_settings_are_replaced() -> None:
    story = Story()
    story.append(0)
    story.tell(Kind.CONFIG, details={"partitions": 4})
    assert (story.state.ends, story.state.given) == ([2, 0, 0, 0], {"retention.ms": 5})
    story.tell(Kind.CONFIG, details={"config": {"retention.bytes": 7}})
    assert story.state.given == {"retention.bytes": 7}
    assert story.state.settings["retention.ms"] == 604_800_000


def test_the_log_start_never_goes_back() -> None:
    story = Story()
    for _ in range(3):
        story.append(0)
    story.tell(Kind.TRUNCATE, details={"starts": {"0": 4}})
    story.tell(Kind.TRUNCATE, details={"starts": {"0": 2}})
    assert story.state.starts == [4, 0]


def test_an_ended_file_is_remembered_with_what_it_holds() -> None:
    story = Story()
    story.append(0)
    end = story.tell(Kind.END_OF_FILE)
    (file,) = story.state.files
    assert file == (0, 3, end.position + end.length, 5000, (0, 0), 1000)
    assert (story.state.file_number, story.state.position) == (3, 0)
    assert (story.state.file_starts, story.state.file_max_timestamp) == ((2, 0), -1)


def test_a_deleted_topic_stays_deleted() -> None:
    story = Story()
    story.tell(Kind.DELETE)
    assert story.state.is_deleted


def test_the_last_commit_of_a_producer_is_recognised_and_answered() -> None:
    story = Story()
    author = Author(new_token(), producer_id=7, sequence=0)
    assert story.state.repeated(author) is None
    commit = story.append(0, author)
    assert story.state.repeated(author) == commit.table
    following = Author(new_token(), producer_id=7, sequence=1)
    assert story.state.repeated(following) is None
    story.append(0, following)
    assert story.state.repeated(following) is not None
    with pytest.raises(SequenceError, match="sent sequence 0, expected 2"):
        story.state.repeated(author)


def test_a_gap_or_an_unknown_producer_that_does_not_begin_is_refused() -> None:
    story = Story()
    with pytest.raises(SequenceError, match="expected 0"):
        story.state.repeated(Author(new_token(), producer_id=7, sequence=1))
    story.append(0, Author(new_token(), producer_id=7, sequence=0))
    with pytest.raises(SequenceError, match="sent sequence 2, expected 1"):
        story.state.repeated(Author(new_token(), producer_id=7, sequence=2))


def test_another_commit_with_a_sequence_that_was_used_is_refused() -> None:
    story = Story()
    story.append(0, Author(new_token(), producer_id=7, sequence=0))
    with pytest.raises(SequenceError):
        story.state.repeated(Author(new_token(), producer_id=7, sequence=0))


def test_a_higher_epoch_fences_the_lower_one() -> None:
    story = Story()
    old = Author(new_token(), 7, 0, 0, is_transactional=True)
    new = Author(new_token(), 7, 0, 1, is_transactional=True)
    story.append(0, old)
    story.tell(Kind.APPEND, new)
    for zombie in (Author(new_token(), 7, 1, 0, True), old):
        with pytest.raises(ProducerFenced, match="epoch 0 is fenced.*epoch 1"):
            story.state.repeated(zombie)
    assert story.state.repeated(Author(new_token(), 7, 1, 1, True)) is None


def test_silent_producers_expire_but_transactional_ones_do_not() -> None:
    story = Story()
    story.append(0, Author(new_token(), producer_id=7))
    story.append(0, Author(new_token(), producer_id=8, is_transactional=True))
    late = story.time + PRODUCER_EXPIRY_MS
    assert story.state.expired_producers(late) == []
    assert story.state.expired_producers(late + 1) == [7]
    story.tell(Kind.EXPIRE, details={"producers": [7]})
    assert set(story.state.producers) == {8}


def test_the_last_version_of_each_application_is_kept() -> None:
    story = Story()
    story.tell(Kind.APPEND, frames=[(0, 0, FRAME)], details={"transaction": ["app", 3]})
    assert story.state.transactions["app"].version == 3
    story.tell(Kind.APPEND, frames=[(0, 2, FRAME)], details={"transaction": ["app", 4]})
    assert story.state.transactions["app"].version == 4
    assert story.state.finished("app", 5) is None
    assert story.state.finished("another", 0) is None
    for version in (3, 4):
        assert story.state.finished("app", version) == story.state.transactions["app"]


def test_an_epoch_ends_where_the_next_one_began() -> None:
    story = Story()
    story.append(0)
    story.tell(Kind.RECOVER, details={"epoch": 1, "ends": [2, 0]})
    story.append(0)
    story.tell(Kind.CONFIG, details={"partitions": 3})
    story.append(2)
    assert story.state.epoch == 1
    assert [story.state.end_of_epoch(0, partition) for partition in range(3)] == [2, 0, 0]
    assert [story.state.end_of_epoch(1, partition) for partition in range(3)] == [4, 0, 2]


def test_what_a_writer_knows_is_what_its_journal_says(log: broker.Log) -> None:
    log.create_topic("t", partitions=2, config={"segment.bytes": 1500, "checkpoint.commits": 4})
    writers = [log._open_writer("t") for _ in range(2)]
    sequences = [0, 0]
    for number in range(40):
        who = number % 3 % 2
        author = Author(new_token(), producer_id=who + 1, sequence=sequences[who])
        frames = [(number % 2, FRAME)] if number % 4 else [(0, FRAME), (1, FRAME)]
        transaction = ("app", number) if number % 5 == 0 else None
        writers[who].append(frames, author, transaction=transaction)
        sequences[who] += 1
        if number == 20:
            log.delete_records({TopicPartition("t", 0): 7})
            log.alter_topic("t", {"message.timestamp.type": "LogAppendTime"})
    states = [writer.refresh() for writer in writers]
    for name in ("checkpoint", "index"):
        for path in writers[0].storage.list(f"{writers[0].directory}/{name}"):
            writers[0].storage.remove(f"{writers[0].directory}/{name}/{path}")
    fresh = Topic(writers[0].storage, "t", 1)
    assert states[0] == states[1] == fresh.state
    assert len(fresh.state.files) > 3
    for topic in (*writers, fresh):
        topic.close()


def test_a_commit_of_very_many_frames_is_known_to_its_writer_as_to_readers(
    log: broker.Log,
) -> None:
    log.create_topic("t")
    writer = log._open_writer("t")
    frames = [(0, FRAME)] * 600
    writer.append(frames, Author(new_token()), transaction=("app", 1))
    fresh = Topic(writer.storage, "t", 1)
    assert writer.state == fresh.state
    assert fresh.state.ends == [1200]
    writer.close()
    fresh.close()
