"""What a person sees of a group and does to it, in Python and by command."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import Log, Reset, TopicPartition
from broker.cli import app
from broker.group import groups
from broker.group.lease import LeaseWatch
from broker.storage import LocalStorage

FIRST, SECOND = TopicPartition("t", 0), TopicPartition("t", 1)
START_MS = 1_700_000_000_000

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def log(root: Path) -> Log:
    """Two partitions of ten records, a second apart."""
    log = broker.open(root)
    log.create_topic("t", partitions=2)
    with log.producer() as producer:
        for number in range(20):
            producer.send(
                "t",
                str(number).encode(),
                partition=number % 2,
                timestamp_ms=START_MS + number // 2 * 1000,
            )
    return log


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("SPARK_LOG_ROOT", str(root))

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        texts = [str(argument) for argument in arguments]
        code = app.run(texts)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(texts, code, out, err)

    return call


def member(log: Log, **options: Any) -> Any:
    """Return a consumer that has all partitions."""
    pace = {"session_timeout_ms": 1200, "heartbeat_interval_ms": 100}
    consumer = log.consumer(
        "t", group_id="g", auto_offset_reset="earliest", client_id="me", **pace, **options
    )
    deadline = time.monotonic() + 30
    while len(consumer.assignment()) < 2:
        assert time.monotonic() < deadline
        consumer.poll(100, max_records=1)
    return consumer


def abandon(consumer: Any) -> None:
    """Let a member die without leaving."""
    membership = consumer._membership
    membership._stop.set()
    membership._thread.join()
    consumer._membership = None
    membership._rebalancer.close()
    consumer.close()


def test_a_query_shows_beside_consumers_with_its_lag(log: Log) -> None:
    log.publish_positions("query", {FIRST: 4, SECOND: 10})
    found = log.describe_group("query")
    assert (found.state, found.members, found.lag) == ("empty", (), 6)
    one, two = found.partitions
    assert (one.partition, one.position, one.end_offset, one.lag) == (FIRST, 4, 10, 6)
    assert (two.lag, two.lag_seconds) == (0, 0.0)
    waited = time.time() - (START_MS / 1000 + 4)
    assert one.lag_seconds == pytest.approx(waited, abs=60)
    assert found.lag_seconds == one.lag_seconds


def test_members_are_described_with_their_share(log: Log) -> None:
    with member(log) as consumer:
        found = log.describe_group("g")
        (described,) = found.members
        assert (described.member_id, described.client_id) == (consumer.member_id, "me")
        assert described.partitions == (FIRST, SECOND)
        assert (found.state, found.strategy, found.generation) == ("stable", "sticky", 1)
        assert [one.member_id for one in found.partitions] == [consumer.member_id] * 2
        assert [one.lag for one in found.partitions] == [None, None], "nothing is committed yet"
        consumer.seek(FIRST, 5)
        consumer.commit({FIRST: 5})
        assert log.describe_group("g").partitions[0].lag == 5
    assert log.describe_group("g").state == "empty"


def test_what_retention_removed_is_no_lag(log: Log) -> None:
    log.publish_positions("g", {FIRST: 2})
    log.delete_records({FIRST: 7})
    (found,) = log.describe_group("g").partitions
    assert (found.position, found.start_offset, found.lag) == (2, 7, 3)


def test_an_unknown_group_is_not_described(log: Log) -> None:
    with pytest.raises(broker.UnknownGroup, match="group 'nobody' does not exist"):
        log.describe_group("nobody")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Reset("earliest"), 1),
        (Reset("latest"), 10),
        (Reset("offset", 7), 7),
        (Reset("offset", 0), 1),
        (Reset("offset", 99), 10),
        (Reset("time", START_MS + 2500), 3),
        (Reset("time", START_MS + 99_000), 10),
        (Reset("shift", 2), 6),
        (Reset("shift", -9), 1),
        (Reset("shift", 99), 10),
    ],
)
def test_a_reset_lands_in_the_partition(log: Log, rule: Reset, expected: int) -> None:
    log.delete_records({FIRST: 1})
    log.publish_positions("g", {FIRST: 4})
    planned = log.plan_reset("g", [FIRST], rule)
    assert planned == {FIRST: expected}
    assert log.group_positions("g") == {FIRST: 4}, "a plan changes nothing"
    log.reset_group("g", planned)
    assert log.group_positions("g") == {FIRST: expected}


def test_a_position_that_is_not_there_cannot_be_shifted(log: Log) -> None:
    with pytest.raises(broker.InvalidOption, match="t-1 has no position to shift"):
        log.plan_reset("g", [SECOND], Reset("shift", 1))


def test_a_position_that_a_power_cut_took_is_shown_and_not_shifted(
    log: Log, root: Path, run: Run
) -> None:
    log.publish_positions("g", {FIRST: 10})
    journal = root / "topics/t/1/journal" / f"{0:020d}.log"
    with open(journal, "r+b") as file:
        file.truncate(journal.stat().st_size // 2)
    after = Log(LocalStorage(str(root), boot_id="another boot"))
    with after.producer() as producer:
        for number in range(40):
            producer.send("t", b"new", partition=number % 2)
    (lag,) = after.describe_group("g").partitions
    assert (lag.position, lag.is_lost) == (10, True)
    assert lag.lag is not None and lag.lag > lag.end_offset - 10
    with pytest.raises(broker.LostPosition, match="position 10 in t-0 is lost"):
        after.plan_reset("g", [FIRST], Reset("shift", -1))
    told = run("group", "describe", "g").stderr
    assert "t-0: a power cut took records before position 10" in told
    after.reset_group("g", {FIRST: 10})
    assert not after.describe_group("g").partitions[0].is_lost


def test_a_reset_past_the_end_is_refused(log: Log) -> None:
    with pytest.raises(broker.OffsetOutOfRange):
        log.reset_group("g", {FIRST: 11})
    assert log.groups() == []


@pytest.mark.parametrize("partition", [2, 99, -1])
@pytest.mark.parametrize("name", ["reset_group", "publish_positions"])
def test_a_partition_that_does_not_exist_gets_no_position(
    log: Log, name: str, partition: int
) -> None:
    with pytest.raises(broker.UnknownPartition, match=f"has no partition {partition}; it has 2"):
        getattr(log, name)("g", {FIRST: 3, TopicPartition("t", partition): 3})
    assert log.groups() == []


def test_a_partition_that_was_added_gets_a_position(log: Log) -> None:
    added = TopicPartition("t", 2)
    with log.consumer(group_id="g", enable_auto_commit=False) as consumer:
        consumer.assign([FIRST])
        broker.open(log.root).create_partitions("t", 3)
        consumer.commit({added: 0})
        assert consumer.committed(added) == 0
    log.publish_positions("h", {added: 0})
    assert log.group_positions("h") == {added: 0}


def test_positions_in_a_topic_that_was_made_again_smaller_are_taken_and_not_believed(
    log: Log,
) -> None:
    log.publish_positions("g", {FIRST: 3, SECOND: 4})
    held = log.located_positions("g")
    log.delete_topic("t")
    log.create_topic("t", partitions=1)
    log.publish_positions("g", held)
    assert log.group_positions("g") == {}
    with pytest.raises(broker.UnknownPartition):
        log.publish_positions("g", {SECOND: 4})


@pytest.mark.parametrize(
    "act",
    [
        lambda log: log.reset_group("g", {FIRST: 0}),
        lambda log: log.publish_positions("g", {FIRST: 0}),
        lambda log: log.delete_group("g"),
    ],
)
def test_a_group_with_a_living_member_is_left_alone(log: Log, act: Any) -> None:
    with member(log) as consumer:
        with pytest.raises(broker.GroupNotEmpty, match="has 1 active member"):
            act(log)
        consumer.commit({FIRST: 3})
        assert log.group_positions("g") == {FIRST: 3}


def test_who_publishes_often_waits_for_a_heartbeat_once(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches: list[LeaseWatch] = []

    class Counted(LeaseWatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watches.append(self)

    monkeypatch.setattr(groups, "LeaseWatch", Counted)
    with member(log):
        for _ in range(3):
            with pytest.raises(broker.GroupNotEmpty):
                log.publish_positions("g", {FIRST: 0})
        assert len(watches) == 1
    log.publish_positions("g", {FIRST: 2})
    assert log.group_positions("g")[FIRST] == 2


def test_the_dead_do_not_keep_a_group_from_being_reset(log: Log) -> None:
    abandon(member(log))
    assert log.describe_group("g").state == "stable"
    log.reset_group("g", {FIRST: 3})
    assert log.group_positions("g") == {FIRST: 3}
    assert log.describe_group("g").state == "empty"


def test_a_static_member_that_closed_does_not_keep_it_either(log: Log) -> None:
    member(log, group_instance_id="one", enable_auto_commit=False).close()
    begun = time.monotonic()
    log.delete_group("g")
    assert time.monotonic() - begun < 1.0
    assert log.groups() == []


def test_maintenance_lets_positions_expire(log: Log) -> None:
    log.publish_positions("g", {FIRST: 3})
    log.alter_group("g", {"offsets.retention.minutes": 5})
    log.maintain()
    assert log.group_positions("g") == {FIRST: 3}
    later = broker.log.Log(
        broker.storage.LocalStorage(log.root, clock=lambda: time.time_ns() + 6 * 60 * 10**9)
    )
    later.maintain()
    assert log.group_positions("g") == {}
    assert later.metrics()["maintenance-metrics"]["expired-positions-total"] == 1
    assert log.describe_group("g").config == {"offsets.retention.minutes": 5}


def hours_on(log: Log, hours: int) -> Log:
    """Return the log as it is seen when that time has passed."""
    return Log(LocalStorage(log.root, clock=lambda: time.time_ns() + hours * 3600 * 10**9))


def test_positions_expire_after_the_last_member_was_killed(log: Log) -> None:
    consumer = member(log)
    consumer.commit({FIRST: 3})
    log.alter_group("g", {"offsets.retention.minutes": 1})
    abandon(consumer)
    log.maintain()
    assert log.describe_group("g").state == "stable", "it was silent for a moment only"
    time.sleep(1.3)
    hours_on(log, 1).maintain()
    assert log.describe_group("g").state == "empty", "from here on its positions get old"
    assert log.group_positions("g") == {FIRST: 3}
    hours_on(log, 2).maintain()
    assert log.group_positions("g") == {}


def test_maintenance_does_not_wait_for_those_who_live(log: Log) -> None:
    log.alter_group("g", {"offsets.retention.minutes": 1})
    with member(log) as consumer:
        consumer.commit({FIRST: 3})
        begun = time.monotonic()
        hours_on(log, 1).maintain()
        assert time.monotonic() - begun < 1.0
        assert log.group_positions("g") == {FIRST: 3}


def test_maintenance_watches_who_only_looks_dead_and_lets_them_be(log: Log, root: Path) -> None:
    """The clock of the files may be another's: it says whom to watch, never who is dead."""
    log.alter_group("g", {"offsets.retention.minutes": 1})
    with member(log) as consumer:
        (lease,) = (root / "groups/g/1/leases").iterdir()
        stop = threading.Event()

        def spoil() -> None:
            while not stop.wait(0.001):
                os.utime(lease, (0, 0))

        spoiler = threading.Thread(target=spoil)
        spoiler.start()
        try:
            time.sleep(0.1)
            hours_on(log, 1).maintain()
        finally:
            stop.set()
            spoiler.join()
        consumer.commit({FIRST: 3})
        assert [one.member_id for one in log.describe_group("g").members] == [consumer.member_id]


