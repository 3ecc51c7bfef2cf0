"""This process as a member of a group: joins, shows that it lives, watches the others, leaves.

Two threads use a `Membership`: the consumer's own, which follows the group whenever it polls, and a
background thread, which renews the lease, evicts the dead and makes assignments while the consumer
is busy with its records.

A member delivers records only while it is *fresh*: it renewed its lease within two thirds of the
session timeout, and it read the group's journal within one third. Others evict it only after they
have seen its lease stand still for the whole timeout, so it has stopped delivering by then. One
that was away for longer comes back under the group's lock, where nobody evicts it meanwhile.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from broker.boot import boot_seconds
from broker.errors import FencedInstanceId, LogError, UnknownGroup
from broker.group.group import Group
from broker.group.lease import Clock, Lease, LeaseWatch, is_closed, lease_path
from broker.group.rebalance import Rebalancer
from broker.group.state import GroupState, Member, Owner, Position
from broker.records import TopicPartition

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.25
_WATCH_SECONDS_PER_MEMBER = 0.01


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things are done, in seconds."""

    session: float
    heartbeat: float
    max_poll: float
    # Between two questions to a store whether anything is new.
    ask: float = 0.0

    @property
    def lease_life(self) -> float:
        """How long after a renewal this member may deliver."""
        return self.session * 2 / 3

    @property
    def reading_life(self) -> float:
        """How long after reading the journal this member may deliver."""
        return self.session / 3

    def watch(self, member_count: int) -> float:
        """The time between two looks at the leases of others."""
        wanted = max(_WATCH_SECONDS, self.ask, _WATCH_SECONDS_PER_MEMBER * member_count)
        return min(wanted, self.heartbeat)


class View(NamedTuple):
    """What this member has, as of its last look.

    Args:
        owned: the partitions it may read, and since which generation it has each.
        to_release: those among them that it is to give up.
    """

    member_id: str
    generation: int
    owned: dict[TopicPartition, Owner]
    to_release: list[TopicPartition]


