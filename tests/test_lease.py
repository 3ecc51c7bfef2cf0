"""Leases: who is alive, by nobody's clock but the watcher's own."""

from __future__ import annotations

import pytest

from broker.group.lease import Lease, LeaseWatch, encode, is_closed
from broker.storage import Storage


class Others:
    """Leases that a test moves by hand, and a clock."""

    def __init__(self) -> None:
        self.data: dict[str, bytes | None] = {"a": b"1", "b": b"1"}
        self.now = 100.0
        self.watch = LeaseWatch(lambda name: self.data.get(name), lambda: self.now)

    def observe(self, seconds: float = 1.0, timeout: float = 3.0) -> list[str]:
        self.now += seconds
        return self.watch.observe(dict.fromkeys(self.data, timeout), interval=1.0)


@pytest.fixture
def others() -> Others:
    return Others()


def test_a_lease_that_stands_still_for_the_timeout_is_a_dead_members(others: Others) -> None:
    assert [others.observe() for _ in range(4)] == [[], [], [], ["a", "b"]]


def test_a_lease_that_moves_is_alive(others: Others) -> None:
    for count in range(20):
        others.data["a"] = str(count // 2).encode()
        assert "a" not in others.observe()


def test_a_member_without_a_lease_is_dead_after_the_timeout_too(others: Others) -> None:
    others.data["a"] = None
    assert [others.observe() for _ in range(4)][-1] == ["a", "b"]


def test_who_did_not_look_does_not_know(others: Others) -> None:
    """A watcher that was stopped for an hour has not watched for an hour."""
    others.observe()
    assert others.observe(seconds=3600) == []
    assert others.observe() == ["a", "b"]


def test_a_lease_looked_at_for_the_first_time_is_new(others: Others) -> None:
    others.observe(seconds=3600)
    others.data["c"] = b"1"
    assert others.observe(seconds=2) == []
    assert others.observe(seconds=1) == ["a", "b"]


def test_a_member_that_has_just_moved_is_not_still(others: Others) -> None:
    others.observe()
    assert others.watch.is_still("a")
    others.data["a"] = b"2"
    assert not others.watch.is_still("a")


@pytest.mark.every_store
def test_every_renewal_changes_the_file(storage: Storage) -> None:
    lease = Lease(storage, "groups/g/1", "m")
    seen = set()
    for _ in range(5):
        lease.renew()
        seen.add(storage.read("groups/g/1/leases/m"))
    assert len(seen) == 5
    lease.remove()
    assert storage.read("groups/g/1/leases/m") is None


@pytest.mark.every_store
def test_a_closed_lease_says_so(storage: Storage) -> None:
    lease = Lease(storage, "groups/g/1", "m")
    lease.renew()
    assert not is_closed(storage.read("groups/g/1/leases/m"))
    lease.close()
    assert is_closed(storage.read("groups/g/1/leases/m"))


def test_a_torn_or_missing_lease_proves_nothing() -> None:
    whole = encode(7, is_closed=True)
    assert is_closed(whole)
    assert not is_closed(None)
    assert not is_closed(whole[:-1])
    assert not is_closed(whole[:-1] + b"\1")
