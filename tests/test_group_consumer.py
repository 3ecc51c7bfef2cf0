"""Members of a group in one process: shares, hand-over, positions, static members."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import Log, OffsetAndMetadata, TopicPartition
from broker.consumer import Consumer
from broker.group import group as journal
from broker.group.assignment import Subscriber
from broker.storage import LocalStorage

pytestmark = pytest.mark.any_store

PACE = {"session_timeout_ms": 3000, "heartbeat_interval_ms": 200}


def at(partition: int, topic: str = "t") -> TopicPartition:
    return TopicPartition(topic, partition)


@pytest.fixture
def log(root: Path) -> Log:
    log = broker.open(root)
    log.create_topic("t", partitions=4)
    return log


class Members:
    """Opens consumers of a group and closes what is left of them."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.open: list[Any] = []

    def __call__(self, *topics: str, **options: Any) -> Any:
        given = {"group_id": "g", "auto_offset_reset": "earliest", **PACE, **options}
        consumer = self.log.consumer(*topics, **given)
        self.open.append(consumer)
        return consumer


@pytest.fixture
def members(log: Log) -> Iterator[Members]:
    made = Members(log)
    yield made
    for consumer in made.open:
        with contextlib.suppress(broker.LogError):
            consumer.close()


def fill(log: Log, count: int, topic: str = "t", partitions: int = 4) -> None:
    with log.producer() as producer:
        for number in range(count):
            producer.send(topic, str(number).encode(), partition=number % partitions)


def poll_until(
    consumers: Sequence[Consumer], is_done: Callable[[], bool], seconds: float = 30
) -> list[Any]:
    """Poll all of them in turn until the condition holds; return all records."""
    records = []
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "the group did not get there in time"
        for consumer in consumers:
            for many in consumer.poll(20).values():
                records += many
    return records


def settle(*consumers: Consumer, partitions: int = 4) -> list[Any]:
    def is_settled() -> bool:
        shares = [consumer.assignment() for consumer in consumers]
        return (
            len(set().union(*shares)) == sum(map(len, shares)) == partitions
            and max(map(len, shares)) - min(map(len, shares)) <= 1
        )

    return poll_until(consumers, is_settled)


@pytest.mark.every_store
def test_one_member_reads_everything(log: Log, members: Members) -> None:
    fill(log, 100)
    one = members("t")
    seen: list[Any] = []
    poll_until([one], lambda: bool(one.assignment()))
    one.seek_to_beginning()
    deadline = time.monotonic() + 30
    while len(seen) < 100 and time.monotonic() < deadline:
        seen += [r.value for many in one.poll(100).values() for r in many]
    assert sorted(map(int, seen)) == list(range(100))


@pytest.mark.every_store
def test_members_share_and_each_record_goes_to_one(log: Log, members: Members) -> None:
    one, two = members("t"), members("t")
    settle(one, two)
    fill(log, 200)
    seen: list[Any] = []
    while len(seen) < 200:
        for consumer in (one, two):
            for place, records in consumer.poll(100).items():
                assert place in consumer.assignment()
                seen += [(r.partition, r.offset) for r in records]
    assert len(set(seen)) == 200
    assert not one.assignment() & two.assignment()


def test_groups_see_everything_each(log: Log, members: Members) -> None:
    fill(log, 40)
    for group_id in ("g", "h"):
        consumer = members("t", group_id=group_id)
        seen = 0
        while seen < 40:
            seen += sum(map(len, consumer.poll(100).values()))
        assert seen == 40


