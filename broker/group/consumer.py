"""The consumer of a group: reads the partitions that are its share, and commits positions.

After `subscribe` it is a member, and its partitions come and go with the others; after `assign` it
reads what it was told to, and only commits positions, as long as the group has no members.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from broker import checks
from broker.boot import boot_seconds
from broker.config import ConsumerOptions
from broker.consumer import (
    CommitCallback,
    Consumer,
    Offsets,
    check_subscription,
    compile_pattern,
)
from broker.errors import (
    CommitFailed,
    InvalidOption,
    LockTimeout,
    LogError,
    LostPosition,
    UnknownTopic,
)
from broker.group import assignment
from broker.group.group import Group
from broker.group.groups import Groups, check_position
from broker.group.known_topics import KnownTopics
from broker.group.membership import Membership, Pace, View
from broker.group.rebalance import Rebalancer
from broker.group.state import Member, Position, check_partition
from broker.listener import ConsumerRebalanceListener
from broker.metrics import Metrics, Readings
from broker.records import ConsumerRecord, OffsetAndMetadata, TopicPartition
from broker.subscription import Catalog

logger = logging.getLogger(__name__)

# How often a member that has nothing to do asks whether topics or partitions have appeared.
_ASK_SECONDS = 0.25
# A member that reads its group less than three times in its session timeout may not deliver.
_ASKS_IN_SESSION = 10


class GroupConsumer(Consumer):
    """A consumer with a `group_id`. Made by `log.consumer(...)`; for one thread at a time."""

    def __init__(
        self, catalog: Catalog, groups: Groups, topics: tuple[str, ...], options: ConsumerOptions
    ) -> None:
        assert options.group_id is not None
        self._groups = groups
        self._group_id = options.group_id
        self._strategies = _strategies(options.partition_assignment_strategy)
        self._wanted: tuple[list[str], str | None] | None = None
        self._listener = ConsumerRebalanceListener()
        self._membership: Membership | None = None
        self._group: Group | None = None
        self._view: View | None = None
        self._ask_at = 0.0
        self._commit_at = 0.0
        self._committed_last: dict[TopicPartition, Position] = {}
        self._unsafe: dict[TopicPartition, LostPosition] = {}
        self._group_counts = Metrics(
            "consumer-coordinator-metrics",
            ["commit", "commit-error", "rebalance"],
            {"commit-latency": "commit"},
        )
        super().__init__(catalog, topics, options)

    # What to read.

    def subscribe(
        self,
        topics: Iterable[str] = (),
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Share these topics, or those whose whole name fits a pattern, with the group.

        This consumer becomes a member at its next `poll`.
        """
        self._check_usable()
        names = check_subscription(topics, pattern)
        if pattern is not None:
            pattern = compile_pattern(pattern).pattern
        self._quit()
        self._subscription.use_topics(names)  # Raises if one does not exist.
        self._subscription.keep_partitions([])
        self._listener = listener or ConsumerRebalanceListener()
        if names or pattern is not None:
            self._wanted = (names, pattern)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, outside the group, from where the group is."""
        self._check_usable()
        wanted = checks.places(partitions)
        self._quit()
        super().assign(wanted)

    def unsubscribe(self) -> None:
        self._check_usable()
        self._quit()
        super().unsubscribe()

    def subscription(self) -> set[str]:
        if self._wanted is None:
            return super().subscription()
        names, _pattern = self._wanted
        return set(names) or self._subscription.topics()

    @property
    def member_id(self) -> str | None:
        """The id of this member; None before its first poll, and without a subscription."""
        return self._view.member_id if self._view is not None else None

    @property
    def generation(self) -> int | None:
        """The generation of the assignment that this member follows."""
        return self._view.generation if self._view is not None else None

    # Positions.

    def seek(self, partition: TopicPartition, offset: int) -> None:
        super().seek(partition, offset)
        self._unsafe.pop(checks.place(partition), None)

    def commit(self, offsets: Offsets | None = None) -> None:
        """Commit where this consumer is, or the given offsets: each the next record to be read.

        Raises:
            CommitFailed: a partition is not this member's any more; nothing was committed.
            FencedInstanceId: a newer consumer has this one's group_instance_id.
            GroupNotEmpty: partitions were assigned by hand, and the group has members.
        """
        self._check_usable()
        self._settle_iteration()
        if offsets is None:
            positions = self._reached()
        else:
            positions = {
                place: self._check_position(place, given)
                for place, given in checks.by_place(offsets).items()
            }
        self._commit_positions(positions)

    def commit_async(
        self, offsets: Offsets | None = None, callback: CommitCallback | None = None
    ) -> Future[None]:
        """Commit, and tell the callback and the future what came of it. It does not take long."""
        done: Future[None] = Future()
        given = dict(offsets or {})
        try:
            self.commit(offsets)
        except LogError as error:
            done.set_exception(error)
            if callback is not None:
                callback(given, error)
            return done
        done.set_result(None)
        if callback is not None:
            callback(given, None)
        return done

    def committed(self, partition: TopicPartition, metadata: bool = False) -> Any:
        """Return the group's position in a partition, or None; with metadata if asked for."""
        self._check_usable()
        position = self._committed_position(checks.place(partition))
        if position is None:
            return None
        return (
            OffsetAndMetadata(position.offset, position.metadata) if metadata else position.offset
        )

    def metrics(self) -> Readings:
        shares = len(self._positions)
        return {**super().metrics(), **self._group_counts.read(assigned_partitions=shares)}

    # Reading.

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return some records of this member's share, waiting up to `timeout_ms` for the first."""
        self._follow_before_buffered()
        return self._still_owned(super().poll(timeout_ms, max_records))

    def poll_batches(self, timeout_ms: float = 0) -> dict[TopicPartition, pa.RecordBatch]:
        self._follow_before_buffered()
        return self._still_owned(super().poll_batches(timeout_ms))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Give records one by one, waiting for more up to `consumer_timeout_ms`."""
        self._check_usable()
        self._settle_iteration()
        while True:
            self._check_usable()
            self._follow_before_buffered()
            if not self._chunks and not self._fetch(self._options.consumer_timeout_ms):
                return
            place, chunks = next(iter(self._chunks.items()))
            chunk = chunks[0]
            count = chunk.count
            # Not all at once: a position that is committed in between is one that was reached.
            records = chunk.records(self._options.max_poll_records, self._options)
            if chunk.count == 0:
                chunks.pop(0)
            if not chunks:
                del self._chunks[place]
            reached = chunk.offset
            self._counts.totals["records-consumed"] += count - chunk.count
            moves = self._moves
            fresh_until = self._fresh_until()
            for record in records:
                if boot_seconds() >= fresh_until:
                    if not self._still_owned({place: ()}):
                        self._yielded = None
                        break  # Another reads it by now.
                    fresh_until = self._fresh_until()
                self._yielded = record
                yield record
                if self._moves != moves:
                    break  # Somebody moved the position: what is left of the chunk is void.
            else:
                self._yielded = None
                self._positions[place] = reached

    def close(self, autocommit: bool = True) -> None:
        """Commit where this consumer is, if it commits by itself, and leave the group.

        A `with` block that an exception leaves closes without that commit.
        """
        if self._is_closed:
            return
        try:
            self._settle_iteration()
            self._quit(autocommit=autocommit)
        finally:
            super().close()

    # Following the group.

    def _follow_before_buffered(self) -> None:
        """Before records that were fetched earlier are given out; a fetch follows by itself."""
        self._check_usable()
        self._settle_iteration()
        if self._chunks:
            if self._wanted is not None:
                self._follow()
            self._commit_now_and_then()

    def _assign_new(self) -> bool:
        """Bring everything up to date: membership, partitions, positions, readers."""
        if self._wanted is not None:
            self._follow()
        has_looked = True
        try:
            has_looked = super()._assign_new()
        except UnknownTopic as error:
            if not self._has_pattern():
                raise
            # It fitted the pattern, and the next assignment is without it.
            topic = error.args[0]
            self._drop_share([place for place in self._positions if place.topic == topic])
        self._commit_now_and_then()
        return has_looked

    def _follow(self) -> None:
        membership = self._membership or self._make_membership()
        view = membership.follow()
        if view is None:
            self._lose(self._positions)
            membership.join()
            view = membership.follow()
            if view is None:
                return
        if view is not self._view:
            self._watch.changed()
            self._take_view(view)
        if view.to_release:
            self._give_up(view)
        if time.monotonic() >= self._ask_at:
            wait = membership.assign_if_due()
            self._ask_at = time.monotonic() + (_ASK_SECONDS if wait is None else wait)

    def _take_view(self, view: View) -> None:
        """Let go of what another has, and begin with what is new."""
        before = self._view
        self._group_counts.add("rebalance", before is None or before.owned != view.owned)
        if before is not None and before.member_id != view.member_id:
            self._lose(self._positions)
        self._lose(
            place
            for place in self._positions
            if place not in view.owned
            or before is None
            or before.owned.get(place) != view.owned[place]
        )
        self._ask_at = 0.0
        self._committed_last = {}
        self._begin([place for place in view.owned if place not in self._positions], view)
        self._view = view

    def _begin(self, places: Iterable[TopicPartition], view: View) -> None:
        added = []
        for place in sorted(set(places) - set(view.to_release)):
            try:
                self._positions[place] = self._start(place, is_late=False)
            except UnknownTopic:
                if not self._has_pattern():
                    raise
                continue
            added.append(place)
        self._subscription.keep_partitions(list(self._positions))
        if added:
            self._listener.on_partitions_assigned(added)

    def _give_up(self, view: View) -> None:
        """Let others have what is theirs now, after committing what was given out of it."""
        places = [place for place in view.to_release if place in self._positions]
        if places:
            if self._options.enable_auto_commit:
                self._commit_unasked(self._reached(places))
            self._listener.on_partitions_revoked(places)
            self._drop_share(places)
        assert self._membership is not None
        self._membership.release(view.to_release)

    def _has_pattern(self) -> bool:
        return self._wanted is not None and self._wanted[1] is not None

    def _lose(self, places: Iterable[TopicPartition]) -> None:
        lost = list(places)
        if lost:
            self._drop_share(lost)
            self._listener.on_partitions_lost(lost)

    def _drop_share(self, places: Iterable[TopicPartition]) -> None:
        self._drop(places)
        self._moves += 1
        for place in places:
            self._unsafe.pop(place, None)
        self._subscription.keep_partitions(list(self._positions))

    def _still_owned(self, given: dict[TopicPartition, Any]) -> dict[TopicPartition, Any]:
        """Return what may be given out: all of it, unless this member has been away too long.

        Nothing is committed or given up here: the positions are already behind these records.
        """
        membership, before = self._membership, self._view
        if membership is None or before is None or membership.is_fresh():
            return given
        view = membership.follow()
        if view is None:
            return {}
        return {
            place: records
            for place, records in given.items()
            if place in view.owned and view.owned[place] == before.owned.get(place)
        }

    def _fresh_until(self) -> float:
        return float("inf") if self._membership is None else self._membership.fresh_until

    def _make_membership(self) -> Membership:
        assert self._wanted is not None
        names, pattern = self._wanted
        options = self._options
        session = options.session_timeout_ms / 1000
        pace = Pace(
            session,
            options.heartbeat_interval_ms / 1000,
            options.max_poll_interval_ms / 1000,
            ask=min(self._catalog.storage.poll_seconds, session / _ASKS_IN_SESSION),
        )
        member = Member(
            member_id="",
            client_id=options.client_id or "",
            host=socket.gethostname(),
            instance_id=options.group_instance_id,
            topics=tuple(names),
            pattern=pattern,
            strategies=tuple(self._strategies),
            session_timeout_ms=options.session_timeout_ms,
        )
        group = self._open_group()
        group.ask_every(pace.ask)
        topics = KnownTopics(self._catalog.topic_names, self._groups.open_topic)
        rebalancer = Rebalancer(
            group,
            topics,
            self._strategies,
            boot_seconds,
            max_age=options.metadata_max_age_ms / 1000,
            lock_wait=pace.reading_life,
        )
        self._membership = Membership(group, member, rebalancer, pace)
        self._commit_at = time.monotonic() + options.auto_commit_interval_ms / 1000
        return self._membership

    def _quit(self, *, autocommit: bool = True) -> None:
        """Commit if that is to be done without being asked, and stop being a member."""
        try:
            if autocommit and self._options.enable_auto_commit:
                self._commit_last()
            if self._membership is not None and self._positions:
                self._listener.on_partitions_revoked(list(self._positions))
        finally:
            membership, self._membership = self._membership, None
            if membership is not None:
                self._leave(membership)
        if self._group is not None:
            self._group.close()
            self._group = None
        self._forget_positions()
        self._wanted = self._view = None
        self._unsafe.clear()

    def _commit_last(self) -> None:
        """Commit what was given out, however long ago: under the lock it shows whose it is."""
        if self._wanted is not None and self._membership is None:
            return  # It has never been a member.
        try:
            self._commit_positions(self._reached())
        except LogError as error:
            # What was read after the last commit is read again, by whoever comes next.
            logger.warning("leaving group %r without a commit: %s", self._group_id, error)

    def _leave(self, membership: Membership) -> None:
        try:
            membership.leave()
        except LogError as error:
            # The others find out when its lease stands still.
            logger.warning("could not leave group %r: %s", self._group_id, error)
        finally:
            membership.close()

    # Positions.

    def _start(self, place: TopicPartition, *, is_late: bool) -> int | None:
        """Return where the group is, or where a group without a position begins."""
        position = self._committed_position(place)
        if position is None:
            return super()._start(place, is_late=is_late or self._is_late(place))
        state = self._subscription.reader(place.topic).refresh()
        lost_from = position.lost_from(state, place.partition)
        if lost_from is not None:
            start, end = state.starts[place.partition], state.ends[place.partition]
            self._unsafe[place] = LostPosition(place, position.offset, start, end, lost_from)
        return position.offset

    def _known_position(self, place: TopicPartition) -> int:
        if place in self._unsafe:
            raise self._unsafe[place]
        return super()._known_position(place)

    def _is_late(self, place: TopicPartition) -> bool:
        return self._open_group().look(lambda state: place in state.late)

    def _committed_position(self, place: TopicPartition) -> Position | None:
        position = self._open_group().look(lambda state: state.positions.get(place))
        if position is None:
            return None
        incarnation = self._subscription.reader(place.topic).refresh().incarnation
        return position if position.incarnation == incarnation else None

    def _open_group(self) -> Group:
        if self._group is None:
            self._group = self._groups.open_or_create(self._group_id)
            self._group.lock_wait_ms = self._options.request_timeout_ms
        return self._group

    def _reached(self, places: Iterable[TopicPartition] | None = None) -> dict[Any, Position]:
        """Return how far each partition was given out."""
        reached = {}
        for place in self._positions if places is None else places:
            offset = self._positions[place]
            if offset is not None and place not in self._unsafe:
                reached[place] = self._locate(place, offset)
        return reached

    def _locate(self, place: TopicPartition, offset: int, note: str = "") -> Position:
        state = self._subscription.reader(place.topic).state
        return Position(offset, state.incarnation, state.epoch, 0, note)

    def _check_position(self, place: TopicPartition, given: Any) -> Position:
        """Return what a user wants to commit as a position."""
        if isinstance(given, tuple) and len(given) != 2:
            raise InvalidOption(
                f"cannot commit {given!r} for {place.topic}-{place.partition}; give an offset, or "
                "OffsetAndMetadata(offset, text)"
            )
        located = self._locate(place, *(given if isinstance(given, tuple) else (given,)))
        reader = self._subscription.reader(place.topic)
        if place.partition >= reader.state.partition_count:
            reader.refresh()  # It may have grown since.
        check_partition(place, reader.state)
        return check_position(place, located)

    def _commit_positions(self, positions: Mapping[TopicPartition, Position]) -> None:
        if not positions:
            return
        begun = time.monotonic()
        try:
            self._commit_somehow(positions)
        except LogError:
            self._group_counts.add("commit-error")
            raise
        self._group_counts.add("commit")
        self._group_counts.add("commit-latency", time.monotonic() - begun)

    def _commit_somehow(self, positions: Mapping[TopicPartition, Position]) -> None:
        if self._wanted is None:
            self._open_group().publish(positions)
        elif self._membership is None:
            raise InvalidOption("commit before the first poll: this consumer has no partitions yet")
        else:
            self._commit_by(self._membership, positions)

    def _commit_by(
        self, membership: Membership, positions: Mapping[TopicPartition, Position]
    ) -> None:
        if positions:
            membership.commit(positions, self._view.generation if self._view is not None else 0)

    def _commit_now_and_then(self) -> None:
        """Commit if it is time to; only from where everything given out counts as done."""
        options = self._options
        if not options.enable_auto_commit or time.monotonic() < self._commit_at:
            return
        self._commit_at = time.monotonic() + options.auto_commit_interval_ms / 1000
        reached = self._reached()
        if reached != self._committed_last:
            self._commit_unasked(reached)
            self._committed_last = reached

    def _commit_unasked(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Commit on behalf of a user who did not ask for it, and need not hear that it failed."""
        try:
            self._commit_positions(positions)
        except (CommitFailed, LockTimeout) as error:
            logger.warning("%s", error)

    def _directories(self) -> set[str]:
        watched = super()._directories()
        return watched if self._membership is None else {*watched, self._membership.directory}

    def _wait_seconds(self, seconds: float) -> float:
        if self._membership is None:
            return seconds
        # Waiting for records is no reason to be thought stuck.
        often = self._options.max_poll_interval_ms / 3000
        return max(0.0, min(seconds, often, self._ask_at - time.monotonic()))


def _strategies(given: Any) -> dict[str, assignment.Strategy]:
    """Return the assignment functions of the option, by name, the best first."""
    is_one = isinstance(given, str) or callable(given) or not isinstance(given, Iterable)
    many = [given] if is_one and given is not None else list(given or ())
    named = {
        assignment.strategy_name(one): assignment.STRATEGIES[one] if isinstance(one, str) else one
        for one in many
    }
    if not named:
        raise InvalidOption("partition_assignment_strategy is empty; leave it out for sticky")
    return named