class Membership:
    """One consumer's place in its group, through all its joins."""

    def __init__(
        self,
        group: Group,
        member: Member,
        rebalancer: Rebalancer,
        pace: Pace,
        clock: Clock = boot_seconds,
    ) -> None:
        self._group = group
        self._prototype = member
        self._rebalancer = rebalancer
        self._pace = pace
        self._clock = clock
        # Protects what both threads change: the fields below.
        self._mutex = threading.RLock()
        self._member_id = ""
        self._lease: Lease | None = None
        self._renewed = 0.0
        self._polled = 0.0
        self._read = float("-inf")
        self._deliver_from = 0.0
        self._view: View | None = None
        self._seen: tuple[str, int] | None = None
        self._failure: Exception | None = None
        self._watch = LeaseWatch(self._read_lease, clock)
        self._watched = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> str:
        """Where news of the group shows."""
        return f"{self._group.directory}/journal"

    @property
    def member_id(self) -> str:
        """The id of the current join; empty before it, and after this member is out."""
        return self._member_id

    @property
    def fresh_until(self) -> float:
        """The time, on this member's clock, up to which it may deliver without looking again."""
        if not self._member_id:
            return float("-inf")
        return min(
            self._renewed + self._pace.lease_life,
            self._read + self._pace.reading_life,
            self._polled + self._pace.max_poll,
        )

    def is_fresh(self) -> bool:
        return self._clock() < self.fresh_until

    # For the consumer's own thread.

    def follow(self) -> View | None:
        """Look at the group and return what this member has; None if it is out: join again.

        Raises:
            FencedInstanceId: another consumer has this one's instance id.
            UnknownGroup: the group was deleted.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        now = self._polled = self._clock()
        with self._mutex:
            if not self._member_id:
                return None
            if now - self._renewed >= self._pace.lease_life:
                self._return()
            view = self._look(now)
            if view is None:
                self._member_id = ""
                return None
            self._read = self._group.read_at
        return view if now >= self._deliver_from else view._replace(owned={}, to_release=[])

    def join(self) -> None:
        """Become a member under a new id."""
        member = replace(self._prototype, member_id=uuid.uuid4().hex)
        with self._mutex:
            now = self._polled = self._clock()
            lease = Lease(self._group.storage, self._group.directory, member.member_id)
            old = self._group.join(member)
            lease.renew()
            self._lease, self._renewed, self._member_id = lease, now, member.member_id
            self._seen = self._view = None
            self._deliver_from = 0.0
            if old is not None:
                self._succeed(old)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"spark-log-group-{self._group.name}", daemon=True
            )
            self._thread.start()

    def assign_if_due(self) -> float | None:
        """Make an assignment if one is needed; return the seconds after which to ask again."""
        wait = self._rebalancer.assign_if_due(self._member_id)
        until_delivery = self._deliver_from - self._clock()
        if until_delivery > 0:
            return until_delivery if wait is None else min(wait, until_delivery)
        return wait

    def release(self, places: Iterable[TopicPartition]) -> None:
        self._group.release(self._member_id, places)

    def commit(self, positions: Mapping[TopicPartition, Position], generation: int) -> None:
        """Commit positions of partitions that this member has."""
        self._check_not_fenced()
        self._group.commit_positions(positions, member_id=self._member_id, generation=generation)

    def leave(self) -> None:
        """Stop being a member, so that the others need not wait for it to look dead.

        A static member stays: it says that it delivers no more, and its partitions wait for it.
        """
        with self._mutex:
            member_id, self._member_id = self._member_id, ""
            if not member_id or self._lease is None:
                return
            if self._prototype.instance_id is None:
                self._group.leave(member_id)
                self._lease.remove()
            elif self._clock() >= self._deliver_from:
                # Before that time its predecessor may not have noticed yet.
                self._lease.close()

    def close(self) -> None:
        """Stop the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._rebalancer.close()

    # For the background thread.

    def _run(self) -> None:
        while not self._stop.wait(self._tick_seconds()):
            try:
                self._tick()
            except UnknownGroup:
                continue  # The consumer finds the same at its next poll, and says so.
            except LogError as error:
                # The lease runs out if this lasts, and the consumer's own thread meets the error.
                logger.warning("a member of group %r is held up: %s", self._group.name, error)
            except Exception as error:  # From a user's assignment function.
                self._failure = error

    def _tick_seconds(self) -> float:
        return min(_WATCH_SECONDS, self._pace.heartbeat, self._pace.session / 10)

    def _tick(self) -> None:
        if not self._member_id:
            return
        now = self._clock()
        if now - self._polled > self._pace.max_poll:
            self._give_up()
            return
        if now - self._renewed >= self._pace.heartbeat:
            self._renew()
        self._watch_others()
        self._rebalancer.assign_if_due(self._member_id)

    def _give_up(self) -> None:
        """The consumer does not come back from its records: let others have its partitions."""
        logger.warning(
            "a member of group %r did not poll for max_poll_interval_ms=%d and leaves",
            self._group.name,
            self._pace.max_poll * 1000,
        )
        with self._mutex:
            member_id, self._member_id = self._member_id, ""
            if member_id:
                self._group.leave(member_id)
                if self._lease is not None:
                    self._lease.remove()

    def _renew(self) -> None:
        with self._mutex:
            # From before the write: if it takes long, the lease is as old as its beginning.
            now = self._clock()
            if not self._is_member() or self._lease is None:
                return  # The consumer finds out at its next poll.
            if now - self._renewed >= self._pace.lease_life:
                self._return()
            else:
                self._lease.renew()
                self._renewed = now

    def _return(self) -> None:
        """Renew a lease that has run out, under the lock: evicted meanwhile, or safe from now on.

        Without the lock, somebody who has just found the lease standing still could evict this
        member after it has looked at the journal.
        """
        now = self._clock()

        def renew(state: GroupState) -> None:
            if self._member_id in state.members and self._lease is not None:
                self._lease.renew()

        self._group.alone(renew)
        self._renewed = now

    def _watch_others(self) -> None:
        now = self._clock()
        timeouts = self._group.glance(
            lambda state: {
                member.member_id: member.session_timeout_ms / 1000
                for member in state.members.values()
                if member.member_id != self._member_id
            },
            now,
        )
        interval = self._pace.watch(len(timeouts))
        if now - self._watched < interval:
            return
        self._watched = now
        dead = self._watch.observe(timeouts, interval=max(interval, self._tick_seconds()))
        if not dead:
            return
        gone = self._group.evict(
            dead,
            by=self._member_id,
            is_dead=self._watch.is_still,
            # Not longer: this thread has a lease to renew.
            timeout_ms=round(self._pace.reading_life * 1000),
        )
        for member_id in gone:
            logger.warning("evicted a silent member of group %r: %s", self._group.name, member_id)
            self._group.storage.remove(lease_path(self._group.directory, member_id))

    # Helpers.

    def _look(self, now: float) -> View | None:
        """Return what this member has, made anew only when the group has changed."""
        member_id = self._member_id
        known = self._view if self._seen is not None and self._seen[0] == member_id else None
        version = self._seen[1] if self._seen is not None else -1

        def see(state: GroupState) -> View | None:
            if known is not None and state.version == version:
                return known
            if member_id not in state.members:
                self._refuse_if_fenced(state)
                return None
            self._seen = (member_id, state.version)
            return View(
                member_id,
                state.generation,
                state.owned_by(member_id),
                state.to_release(member_id),
            )

        # What was read too long ago to deliver by is never good enough.
        is_old = now >= self._group.read_at + self._pace.reading_life
        self._view = self._group.glance(see, now, afresh=is_old)
        return self._view

    def _is_member(self) -> bool:
        return self._group.glance(lambda state: self._member_id in state.members, self._clock())

    def _check_not_fenced(self) -> None:
        self._group.look(
            lambda state: (
                None if self._member_id in state.members else self._refuse_if_fenced(state)
            )
        )

    def _refuse_if_fenced(self, state: GroupState) -> None:
        instance_id = self._prototype.instance_id
        if instance_id is not None and state.instance(instance_id) is not None:
            raise FencedInstanceId(self._group.name, instance_id)

    def _succeed(self, old: Member) -> None:
        """Take over from a member of the same instance id, which may not know it yet.

        It stops delivering a third of its session timeout after it last read the journal.
        """
        if not is_closed(self._read_lease(old.member_id)):
            self._deliver_from = self._clock() + old.session_timeout_ms / 3000
        self._group.storage.remove(lease_path(self._group.directory, old.member_id))

    def _read_lease(self, member_id: str) -> bytes | None:
        return self._group.storage.read(lease_path(self._group.directory, member_id))
