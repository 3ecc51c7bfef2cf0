"""One group, open: what can be done with it, each as one commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.commit import Author, Kind, pack
from broker.errors import AlreadyExists, UnknownGroup
from broker.group import checkpoint, names
from broker.group.state import GroupState, Position
from broker.home import Home, remove_deleted
from broker.ledger import Ledger, new_token
from broker.records import TopicPartition
from broker.storage import LocalStorage
from broker.synced import Synced

# Small: a group's commits are short, and its past is of no use to anybody.
_FILE_BYTES_MAX = 4 << 20
_CHECKPOINT_COMMITS = 1000


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
        self, storage: LocalStorage, name: str, incarnation: int, *, write: bool = False
    ) -> None:
        super().__init__(storage, group_home(name, incarnation), write=write)

    def publish(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Commit positions on behalf of somebody who is not a member."""
        self._lock()
        try:
            self._commit_positions(positions, {})
        finally:
            self._unlock()
        self._checkpoint_now_and_then()

    def delete(self) -> None:
        """Commit the end of this incarnation, then remove its files."""
        self._change(Kind.DELETE, lambda state: {})
        self.close()
        remove_deleted(self.storage, self.home)

    def _commit_positions(
        self, positions: Mapping[TopicPartition, Position], who: dict[str, Any]
    ) -> None:
        """Under the lock: one commit with all these positions."""
        self._commit(Kind.POSITION, Author(new_token()), details={**who, **_details(positions)})
        if self.state.position >= self._file_bytes_max:
            self._roll_if_possible()

    def _checkpoint_now_and_then(self) -> None:
        if self.state.number % self._checkpoint_commits == 0:
            self._write_soft_checkpoint()

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
        return _CHECKPOINT_COMMITS


def create(storage: LocalStorage, name: str, incarnation: int) -> None:
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
    for path, data in (
        ("synced", Synced(0, 0, storage.boot_id).encode()),
        (f"journal/{0:020d}.log", b"".join(parts)),
    ):
        try:
            storage.create(f"{directory}/{path}", data)
        except AlreadyExists:
            pass


def _details(positions: Mapping[TopicPartition, Position]) -> dict[str, Any]:
    by_topic: dict[str, tuple[int, int, dict[int, int]]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for (topic, partition), position in positions.items():
        offset, incarnation, epoch, _time, note = position
        entry = by_topic.get(topic)
        if entry is None:
            entry = by_topic[topic] = (incarnation, epoch, {})
        entry[2][partition] = offset
        if note:
            metadata.setdefault(topic, {})[str(partition)] = note
    return {"positions": by_topic, "metadata": metadata} if metadata else {"positions": by_topic}
