"""Locks on a store: an object that is held, let go of, and taken over when its holder is silent."""

from __future__ import annotations

import uuid

import pytest
from faulty_store import fresh_store

import broker
from broker.storage import LeaseLock, RemoteStorage
from broker.storage.locks import LEASE_MS
from broker.storage.memory import MemoryStore
from broker.storage.store import Entry


class Clockwork(MemoryStore):
    """A store whose clock differs from ours by as much as one likes."""

    def __init__(self) -> None:
        super().__init__(fresh_store(uuid.uuid4().hex).root)
        self.ahead_ms = 0
        self._written: dict[str, int] = {}

    def put_new(self, path: str, data: bytes) -> None:
        super().put_new(path, data)
        self._written[path] = self.ahead_ms

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self._written[path] = self.ahead_ms

    def stat(self, path: str) -> Entry | None:
        entry = super().stat(path)
        if entry is None:
            return None
        return entry._replace(changed_ms=entry.changed_ms + self._written[path])


@pytest.fixture
def store() -> Clockwork:
    return Clockwork()


def lock_of(store: Clockwork) -> LeaseLock:
    """A lock of another process, which knows nothing of the others."""
    return RemoteStorage(store).lock("maintain=t")


def is_free(store: Clockwork) -> bool:
    lock = lock_of(store)
    try:
        lock.acquire(0)
    except broker.LockTimeout:
        return False
    lock.release()
    return True


def test_one_holds_it_until_it_lets_go(store: Clockwork) -> None:
    holder = lock_of(store)
    holder.acquire(0)
    assert not is_free(store)
    holder.release()
    assert is_free(store)


def test_who_is_silent_for_long_loses_it_and_does_not_take_it_from_the_next(
    store: Clockwork,
) -> None:
    silent, heir = lock_of(store), lock_of(store)
    silent.acquire(0)
    store.ahead_ms += LEASE_MS - 5000
    assert not is_free(store)
    store.ahead_ms += 10_000
    heir.acquire(0)
    silent.release()
    assert not is_free(store)
    heir.release()
    assert is_free(store)


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_of_ours_that_is_wrong_makes_nothing_old(store: Clockwork, hours: int) -> None:
    store.ahead_ms = hours * 3_600_000
    holder = lock_of(store)
    holder.acquire(0)
    assert not is_free(store)
    age = RemoteStorage(store).age_ms(holder.path)
    assert age is not None and age < 5000
