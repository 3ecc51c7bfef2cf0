"""Verifying one consumer group: its journal, its checkpoints, and the leases of its members.

A group's journal is short: writers remove each file that two durable checkpoints cover, for only
the state of a group counts. So its beginning is mostly what the older of the two says.
"""

from __future__ import annotations

from broker import checkpoint
from broker.group import checkpoint as group_checkpoint
from broker.group import lease
from broker.group.group import group_home
from broker.group.state import GroupState
from broker.storage import Storage
from broker.verify.findings import GroupReport
from broker.verify.group_replay import GroupReplay
from broker.verify.ledger import LedgerCheck

_LEASE_LOOKS = 3


def verify_group(storage: Storage, name: str, incarnation: int) -> GroupReport | None:
    """Read every byte of a group; None if it is deleted."""
    check = _GroupCheck(storage, name, incarnation)
    check.run()
    state = check.walk.replay.state
    is_gone = storage.exists(group_home(name, incarnation).deletion_mark)
    if is_gone or state.is_deleted:
        return None
    return check.findings.group_report(
        name,
        incarnation,
        member_count=len(state.members),
        position_count=len(state.positions),
    )


class _GroupCheck(LedgerCheck[GroupState]):
    """One group incarnation, while it is verified."""

    def __init__(self, storage: Storage, name: str, incarnation: int) -> None:
        home = group_home(name, incarnation)
        super().__init__(storage, home, GroupReplay(name, incarnation), group_checkpoint.decode)

    def _first_needed(self) -> int:
        # After the walk: files may have been removed meanwhile, after a newer checkpoint.
        durable = checkpoint.durable_numbers(self._storage, f"{self._directory}/checkpoint")
        if len(durable) > 1:
            return durable[-2]
        # With one left, what is gone went while there were two.
        return durable[0] if durable and self.walk.first_file else 0

    def _first_file(self, state: GroupState) -> int:
        return state.file_number

    def _differences(self, stored: GroupState, replayed: GroupState) -> list[str]:
        wrong = super()._differences(stored, replayed)
        # Assignments go by the order of the joins, too.
        if "members" not in wrong and list(stored.members) != list(replayed.members):
            wrong.append("members")
        return wrong

    def _take_notes(self) -> None:
        members = self.walk.replay.state.members
        for member_id in self._list("leases"):
            if member_id in members and not self._is_lease(member_id):
                self.findings.note(
                    f"leases/{member_id} cannot be read; its member is taken for dead unless it "
                    "renews it"
                )
        super()._take_notes()

    def _is_lease(self, member_id: str) -> bool:
        path = lease.lease_path(self._directory, member_id)
        for _ in range(_LEASE_LOOKS):  # It is overwritten in place: one look may see half of it.
            data = self._storage.read(path)
            if data is None or lease.is_whole(data):
                return True
        return False
