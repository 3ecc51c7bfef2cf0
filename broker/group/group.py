"""One group, open: what can be done with it, each as one commit."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from broker.commit import Author, Kind, pack, pack_details
from broker.errors import (
    AlreadyExists,
    CommitFailed,
    GroupNotEmpty,
    InvalidOption,
    StorageError,
    UnknownGroup,
)
from broker.group import checkpoint, names
from broker.group.assignment import common_strategy
from broker.group.state import GroupState, KnownTopic, Member, Position, format_places
from broker.home import Home, remove_deleted
from broker.ledger import LOCK_WAIT_MS, REMOTE_CHECKPOINT_COMMITS, CompleteFile, Ledger, new_token
from broker.records import TopicPartition
from broker.storage import Storage
from broker.storage.watch import Pause
from broker.synced import Synced

logger = logging.getLogger(__name__)

# Small: a group's commits are short, and its past is of no use to anybody.
_FILE_BYTES_MAX = 4 << 20
_CHECKPOINT_COMMITS = 1000

Seen = TypeVar("Seen")


def group_home(name: str, incarnation: int) -> Home:
    encoded = names.encode(name)
    return Home(
        "group",
        f"groups/{encoded}",
        name,
        incarnation,
        lock=f"group={encoded}",
        unknown=UnknownGroup,
    )


class Group(Ledger[GroupState]):
    """An open group incarnation."""

    def __init__(
        self, storage: Storage, name: str, incarnation: int, *, write: bool = False
    ) -> None:
        super().__init__(storage, group_home(name, incarnation), write=write)
        # How long to wait for the others, where a call does not say it.
        self.lock_wait_ms = LOCK_WAIT_MS
        # When a member's glance last read the journal, by that member's clock.
        self.read_at = float("-inf")
        self._pause = Pause(0.0)

    def look(self, see: Callable[[GroupState], Seen]) -> Seen:
        """Read on, and return what `see` makes of the state while nobody changes it.

        Raises:
            UnknownGroup: the group was deleted.
        """
        with self._mutex:
            return see(self._present())

    def glance(
        self, see: Callable[[GroupState], Seen], now: float, *, afresh: bool = False
    ) -> Seen:
        """Do the same with what was read a moment ago, where to ask costs a request."""
        with self._mutex:
            if self._is_stale or afresh or self._pause.may_look():
                version = self.state.version
                self._present()
                self.read_at = now
                if self.state.version != version:
                    self._pause.changed()
            if self.state.is_deleted:
                raise self.home.deleted()
            return see(self.state)

    def ask_every(self, seconds: float) -> None:
        """Let glances ask the store so often while nothing changes, and more often after."""
        self._pause = Pause(seconds)

    def _present(self) -> GroupState:
        self._check_usable()
        if self._is_stale:
            self._load()
        else:
            self._read_on()
        if self.state.is_deleted:
            raise self.home.deleted()
        return self.state

    def alone(self, act: Callable[[GroupState], Seen]) -> Seen:
        """Do something under the lock, up to date.

        Where there is a lock, nobody joins, leaves or is evicted meanwhile; where there is none,
        only what is committed is sure.
        """
        return self._attempt(act, self.lock_wait_ms)

    # Members.

    def join(self, member: Member) -> Member | None:
        """Add a member; return the one it replaces, if it has the same instance id."""
        leases = self.storage.list(f"{self.directory}/leases")

        def act(state: GroupState) -> Member | None:
            # A member writes its lease after its join: these are of members that are gone.
            for name in leases:
                if name not in state.members:
                    self.storage.remove(f"{self.directory}/leases/{name}")
            old = state.instance(member.instance_id) if member.instance_id is not None else None
            others = [one for one in state.members.values() if one is not old]
            known = [one.strategies for one in others] + [member.strategies]
            if common_strategy(known) is None:
                raise InvalidOption(
                    f"partition_assignment_strategy={', '.join(member.strategies)}: the members of "
                    f"group {self.name!r} use {', '.join(others[0].strategies)}; use one of these"
                )
            replaces = {} if old is None else {"replaces": old.member_id}
            self._record(Kind.JOIN, {**member.details(), **replaces})
            return old

        return self._enter(act)

    def leave(self, member_id: str) -> None:
        """Remove a member that goes by itself; it may be gone already."""

        def act(state: GroupState) -> None:
            if member_id in state.members:
                self._record(Kind.LEAVE, {"member": member_id})

        self._enter(act)

    def evict(
        self,
        member_ids: Iterable[str],
        *,
        by: str | None,
        is_dead: Callable[[str], bool],
        timeout_ms: int | None = None,
    ) -> list[str]:
        """Remove members that are dead; return those that were removed.

        Args:
            by: the member that noticed; one that was evicted itself evicts nobody. None for tools.
            is_dead: asked again under the lock, under which those who were away come back.
        """
        suspects = list(member_ids)

        def act(state: GroupState) -> list[str]:
            if by is not None and by not in state.members:
                return []
            gone = [one for one in suspects if one in state.members and is_dead(one)]
            if gone:
                self._record(Kind.EVICT, {"members": gone})
            return gone

        return self._enter(act, timeout_ms)

    def release(self, member_id: str, places: Iterable[TopicPartition]) -> None:
        """Give up partitions that this member has: from here on they are another's."""
        unwanted = list(places)

        def act(state: GroupState) -> None:
            given = [
                place
                for place in unwanted
                if place in state.owners and state.owners[place].member_id == member_id
            ]
            if given:
                details = {"member": member_id, "partitions": format_places(given)}
                self._record(Kind.RELEASE, details)

        self._enter(act)

    def assign(
        self,
        make: Callable[[GroupState], tuple[dict[str, KnownTopic], dict[str, Any]] | None],
        timeout_ms: int | None = None,
    ) -> bool:
        """Commit the assignment that `make` returns for the state under the lock, if any."""

        def act(state: GroupState) -> bool:
            made = make(state)
            if made is None:
                return False
            topics, members = made
            generation = state.generation + 1
            details = {"generation": generation, "topics": topics, "members": members}
            self._record(Kind.ASSIGN, details)
            return True

        return self._enter(act, timeout_ms)

    # Positions.

    def commit_positions(
        self, positions: Mapping[TopicPartition, Position], *, member_id: str, generation: int
    ) -> None:
        """Commit positions of a member.

        Raises:
            CommitFailed: it does not have one of the partitions (any more); nothing was written.
        """

        def act(state: GroupState) -> int:
            self._check_owner(state, positions, member_id, generation)
            who = f'"member":{json.dumps(member_id)},"generation":{generation},'
            self._record_positions(positions, who)
            return state.number

        number = self._attempt(act, self.lock_wait_ms)
        if number % self._checkpoint_commits == 0:
            self._write_soft_checkpoint()

    def publish(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Commit positions on behalf of somebody who is not a member."""

        def act(state: GroupState) -> None:
            self.check_empty(state, "commit positions from outside")
            for some in _by_time_of_topic(positions):
                self._record_positions(some, "")

        self._enter(act)

    def forget(self, places: Iterable[TopicPartition]) -> None:
        """Remove positions of a group without members."""
        unwanted = list(places)

        def act(state: GroupState) -> None:
            self.check_empty(state, "remove positions")
            known = [place for place in unwanted if place in state.positions]
            if known:
                self._record(Kind.FORGET, {"positions": format_places(known)})

        self._enter(act)

    def expire(self) -> int:
        """Remove the positions that are too old by the group's setting; return how many."""
        return self._enter(lambda state: self._expire())

    # The group itself.

    def configure(self, config: Mapping[str, Any]) -> None:
        """Change settings; a value of None goes back to the default."""

        def act(state: GroupState) -> None:
            merged = {**state.config, **config}
            kept = {name: value for name, value in merged.items() if value is not None}
            self._record(Kind.CONFIG, {"config": kept})

        self._enter(act)

    def delete(self) -> None:
        """Commit the end of this incarnation, then remove its files."""

        def check(state: GroupState) -> dict[str, Any]:
            self.check_empty(state, "delete it")
            return {}

        self._change(Kind.DELETE, check)
        self.close()
        remove_deleted(self.storage, self.home)

    def check_empty(self, state: GroupState, what: str) -> None:
        if state.members:
            raise GroupNotEmpty(self.name, len(state.members), what)

    def _check_owner(
        self,
        state: GroupState,
        places: Iterable[TopicPartition],
        member_id: str,
        generation: int,
    ) -> None:
        if member_id not in state.members:
            raise CommitFailed(self.name, "this consumer is no longer a member", state.generation)
        for place in places:
            owner = state.owners.get(place)
            if owner is None or owner.member_id != member_id or generation < owner.generation:
                what = f"{place.topic}-{place.partition} does not belong to this member"
                raise CommitFailed(self.name, what, state.generation)

    def _enter(self, act: Callable[[GroupState], Seen], timeout_ms: int | None = None) -> Seen:
        """Make commits, and afterwards a checkpoint if it is time for one."""
        before = self.state.number
        seen = self._attempt(act, self.lock_wait_ms if timeout_ms is None else timeout_ms)
        if before // self._checkpoint_commits != self.state.number // self._checkpoint_commits:
            self._write_soft_checkpoint()
        return seen

    def _record(self, kind: Kind, details: dict[str, Any]) -> None:
        """Under the lock: write one commit, and end the file if it is full."""
        self._commit(kind, Author(new_token()), details=details)
        if self._is_file_full:
            self._roll_if_possible()

    def _record_positions(self, positions: Mapping[TopicPartition, Position], who: str) -> None:
        """Under the lock: the most common commit, with nothing done that it does not need."""
        state = self.state
        now = max(self._clock() // 1_000_000, state.time)
        parts, length = pack_details(
            Kind.POSITION, new_token(), self.incarnation, state.number, state.position, now,
            _details(positions, who),
        )  # fmt: skip
        self._write_commit(parts, length)
        state.apply_positions(positions, now, length)
        self._is_stale = False
        if self._is_file_full:
            self._roll_if_possible()

    def _expire(self) -> int:
        old = self.state.expired_positions(self._clock() // 1_000_000)
        if old:
            self._commit(
                Kind.FORGET, Author(new_token()), details={"positions": format_places(old)}
            )
        return len(old)

    def _before_end_of_file(self) -> None:
        self._expire()

    def _finish_file(self, file: CompleteFile, number: int, data: bytes) -> None:
        """After a new checkpoint, remove what nobody needs: only the state of a group counts."""
        super()._finish_file(file, number, data)
        try:
            for covered in self.covered_files():
                path = self.journal.file_path(covered)
                if self.storage.may_remove(path):
                    self.storage.remove(path)
        except StorageError as error:
            logger.warning("could not remove old files of group %r: %s", self.name, error)

    def _new_state(self) -> GroupState:
        return GroupState(self.home.incarnation)

    def _encode(self, state: GroupState, boot_id: str) -> bytes:
        return checkpoint.encode(state, boot_id)

    def _decode(self, data: bytes, path: str) -> tuple[GroupState, str]:
        return checkpoint.decode(data, path)

    def _recovery_details(self) -> dict[str, Any]:
        return {}

    @property
    def _file_bytes_max(self) -> int:
        return _FILE_BYTES_MAX

    @property
    def _checkpoint_commits(self) -> int:
        return REMOTE_CHECKPOINT_COMMITS if self.storage.is_remote else _CHECKPOINT_COMMITS


def create(storage: Storage, name: str, incarnation: int) -> None:
    """Make a group by its first commit; that another has made it meanwhile is fine."""
    directory = group_home(name, incarnation).directory
    parts, _length, _meta = pack(
        Kind.CREATE,
        Author(new_token()),
        incarnation=incarnation,
        number=0,
        position=0,
        time=storage.clock() // 1_000_000,
        details={"group": name},
    )
    # Before the group exists, so that a missing `synced` always means: lost, check everything.
    with contextlib.suppress(AlreadyExists):
        storage.create(f"{directory}/synced", Synced(0, 0, storage.boot_id).encode())
    with contextlib.suppress(AlreadyExists):
        storage.create_appended(f"{directory}/journal/{0:020d}.log", b"".join(parts))


def _by_time_of_topic(
    positions: Mapping[TopicPartition, Position],
) -> list[dict[TopicPartition, Position]]:
    """Divide positions such that each part has one incarnation and epoch of each topic.

    A commit says them once for a topic. Those of partitions only differ if somebody hands on
    positions that were committed before and after a power cut.
    """
    parts: list[dict[TopicPartition, Position]] = []
    marks: list[dict[str, tuple[int, int]]] = []
    for place, position in positions.items():
        mark = position.incarnation, position.epoch
        for part, known in zip(parts, marks, strict=True):
            if known.setdefault(place.topic, mark) == mark:
                part[place] = position
                break
        else:
            parts.append({place: position})
            marks.append({place.topic: mark})
    return parts


def _details(positions: Mapping[TopicPartition, Position], who: str) -> str:
    """Return what a position commit says, as JSON.

    Args:
        who: the fields that name a member, each with a comma after it.
    """
    by_topic: dict[tuple[str, int, int], list[str]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for (topic, partition), (offset, incarnation, epoch, _time, note) in positions.items():
        key = (topic, incarnation, epoch)
        if key not in by_topic:
            by_topic[key] = []
        # As whole numbers, or not at all: what is written here is not read back first.
        by_topic[key].append(f'"{partition:d}":{offset:d}')
        if note:
            metadata.setdefault(topic, {})[str(partition)] = note
    # A topic's name has no character that JSON would escape.
    topics = ",".join(
        f'"{topic}":[{incarnation},{epoch},{{{",".join(offsets)}}}]'
        for (topic, incarnation, epoch), offsets in by_topic.items()
    )
    notes = f',"metadata":{json.dumps(metadata)}' if metadata else ""
    return f'{{{who}"positions":{{{topics}}}{notes}}}'
