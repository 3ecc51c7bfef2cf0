"""Where a journal lives: the folder of one incarnation of a topic or a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from broker.errors import AlreadyExists, LogError, StorageError, UnknownTopic
from broker.storage import Storage


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


def newest_incarnation(storage: Storage, parent: str) -> tuple[int, bool]:
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


def remove_deleted(storage: Storage, home: Home) -> None:
    """Remove the files of an incarnation whose journal ends with a delete commit.

    The mark comes first and stays until a later incarnation exists, so that its number is never
    used again.
    """
    try:
        storage.create(home.deletion_mark, b"deleted\n")
    except AlreadyExists:
        pass
    if storage.is_remote:
        _remove_all_but_the_end(storage, home)
    else:
        storage.remove_tree(home.directory)


def _remove_all_but_the_end(storage: Storage, home: Home) -> None:
    """Keep the journal's last file: writers who are still at it must find the delete commit.

    Were it removed, the names of its commits would be free, and they would go on writing there.
    """
    for entry in storage.list(home.directory):
        if entry != "journal":
            storage.remove_tree(f"{home.directory}/{entry}")
            storage.remove(f"{home.directory}/{entry}")
    for file in storage.list(f"{home.directory}/journal")[:-1]:
        storage.remove(f"{home.directory}/journal/{file}")


def remove_leftovers(storage: Storage, home: Home) -> None:
    """Remove what earlier incarnations left; the new one is there even if that fails."""
    with contextlib.suppress(StorageError):
        for entry in storage.list(home.parent):
            number, _, suffix = entry.partition(".")
            if not number.isdigit() or int(number) >= home.incarnation:
                continue
            if storage.is_remote and not storage.may_remove(f"{home.parent}/{number}.deleted"):
                continue
            if suffix:
                storage.remove(f"{home.parent}/{entry}")
            else:
                storage.remove_tree(f"{home.parent}/{entry}")
