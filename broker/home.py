"""Where a journal lives: the folder of one incarnation of a topic or a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from broker.errors import AlreadyExists, LogError, StorageError, UnknownTopic
from broker.storage import LocalStorage


@dataclass(frozen=True, slots=True)
class Home:
    """`<parent>/<incarnation>`: a name that is deleted and made again gets the next number.

    Until a later incarnation exists, `<incarnation>.deleted` keeps a number from being used again.

    Args:
        parent: the folder of all incarnations of this name.
    """

    noun: str
    parent: str
    name: str
    incarnation: int
    lock: str
    unknown: Callable[..., LogError]

    @property
    def directory(self) -> str:
        return f"{self.parent}/{self.incarnation}"

    @property
    def deletion_mark(self) -> str:
        return f"{self.directory}.deleted"

    def absent(self) -> LogError:
        return self.unknown(self.name)

    def deleted(self) -> LogError:
        return self.unknown(self.name, "was deleted", "create it again or choose another")


def topic_home(name: str, incarnation: int) -> Home:
    return Home("topic", f"topics/{name}", name, incarnation, lock=name, unknown=UnknownTopic)


def newest_incarnation(storage: LocalStorage, parent: str) -> tuple[int, bool]:
    """Return the newest incarnation and whether it is there, or the next free number."""
    newest, deleted = 0, 0
    for entry in storage.list(parent):
        number, _, suffix = entry.partition(".")
        if not number.isdigit():
            continue
        if suffix == "deleted":
            deleted = max(deleted, int(number))
        elif not suffix:
            newest = max(newest, int(number))
    if newest <= deleted:
        return deleted + 1, False
    return newest, bool(storage.list(f"{parent}/{newest}/journal"))


def remove_deleted(storage: LocalStorage, home: Home) -> None:
    """Remove the files of an incarnation whose journal ends with a delete commit.

    The mark comes first and stays until a later incarnation exists, so that its number is never
    used again.
    """
    try:
        storage.create(home.deletion_mark, b"deleted\n")
    except AlreadyExists:
        pass
    storage.remove_tree(home.directory)


def remove_leftovers(storage: LocalStorage, home: Home) -> None:
    """Remove what earlier incarnations left; the new one is there even if that fails."""
    with contextlib.suppress(StorageError):
        for entry in storage.list(home.parent):
            number, _, suffix = entry.partition(".")
            if not number.isdigit() or int(number) >= home.incarnation:
                continue
            if suffix:
                storage.remove(f"{home.parent}/{entry}")
            else:
                storage.remove_tree(f"{home.parent}/{entry}")
