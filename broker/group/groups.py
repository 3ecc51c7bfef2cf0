"""All groups of a log: found, made, opened and removed by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from broker.errors import InvalidOption, UnknownGroup
from broker.group import group as journal
from broker.group import names
from broker.group.group import Group, group_home
from broker.group.state import Position
from broker.home import newest_incarnation, remove_deleted, remove_leftovers
from broker.records import TopicPartition
from broker.storage import LocalStorage
from broker.topic import Topic

_CREATE_TRIES = 10


class Groups:
    """The groups below one root."""

    def __init__(self, storage: LocalStorage, open_topic: Callable[[str], Topic]) -> None:
        self._storage = storage
        self.open_topic = open_topic

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

    def publish(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit positions for a group that has no members, making it if it is absent."""
        positions = self.locate(offsets)
        group = self.open_or_create(name)
        try:
            if positions:
                group.publish(positions)
        finally:
            group.close()

    def locate(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, Position]:
        """Return offsets as positions in the topics of today."""
        marks = self._marks(place.topic for place in offsets)
        located = {}
        for place, offset in offsets.items():
            if type(offset) is not int or offset < 0:
                raise InvalidOption(
                    f"{place.topic}-{place.partition} cannot have the position {offset!r}; give an "
                    "offset from 0 on"
                )
            located[place] = Position(offset, *marks[place.topic], time=0)
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

    def _marks(self, topics: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return incarnation and epoch of each topic."""
        marks = {}
        for name in set(topics):
            topic = self.open_topic(name)
            marks[name] = (topic.state.incarnation, topic.state.epoch)
            topic.close()
        return marks

    def _find(self, name: str) -> tuple[int, bool]:
        return newest_incarnation(self._storage, group_home(name, 1).parent)

    def _create(self, name: str) -> None:
        incarnation, is_there = self._find(name)
        if is_there:
            # Its delete was committed, and its files were not removed any more.
            remove_deleted(self._storage, group_home(name, incarnation))
            incarnation += 1
        journal.create(self._storage, name, incarnation)
        remove_leftovers(self._storage, group_home(name, incarnation))