@pytest.mark.every_store
def test_a_new_group_goes_on_where_the_old_members_stopped(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members("t", enable_auto_commit=False)
    settle(one)
    one.seek_to_beginning()
    one.commit({at(0): 3, at(1): OffsetAndMetadata(10, "done")})
    assert one.committed(at(0)) == 3
    assert one.committed(at(1), metadata=True) == OffsetAndMetadata(10, "done")
    assert one.committed(at(2)) is None
    one.close()
    assert log.group_positions("g") == {at(0): 3, at(1): 10}
    two = members("t", enable_auto_commit=False)
    poll_until([two], lambda: len(two.assignment()) == 4)
    two.seek(at(2), 0)
    two.seek(at(3), 0)
    assert two.committed(at(1)) == 10


def read_all(consumer: Consumer, count: int) -> list[Any]:
    seen: list[Any] = []
    deadline = time.monotonic() + 30
    while len(seen) < count and time.monotonic() < deadline:
        seen += [record for many in consumer.poll(100).values() for record in many]
    return seen


@pytest.mark.every_store
def test_closing_commits_what_was_given_out(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members("t")
    assert len(read_all(one, 40)) == 40
    one.close()
    assert set(log.group_positions("g").values()) == {10}
    assert members("t").poll(300) == {}


def test_closing_after_a_pause_commits_too(log: Log, members: Members) -> None:
    """Longer than what was read of the group may be believed without looking again."""
    fill(log, 40)
    one = members("t")
    assert len(read_all(one, 40)) == 40
    time.sleep(PACE["session_timeout_ms"] / 3000 + 0.2)
    one.close()
    assert set(log.group_positions("g").values()) == {10}


def test_closing_after_an_eviction_commits_nothing_and_says_so(
    log: Log, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    fill(log, 40)
    one = members("t")
    assert len(read_all(one, 40)) == 40
    evict(log, one)
    one.close()
    assert log.group_positions("g") == {}
    assert "leaving group 'g' without a commit" in caplog.text


def test_closing_commits_what_was_assigned_by_hand(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members()
    one.assign([at(0), at(1)])
    assert len(read_all(one, 20)) == 20
    one.close()
    assert log.group_positions("g") == {at(0): 10, at(1): 10}


def consume_by_poll(consumer: Consumer) -> None:
    read_all(consumer, 1)
    raise KeyError("the records were not dealt with")


def consume_by_iteration(consumer: Consumer) -> None:
    for _record in consumer:
        raise KeyError("the record was not dealt with")


@pytest.mark.parametrize("consume", [consume_by_poll, consume_by_iteration])
def test_a_block_that_fails_commits_nothing(
    log: Log, members: Members, consume: Callable[[Consumer], None]
) -> None:
    fill(log, 40)
    with pytest.raises(KeyError), members("t") as one:
        consume(one)
    assert log.group_positions("g") == {}
    assert log.describe_group("g").state == "empty", "it has left all the same"


def test_a_block_that_fails_after_an_assign_by_hand_commits_nothing_more(
    log: Log, members: Members
) -> None:
    fill(log, 40)
    with pytest.raises(KeyError), members() as one:
        one.assign([at(0)])
        consume_by_poll(one)
    assert set(log.group_positions("g").values()) <= {0}


@pytest.mark.on_disk
def test_a_member_waits_for_the_others_no_longer_than_asked(
    log: Log, members: Members, root: Path
) -> None:
    fill(log, 40)
    one = members("t", request_timeout_ms=100, enable_auto_commit=False)
    assert len(read_all(one, 40)) == 40
    other = LocalStorage(str(root)).lock("group=g")
    other.acquire(1000)
    try:
        begun = time.monotonic()
        with pytest.raises(broker.LockTimeout, match="100 ms"):
            one.commit()
        assert time.monotonic() - begun < 5
    finally:
        other.release()
        other.close()
    one.commit()
    assert set(log.group_positions("g").values()) == {10}


def test_without_auto_commit_nothing_is_committed(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members("t", enable_auto_commit=False)
    read_all(one, 40)
    one.close()
    assert log.group_positions("g") == {}


@pytest.mark.every_store
def test_auto_commit_happens_while_polling(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members("t", auto_commit_interval_ms=10)
    read_all(one, 40)
    poll_until([one], lambda: sum(log.group_positions("g").values()) == 40)
    number = journal.Group(log._storage, "g", 1).state.number
    time.sleep(0.05)
    one.poll(30)
    again = journal.Group(log._storage, "g", 1).state.number
    assert again == number, "what has not moved was committed again"


def test_auto_commit_never_covers_records_of_the_same_poll(log: Log, members: Members) -> None:
    fill(log, 40)
    one = members("t", auto_commit_interval_ms=0, max_poll_records=5)
    given: dict[TopicPartition, int] = {}
    for _ in range(40):
        committed = dict(given)
        for place, records in one.poll(50).items():
            given[place] = records[-1].offset + 1
        now = log.group_positions("g")
        assert all(now.get(place, 0) <= committed.get(place, 0) for place in now)


def test_iteration_commits_what_was_asked_beyond(log: Log, members: Members) -> None:
    log.create_topic("single")
    fill(log, 20, "single", 1)
    one = members("single", max_poll_records=8)
    seen = []
    for record in one:
        seen.append(record.offset)
        if record.offset == 12:
            one.commit()
            assert one.committed(at(0, "single")) == 13
        if len(seen) == 20:
            break
    assert seen == list(range(20))
    one.close()
    assert log.group_positions("g") == {at(0, "single"): 20}


def test_breaking_off_an_iteration_leaves_the_rest_for_the_next(log: Log, members: Members) -> None:
    log.create_topic("single")
    fill(log, 20, "single", 1)
    one = members("single")
    for record in one:
        if record.offset == 4:
            break
    one.close()
    two = members("single", consumer_timeout_ms=3000)
    assert next(iter(two)).offset == 5


class Recorder(broker.ConsumerRebalanceListener):
    def __init__(self) -> None:
        self.heard: list[tuple[str, list[int]]] = []

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.heard.append(("revoked", sorted(place.partition for place in revoked)))

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.heard.append(("assigned", sorted(place.partition for place in assigned)))

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        self.heard.append(("lost", sorted(place.partition for place in lost)))


def test_listeners_hear_what_comes_and_goes(log: Log, members: Members) -> None:
    one, two = members(), members()
    first, second = Recorder(), Recorder()
    one.subscribe(["t"], listener=first)
    settle(one)
    two.subscribe(["t"], listener=second)
    settle(one, two)
    assert first.heard == [("assigned", [0, 1, 2, 3]), ("revoked", [2, 3])]
    assert second.heard == [("assigned", [2, 3])]
    one.close()
    assert first.heard[2:] == [("revoked", [0, 1])]
    settle(two)
    assert second.heard[1:] == [("assigned", [0, 1])]


@pytest.mark.every_store
def test_the_rest_goes_on_during_a_hand_over(log: Log, members: Members) -> None:
    """A partition that is being handed over does not stop the others."""
    one = members("t")
    settle(one)
    two = members("t")
    two.poll(0)
    two.poll(300)  # It joins, and waits; `one` is still to give up its share.
    fill(log, 4)
    before = one.generation
    seen = {record.partition for many in one.poll(1000).values() for record in many}
    assert seen, f"nothing was read in generation {before}"


@pytest.mark.every_store
def test_a_revoked_listener_may_still_commit(log: Log, members: Members) -> None:
    class Committing(Recorder):
        def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
            one.commit({place: 7 for place in revoked})

    fill(log, 40)
    one = members(enable_auto_commit=False)
    one.subscribe(["t"], listener=Committing())
    settle(one)
    two = members("t")
    settle(one, two)
    assert log.group_positions("g") == dict.fromkeys(two.assignment(), 7)


def test_a_revoked_listener_may_still_commit_at_close(log: Log, members: Members) -> None:
    class Committing(Recorder):
        def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
            one.commit({place: 7 for place in revoked})

    fill(log, 40)
    one = members(enable_auto_commit=False)
    one.subscribe(["t"], listener=Committing())
    settle(one)
    one.close()
    assert set(log.group_positions("g").values()) == {7}


def test_partitions_that_appear_are_shared_and_read_from_their_beginning(
    log: Log, members: Members
) -> None:
    # With time enough that nobody is evicted: what an evicted member has read is read again.
    patient = {"session_timeout_ms": 60_000, "metadata_max_age_ms": 50}
    one = members("t", auto_offset_reset="latest", **patient)
    two = members("t", auto_offset_reset="latest", **patient)
    settle(one, two)
    log.create_partitions("t", 6)
    with log.producer() as producer:
        producer.send("t", b"early", partition=5).result(30)
    records = settle(one, two, partitions=6)
    records += poll_until([one, two], lambda: True)
    deadline = time.monotonic() + 20
    while not records and time.monotonic() < deadline:
        records = [r for c in (one, two) for many in c.poll(50).values() for r in many]
    assert [record.value for record in records] == [b"early"]


def test_topics_that_fit_a_pattern_are_shared_when_they_appear(log: Log, members: Members) -> None:
    log.create_topic("ord-a", partitions=2)
    one, two = members(metadata_max_age_ms=50), members(metadata_max_age_ms=50)
    one.subscribe(pattern="ord-.*")
    two.subscribe(pattern="ord-.*")
    settle(one, two, partitions=2)
    log.create_topic("ord-b", partitions=4)
    settle(one, two, partitions=6)
    log.delete_topic("ord-b")
    settle(one, two, partitions=2)


def test_members_may_want_different_topics(log: Log, members: Members) -> None:
    log.create_topic("u", partitions=2)
    one, two = members("t"), members("u")
    poll_until([one, two], lambda: len(one.assignment()) == 4 and len(two.assignment()) == 2)
    assert {place.topic for place in two.assignment()} == {"u"}


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky", ["sticky", "range"]])
def test_every_strategy_shares(log: Log, members: Members, strategy: Any) -> None:
    one = members("t", partition_assignment_strategy=strategy)
    two = members("t", partition_assignment_strategy=strategy)
    settle(one, two)


def test_a_users_function_decides(log: Log, members: Members) -> None:
    def evens_first(
        subscribers: Sequence[Subscriber], partitions: Mapping[str, int]
    ) -> dict[str, list[TopicPartition]]:
        shares = {subscriber.member_id: [] for subscriber in subscribers}  # type: ignore[var-annotated]
        ids = list(shares)
        for number in range(partitions["t"]):
            shares[ids[number % 2 % len(ids)]].append(at(number))
        return shares

    one = members("t", partition_assignment_strategy=evens_first)
    settle(one)
    two = members("t", partition_assignment_strategy=evens_first)
    settle(one, two)
    assert one.assignment() == {at(0), at(2)}


def test_a_wrong_function_fails_the_poll(log: Log, members: Members) -> None:
    def twice(subscribers: Sequence[Subscriber], _: Mapping[str, int]) -> Any:
        return {subscriber.member_id: [at(0), at(0)] for subscriber in subscribers}

    one = members("t", partition_assignment_strategy=twice)
    with pytest.raises(broker.InvalidOption, match="gives it away twice"):
        poll_until([one], lambda: False)


def evict(log: Log, consumer: Any) -> None:
    group = log._groups.open("g", write=True)
    assert group.evict([consumer.member_id], by=None, is_dead=lambda _: True)
    group.close()


@pytest.mark.every_store
def test_an_evicted_member_cannot_commit_and_comes_back_as_another(
    log: Log, members: Members
) -> None:
    fill(log, 4)
    one = members(enable_auto_commit=False)
    recorder = Recorder()
    one.subscribe(["t"], listener=recorder)
    assert len(read_all(one, 4)) == 4
    before = one.member_id
    evict(log, one)
    with pytest.raises(broker.CommitFailed, match="no longer a member"):
        one.commit()
    assert log.group_positions("g") == {}
    again = read_all(one, 4)
    assert len(again) == 4, "what was not committed is read again"
    assert one.member_id != before
    assert [what for what, _ in recorder.heard] == ["assigned", "lost", "assigned"]


def test_who_does_not_poll_leaves(log: Log, members: Members) -> None:
    slow = members("t", max_poll_interval_ms=400)
    settle(slow)
    quick = members("t")
    poll_until([quick], lambda: len(quick.assignment()) == 4)
    with pytest.raises(broker.CommitFailed):
        slow.commit({at(0): 1})
    settle(slow, quick)


def test_a_slow_loop_body_does_not_go_on_with_what_is_anothers(log: Log, members: Members) -> None:
    log.create_topic("single")
    fill(log, 20, "single", 1)
    slow = members("single", max_poll_interval_ms=1000)
    records = iter(slow)
    assert next(records).offset == 0
    quick = members("single")
    assert len(read_all(quick, 20)) == 20
    quick.close()
    fill(log, 1, "single", 1)
    assert next(records).offset == 20


@pytest.mark.every_store
def test_a_static_member_keeps_its_share_over_a_restart(log: Log, members: Members) -> None:
    one = members("t", group_instance_id="one")
    two = members("t", group_instance_id="two")
    settle(one, two)
    share, generation = one.assignment(), two.generation
    one.close()
    begun = time.monotonic()
    back = members("t", group_instance_id="one")
    poll_until([back, two], lambda: back.assignment() == share)
    assert time.monotonic() - begun < 1, "a clean restart does not wait"
    assert back.generation == two.generation == generation


def test_a_static_restart_lets_nobody_look_at_the_topics_again(log: Log, members: Members) -> None:
    """A look reads all that was committed since the last one, and reading waits for it."""
    one = members("t", group_instance_id="one")
    two = members("t", group_instance_id="two")
    settle(one, two)
    looked = two._membership._rebalancer._looked
    one.close()
    back = members("t", group_instance_id="one")
    settle(back, two)
    for _ in range(10):
        two.poll(50)
    assert two._membership._rebalancer._looked == looked


def test_who_has_not_looked_at_the_topics_lately_believes_who_has(
    log: Log, members: Members
) -> None:
    one, two = members("t"), members("t")
    settle(one, two)
    generation = one.generation
    log.create_partitions("t", 6)
    one._membership._rebalancer._looked = float("-inf")
    poll_until([one, two], lambda: len(one.assignment()) + len(two.assignment()) == 6)
    for _ in range(20):
        one.poll(20)
        two.poll(20)
    assert one.generation == two.generation == generation + 1


@pytest.mark.every_store
def test_a_second_process_with_the_same_instance_fences_the_first(
    log: Log, members: Members
) -> None:
    one = members("t", group_instance_id="one")
    settle(one)
    begun = time.monotonic()
    two = members("t", group_instance_id="one")
    poll_until([two], lambda: len(two.assignment()) == 4)
    assert time.monotonic() - begun >= 1, "the first may deliver for a third of the timeout"
    for call in (one.poll, one.commit, lambda: next(one)):
        with pytest.raises(broker.FencedInstanceId, match="'one'"):
            call()
    one.close()
    assert len(two.assignment()) == 4
    two.poll(10)


def test_a_member_whose_last_commit_is_refused_still_leaves(log: Log, members: Members) -> None:
    fill(log, 4)
    one = members("t", group_instance_id="one")
    assert len(read_all(one, 4)) == 4
    two = members("t", group_instance_id="one")
    two.poll(0)
    one.close()
    begun = time.monotonic()
    three = members("t", group_instance_id="one")
    assert len(read_all(three, 4)) == 4, "nothing was committed"
    assert time.monotonic() - begun < 30
    assert log.group_positions("g") == {}


def test_a_static_member_that_stays_away_loses_its_share(log: Log, members: Members) -> None:
    pace = {"session_timeout_ms": 900, "heartbeat_interval_ms": 100}
    one = members("t", group_instance_id="one", **pace)
    two = members("t", group_instance_id="two", **pace)
    settle(one, two)
    one.close()
    poll_until([two], lambda: len(two.assignment()) == 4)


@pytest.mark.every_store
def test_a_group_deleted_under_a_member_stops_it(log: Log, members: Members) -> None:
    one = members("t")
    settle(one)
    group = log._groups.open("g", write=True)
    group._change(journal.Kind.DELETE, lambda state: {})  # As a tool would that sees no members.
    for call in (lambda: one.poll(50), lambda: one.commit({at(0): 1}), one.commit):
        with pytest.raises(broker.UnknownGroup, match="was deleted"):
            call()
    group.close()


@pytest.mark.on_disk
def test_a_member_reads_what_the_group_lost_in_a_power_cut_only_when_told(
    log: Log, members: Members, root: Path
) -> None:
    fill(log, 40)
    log.publish_positions("g", {at(0): 10})
    journal_file = root / "topics/t/1/journal" / f"{0:020d}.log"
    with open(journal_file, "r+b") as file:
        file.truncate(len(journal_file.read_bytes()) // 2)
    after = Log(LocalStorage(str(root), boot_id="another boot"))
    fill(after, 40)
    with after.consumer("t", group_id="g", auto_offset_reset="earliest", **PACE) as one:
        lost = r"position 10 in t-0 is lost: a power cut took the offsets \[\d, 10\)"
        with pytest.raises(broker.LostPosition, match=lost):
            poll_until([one], lambda: False)
        one.seek(at(0), 0)
        assert read_all(one, 1)


@pytest.mark.every_store
def test_assign_reads_outside_the_group_and_commits_while_it_is_empty(
    log: Log, members: Members
) -> None:
    fill(log, 40)
    log.publish_positions("g", {at(0): 5})
    with log.consumer(group_id="g", auto_offset_reset="earliest") as outside:
        outside.assign([at(0), at(1)])
        assert len(read_all(outside, 15)) == 15
        outside.commit()
        assert log.group_positions("g") == {at(0): 10, at(1): 10}
        one = members("t")
        settle(one)
        with pytest.raises(broker.GroupNotEmpty, match="has 1 active member"):
            outside.commit({at(0): 1})


@pytest.mark.parametrize("topics", [(), ("t",)])
def test_a_partition_that_does_not_exist_is_not_committed(
    log: Log, members: Members, topics: tuple[str, ...]
) -> None:
    one = members(*topics)
    if topics:
        settle(one)
    else:
        one.assign([at(0)])
    for partition in (4, 99, -1):
        with pytest.raises(broker.UnknownPartition, match=f"'t' has no partition {partition}"):
            one.commit({at(0): 0, at(partition): 3})
    assert at(99) not in log.group_positions("g")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_id": ""}, "group_id='' is not a text"),
        ({"group_id": None, "group_instance_id": "x"}, "group_instance_id needs a group_id"),
        ({"heartbeat_interval_ms": 2000}, "is over a third of session_timeout_ms=3000"),
        ({"partition_assignment_strategy": "stiky"}, "is not one of range, roundrobin, sticky"),
        ({"partition_assignment_strategy": []}, "partition_assignment_strategy is empty"),
        ({"enable_auto_commit": "no"}, "enable_auto_commit='no': use True or False"),
    ],
)
def test_wrong_options_are_named(members: Members, options: dict[str, Any], message: str) -> None:
    with pytest.raises(broker.InvalidOption) as caught:
        members("t", **options)
    assert message in str(caught.value)


def test_without_a_group_there_is_nothing_to_commit(log: Log) -> None:
    with log.consumer("t") as consumer:
        for call in (consumer.commit, lambda: consumer.committed(at(0)), consumer.commit_async):
            with pytest.raises(broker.InvalidOption, match="needs a consumer group"):
                call()
        with pytest.raises(broker.InvalidOption, match="a listener needs"):
            consumer.subscribe(["t"], listener=Recorder())


def test_commit_async_tells_what_came_of_it(log: Log, members: Members) -> None:
    one = members("t", enable_auto_commit=False)
    settle(one)
    told: list[Any] = []
    done = one.commit_async({at(0): 1}, callback=lambda *what: told.append(what))
    assert done.result(10) is None
    evict(log, one)
    failed = one.commit_async({at(0): 2}, callback=lambda *what: told.append(what))
    assert isinstance(failed.exception(10), broker.CommitFailed)
    assert [error is None for _, error in told] == [True, False]


@pytest.mark.on_disk
def test_members_come_and_go_without_leftovers(log: Log, members: Members, root: Path) -> None:
    for _ in range(3):
        one = members("t")
        settle(one)
        one.close()
    assert list((root / "groups/g/1/leases").iterdir()) == []