def test_a_member_that_is_silent_is_marked(log: Log, run: Run) -> None:
    consumer = member(log)
    (described,) = log.describe_group("g").members
    assert described.silent_seconds is not None and described.silent_seconds < 1.2
    assert not described.is_silent
    assert "silent for longer" not in run("group", "describe", "g").stderr
    abandon(consumer)
    time.sleep(1.3)
    (described,) = log.describe_group("g").members
    assert described.silent_seconds is not None and described.silent_seconds > 1.2
    assert described.is_silent
    assert "1 of 1 member silent for longer" in run("group", "describe", "g").stderr
    (told,) = json.loads(run("group", "describe", "g", "--json").stdout)["members"]
    assert told["is_silent"]


def test_a_setting_nobody_knows_is_refused(log: Log) -> None:
    with pytest.raises(broker.InvalidOption, match="did you mean 'offsets.retention.minutes'"):
        log.alter_group("g", {"offsets.retention.minute": 5})


def test_the_command_lists_and_describes(log: Log, run: Run) -> None:
    log.publish_positions("query", {FIRST: 4, SECOND: 10})
    listed = run("group", "list").stdout.splitlines()
    assert listed[0].split() == ["GROUP", "STATE", "MEMBERS", "PARTITIONS", "LAG"]
    assert listed[1].split() == ["query", "empty", "0", "2", "6"]
    text = run("group", "describe", "query").stdout
    assert "6 records" in text
    (found,) = json.loads(run("group", "list", "--json").stdout)
    assert (found["group"], found["lag"]) == ("query", 6)
    told = json.loads(run("group", "describe", "query", "--json").stdout)
    assert [one["lag"] for one in told["partitions"]] == [6, 0]


