"""All groups of a log: found, made, opened and removed by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

from broker import checks
from broker.boot import boot_seconds
from broker.errors import LogError, OffsetOutOfRange, UnknownGroup
from broker.group import group as journal
from broker.group import names
from broker.group.description import GroupDescription, describe, is_silent
from broker.group.group import Group, group_home
from broker.group.lease import LeaseWatch, is_closed, lease_path
from broker.group.reset import Reset
from broker.group.state import Position, check_partition
from broker.home import newest_incarnation, remove_deleted, remove_leftovers
from broker.reader import TopicReader
from broker.records import TopicPartition
from broker.state import TopicState
from broker.storage import Storage
from broker.topic import Topic

_CREATE_TRIES = 10
_WATCH_SECONDS = 0.1
# For how long maintenance watches groups that look dead; all of them at once.
_EXPIRY_WATCH_SECONDS_MAX = 60.0


class Groups:
    """The groups below one root."""

    def __init__(
        self,
        storage: Storage,
        open_topic: Callable[[str], Topic],
        open_reader: Callable[[str], TopicReader],
    ) -> None:
        self._storage = storage
        self.open_topic = open_topic
        self._open_reader = open_reader
        self._alive_until: dict[str, float] = {}

    def names(self) -> list[str]:
        """Return the names of all groups, sorted."""
        found = (names.decode(encoded) for encoded in self._storage.list("groups"))
        return sorted(name for name in found if self._find(name)[1])

    def open(self, name: str, *, write: bool = False) -> Group:
        """Open a group; raise `UnknownGroup` if there is none."""
        incarnation, is_there = self._find(name)
        if not is_there:
            raise UnknownGroup(name)
        group = Group(self._storage, name, incarnation, write=write)
        if group.state.is_deleted:
            group.close()
            raise UnknownGroup(name)
        return group

    def open_or_create(self, name: str) -> Group:
        """Open a group for writing, making it first if need be."""
        for _ in range(_CREATE_TRIES):
            try:
                return self.open(name, write=True)
            except UnknownGroup:
                self._create(name)
        raise UnknownGroup(name, "is deleted as fast as it is made")

    def positions(self, name: str) -> dict[TopicPartition, Position]:
        """Return the positions that are in topics of today; none if there is no such group."""
        try:
            group = self.open(name)
        except UnknownGroup:
            return {}
        try:
            return self.current(group.state.positions)
        finally:
            group.close()

    def publish(self, name: str, offsets: Mapping[TopicPartition, int | Position]) -> None:
        """Commit positions for a group that has no members, making it if it is absent."""
        positions = self.locate(offsets)
        group = self.open_or_create(name)
        try:
            self._evict_dead(group)
            if positions:
                group.publish(positions)
        finally:
            group.close()

    def describe(self, name: str) -> GroupDescription:
        """Return what a group is, as of now."""
        group = self.open(name)
        try:
            now_ms = self._storage.clock() // 1_000_000
            positions = self.current(group.state.positions)
            silences = {
                member_id: self._silent_seconds(group, member_id)
                for member_id in group.state.members
            }
            return describe(name, group.state, positions, self._open_reader, now_ms, silences)
        finally:
            group.close()

    def reset(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit positions that the partitions hold."""
        positions = self.locate(offsets)
        for topic in {place.topic for place in positions}:
            reader = self._open_reader(topic)
            try:
                for place, position in positions.items():
                    if place.topic == topic:
                        start, end = reader.bounds(place.partition)
                        if not start <= position.offset <= end:
                            raise OffsetOutOfRange(place, position.offset, start, end)
            finally:
                reader.close()
        self.publish(name, offsets)

    def plan_reset(
        self, name: str, places: Iterable[TopicPartition], reset: Reset
    ) -> dict[TopicPartition, int]:
        """Return where a reset would put the group in these partitions. Changes nothing."""
        positions = self.positions(name)
        planned: dict[TopicPartition, int] = {}
        readers: dict[str, TopicReader] = {}
        try:
            for place in checks.places(places):
                if place.topic not in readers:
                    readers[place.topic] = self._open_reader(place.topic)
                reader = readers[place.topic]
                planned[place] = reset.target(reader, place.partition, positions.get(place))
        finally:
            for reader in readers.values():
                reader.close()
        return planned

    def configure(self, name: str, config: Mapping[str, object]) -> None:
        group = self.open_or_create(name)
        try:
            group.configure(config)
        finally:
            group.close()

    def delete(self, name: str) -> None:
        """Remove a group that has no members."""
        group = self.open(name, write=True)
        try:
            self._evict_dead(group)
            group.delete()
        finally:
            group.close()

    def expire(self) -> tuple[int, dict[str, LogError]]:
        """Remove the positions that are too old by their group's setting.

        A group whose members have all died gets rid of them, and its positions get old from then.

        Returns:
            How many, and the error of each group with which it could not be done.
        """
        count = 0
        silent = []
        failures: dict[str, LogError] = {}
        for name in self.names():
            try:
                removed, seems_dead = self._expire_one(name)
            except UnknownGroup:
                continue  # Deleted between the listing and here.
            except LogError as error:
                failures[name] = error
                continue
            count += removed
            if seems_dead:
                silent.append(name)
        try:
            self._evict_together(silent)
        except LogError as error:
            failures |= dict.fromkeys(silent, error)
        return count, failures

    def _expire_one(self, name: str) -> tuple[int, bool]:
        """Return how many positions of a group were removed, and whether its members look dead."""
        with closing(self.open(name)) as group:
            is_due = bool(group.state.expired_positions(self._storage.clock() // 1_000_000))
            seems_dead = self._looks_dead(group)
        if not is_due:
            return 0, seems_dead
        with closing(self.open(name, write=True)) as group:
            return group.expire(), seems_dead

    def _evict_dead(self, group: Group) -> None:
        """Remove members that are not there any more; return at once if one is alive.

        Nobody else may be left to do it, and whoever asks is refused while there are members.
        """
        if boot_seconds() < self._alive_until.get(group.name, 0.0):
            return  # Who publishes often is not to wait each time.
        vigil = _Vigil(group)
        while vigil.look():
            time.sleep(_WATCH_SECONDS)
        self._alive_until[group.name] = vigil.alive_until

    def _evict_together(self, names: Iterable[str]) -> None:
        """Do it for many groups, in the time that the slowest takes."""
        vigils: list[_Vigil] = []
        try:
            for name in names:
                with contextlib.suppress(UnknownGroup):
                    vigils.append(_Vigil(self.open(name, write=True)))
            watched = vigils
            while watched := [one for one in watched if one.look()]:
                time.sleep(_WATCH_SECONDS)
        finally:
            for vigil in vigils:
                vigil.group.close()

    def _looks_dead(self, group: Group) -> bool:
        """Tell whether it is worth watching a group: its positions would expire without members.

        Whose clock the files have does not matter, as only watching tells who is dead. While one
        member lives, it evicts the others.
        """
        if group.state.config.get("offsets.retention.minutes") is None:
            return False
        timeouts = {key: one.session_timeout_ms / 1000 for key, one in group.state.members.items()}
        return 0 < max(timeouts.values(), default=0.0) <= _EXPIRY_WATCH_SECONDS_MAX and all(
            is_silent(self._silent_seconds(group, member_id), timeout)
            for member_id, timeout in timeouts.items()
        )

    def _silent_seconds(self, group: Group, member_id: str) -> float | None:
        """Return for how long a member has not shown that it lives; None: it never has."""
        age_ms = self._storage.age_ms(lease_path(group.directory, member_id))
        return None if age_ms is None else age_ms / 1000

    def locate(
        self, offsets: Mapping[TopicPartition, int | Position]
    ) -> dict[TopicPartition, Position]:
        """Return offsets as positions in the topics of today; positions stay what they are.

        Raises:
            UnknownPartition: the topic of today has none of this number.
        """
        given_by_place = checks.by_place(offsets)
        states = self._states(place.topic for place in given_by_place)
        located = {}
        for place, given in given_by_place.items():
            state = states[place.topic]
            if not isinstance(given, Position):
                given = Position(given, state.incarnation, state.epoch)
            # One in a topic that was deleted since is nobody's concern any more.
            if given.incarnation == state.incarnation:
                check_partition(place, state)
            located[place] = check_position(place, given)
        return located

    def current(
        self, positions: Mapping[TopicPartition, Position]
    ) -> dict[TopicPartition, Position]:
        """Return those positions whose topic has not been deleted since."""
        incarnations = {
            topic: newest_incarnation(self._storage, f"topics/{topic}")
            for topic in {place.topic for place in positions}
        }
        return {
            place: position
            for place, position in positions.items()
            if incarnations[place.topic] == (position.incarnation, True)
        }

    def _states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Return the state of each topic, as of now."""
        states = {}
        for name in set(topics):
            topic = self.open_topic(name)
            states[name] = topic.state
            topic.close()
        return states

    def _find(self, name: str) -> tuple[int, bool]:
        return newest_incarnation(self._storage, group_home(name, 1).parent)

    def _create(self, name: str) -> None:
        incarnation, is_there = self._find(name)
        if is_there:
            if not self._is_deleted(name, incarnation):
                return  # Another has made it meanwhile.
            remove_deleted(self._storage, group_home(name, incarnation))
            incarnation += 1
        journal.create(self._storage, name, incarnation)
        remove_leftovers(self._storage, group_home(name, incarnation).parent)

    def _is_deleted(self, name: str, incarnation: int) -> bool:
        """Tell whether a delete was committed and its files were not removed any more."""
        try:
            group = Group(self._storage, name, incarnation)
        except UnknownGroup:
            return True
        try:
            return group.state.is_deleted
        finally:
            group.close()


def check_position(place: TopicPartition, position: Position) -> Position:
    """Return a position that can be committed."""
    where = f"{place.topic}-{place.partition}"
    checks.whole_number(place.partition, f"topic {place.topic!r} cannot have the partition")
    offset = checks.whole_number(position.offset, f"{where} cannot have the position")
    incarnation = checks.whole_number(position.incarnation, f"{where} cannot have the incarnation")
    epoch = checks.whole_number(position.epoch, f"{where} cannot have the epoch")
    note = position.metadata
    if note != "":
        checks.text(note, f"the position in {where}: metadata")
    return Position(offset, incarnation, epoch, position.time, note)


class _Vigil:
    """Watches a group until nobody is left or somebody lives, and evicts the dead."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.alive_until = 0.0
        self._watch = LeaseWatch(self._read, boot_seconds)
        self._first: dict[str, bytes | None] = {}

    def look(self) -> bool:
        """Look once; return whether to look again soon."""
        try:
            return self._look()
        except UnknownGroup:
            return False  # Deleted meanwhile.

    def _look(self) -> bool:
        members = self.group.look(lambda state: dict(state.members))
        timeouts = {
            member_id: 0.0 if is_closed(self._read(member_id)) else one.session_timeout_ms / 1000
            for member_id, one in members.items()
        }
        dead = self._watch.observe(timeouts, interval=_WATCH_SECONDS)
        if any(self._first.setdefault(one, self._read(one)) != self._read(one) for one in members):
            self.alive_until = boot_seconds() + max(timeouts.values())
            return False
        self.group.evict(dead, by=None, is_dead=self._watch.is_still)
        return bool(members)

    def _read(self, member_id: str) -> bytes | None:
        return self.group.storage.read(lease_path(self.group.directory, member_id))
