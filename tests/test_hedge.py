"""A second attempt beside one that is late."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from typing import Any

import pytest

import broker
from broker.storage import hdfs
from broker.storage.hdfs import HdfsStore
from broker.storage.hedge import Hedge
from servers import HdfsCluster


class Attempts:
    """Each attempt takes its time, and returns its number or raises."""

    def __init__(self, *seconds: float, failing: tuple[int, ...] = ()) -> None:
        self._seconds = seconds
        self._failing = failing
        self._numbers = itertools.count()
        self.undone: list[int] = []
        self.hedge: Hedge[int] = Hedge("test-hedge")

    def __call__(self) -> int:
        number = next(self._numbers)
        time.sleep(self._seconds[number])
        if number in self._failing:
            raise broker.StorageError(f"attempt {number}")
        return number

    def first(self) -> int:
        return self.hedge.first(self, self.undone.append)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_attempt_in_time_is_the_only_one() -> None:
    attempts = Attempts(0, 0)
    assert [attempts.first(), attempts.first()] == [0, 1]
    assert attempts.hedge.late_count == 0


def test_beside_a_late_attempt_the_second_wins_and_the_late_one_is_undone() -> None:
    attempts = Attempts(1.0, 0.0)
    begun = time.monotonic()
    assert attempts.first() == 1
    assert time.monotonic() - begun < 0.9
    assert attempts.undone == []
    until(lambda: attempts.undone == [0])


def test_a_late_attempt_that_is_first_after_all_wins() -> None:
    attempts = Attempts(0.2, 0.5)
    assert attempts.first() == 0
    until(lambda: attempts.undone == [1])


def test_what_is_always_slow_is_not_late() -> None:
    attempts = Attempts(*[0.15] * 40)
    for _ in range(15):
        attempts.first()
    before = attempts.hedge.late_count
    assert before < 8  # Until it is known what is usual.
    attempts.first()
    assert attempts.hedge.late_count == before


def test_an_attempt_that_fails_in_time_is_not_made_again() -> None:
    attempts = Attempts(0, failing=(0,))
    with pytest.raises(broker.StorageError, match="attempt 0"):
        attempts.first()


@pytest.mark.parametrize("failing", [(0,), (1,)])
def test_if_one_of_two_fails_the_other_counts(failing: tuple[int, ...]) -> None:
    attempts = Attempts(0.3, 0.1, failing=failing)
    assert attempts.first() == 1 - failing[0]
    assert attempts.undone == []


def test_if_both_fail_the_first_error_is_told() -> None:
    attempts = Attempts(0.3, 0.0, failing=(0, 1))
    with pytest.raises(broker.StorageError, match="attempt 0"):
        attempts.first()


def test_a_commit_on_hdfs_does_not_wait_for_a_close_that_sleeps(
    hdfs_cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"{hdfs_cluster.address}/{uuid.uuid4().hex}"
    # What is late in a cluster that has just begun uses up the second attempts of this store only.
    warm = HdfsStore(root, hdfs_cluster.client_options)
    for number in range(5):
        warm.put_new(f"warm/{number}", b"data")
    store = HdfsStore(root, hdfs_cluster.client_options)
    assert store.get("warm/0") == b"data"
    write, slept = hdfs._write, threading.Event()

    def sleeping_once(*arguments: Any) -> None:
        write(*arguments)
        if not slept.is_set():
            slept.set()
            time.sleep(5)

    monkeypatch.setattr(hdfs, "_write", sleeping_once)
    begun = time.monotonic()
    store.put_new("folder/name", b"data")
    assert time.monotonic() - begun < 4
    assert slept.is_set()
    assert store.get("folder/name") == b"data"
    until(lambda: [one.name for one in store.entries("folder")] == ["name"])
    with pytest.raises(broker.errors.AlreadyExists):
        store.put_new("folder/name", b"other")
    assert store.get("folder/name") == b"data"