def test_the_command_describes_members(log: Log, run: Run) -> None:
    with member(log) as consumer:
        told = json.loads(run("group", "describe", "g", "--json").stdout)
        assert told["members"][0]["member"] == consumer.member_id
        assert consumer.member_id in run("group", "describe", "g").stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--to-earliest"], [0, 0]),
        (["--to-latest"], [10, 10]),
        (["--to-offset", 3], [3, 3]),
        (["--to-datetime", "2023-11-14T22:13:23"], [3, 3]),
        (["--to-datetime", "2023-11-14T23:13:23+01:00"], [3, 3]),
        (["--by-duration", "1d"], [10, 10]),
        (["--shift-by", "-2"], [2, 8]),
    ],
)
def test_the_command_resets(log: Log, run: Run, options: list[object], expected: list[int]) -> None:
    log.publish_positions("g", {FIRST: 4, SECOND: 10})
    dry = run("group", "reset", "g", "--all-topics", *options, "--dry-run", "--json")
    assert [one["new_position"] for one in json.loads(dry.stdout)] == expected
    assert list(log.group_positions("g").values()) == [4, 10]
    assert run("group", "reset", "g", "--topic", "t", *options).returncode == 0
    assert list(log.group_positions("g").values()) == expected


def test_the_command_resets_some_partitions(log: Log, run: Run) -> None:
    assert run("group", "reset", "g", "-t", "t:1", "--to-latest").returncode == 0
    assert log.group_positions("g") == {SECOND: 10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reset", "g", "--all-topics"], "give one of --to-earliest"),
        (["reset", "g", "--all-topics", "--to-earliest", "--to-latest"], "give one of"),
        (["reset", "g", "--to-latest"], "give --topic TOPIC, or --all-topics"),
        (["reset", "g", "-t", "t:x", "--to-latest"], "is not of the form"),
        (["reset", "g", "-t", "t", "--by-duration", "soon"], "is not a duration"),
        (["reset", "g", "-t", "t", "--to-datetime", "noon"], "is not a time"),
        (["alter", "g"], "nothing to change"),
    ],
)
def test_the_command_says_what_is_wrong(
    log: Log, run: Run, arguments: list[str], message: str
) -> None:
    done = run("group", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_command_refuses_in_one_line(log: Log, run: Run) -> None:
    for arguments in (["describe", "nobody"], ["delete", "nobody"]):
        done = run("group", *arguments)
        assert done.returncode == 1
        assert done.stderr.splitlines() == ["spark-log: group 'nobody' does not exist"]
    with member(log):
        done = run("group", "reset", "g", "-t", "t", "--to-latest")
        assert done.returncode == 1
        assert "has 1 active member: cannot commit positions" in done.stderr


def test_the_command_alters_and_deletes(log: Log, run: Run) -> None:
    assert run("group", "alter", "g", "-c", "offsets.retention.minutes=5").returncode == 0
    assert log.describe_group("g").config == {"offsets.retention.minutes": 5}
    assert run("group", "delete", "g", "--yes").returncode == 0
    assert log.groups() == []


def test_consume_goes_on_where_its_group_was(log: Log, run: Run) -> None:
    first = run("consume", "t", "--group", "g", "--max-records", "7").stdout.split()
    rest = run("consume", "t", "--group", "g").stdout.split()
    assert len(first) == 7
    assert sorted(map(int, first + rest)) == list(range(20))
    assert run("consume", "t", "--group", "g").stdout == ""
    assert run("consume", "t", "--group", "g", "--offset", "3").returncode == 2
