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

    def removed(self) -> LogError:
        return self.unknown(
            self.name,
            "was removed while it was in use",
            "open the log again, or restore its files from a copy",
        )


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
    # Without a journal it was never finished; with a checkpoint it was, and its journal is lost.
    folders = (f"{parent}/{newest}/{folder}" for folder in ("journal", "checkpoint"))
    return newest, any(storage.list(folder) for folder in folders)


def remove_deleted(storage: Storage, home: Home) -> None:
    """Remove the files of an incarnation whose journal ends with a delete commit.

    The mark comes first and stays until a later incarnation exists, so that its number is never
    used again. It is empty: on a full disk, which a delete is to give room, a name may still fit.
    """
    try:
        storage.create(home.deletion_mark, b"")
    except AlreadyExists:
        pass
    if storage.is_remote:
        _remove_all_but_the_journal(storage, home)
    else:
        storage.remove_tree(home.directory)


def _remove_all_but_the_journal(storage: Storage, home: Home) -> None:
    """Keep the journal for a time of grace: writers who are still at it must find the delete.

    Were it removed, the names of its commits would be free, and they would go on writing there.
    """
    for entry in storage.list(home.directory):
        if entry != "journal":
            storage.remove_tree(f"{home.directory}/{entry}")
            storage.remove(f"{home.directory}/{entry}")


def remove_leftovers(storage: Storage, parent: str) -> None:
    """Remove what earlier incarnations left, after the time of grace; what fails can wait.

    A mark without a later incarnation stays, and what has no mark any more was left by those who
    woke up after it had been removed.
    """
    with contextlib.suppress(StorageError):
        present, is_there = newest_incarnation(storage, parent)
        names = storage.list(parent)
        numbers = {int(one) for name in names if (one := name.partition(".")[0]).isdigit()}
        for number in sorted(number for number in numbers if number < present):
            mark = f"{parent}/{number}.deleted"
            is_marked = f"{number}.deleted" in names
            if is_marked and not storage.may_remove(mark):
                continue
            # From its beginning on: see `storage.pieces`.
            for file in storage.list(f"{parent}/{number}/journal"):
                storage.remove(f"{parent}/{number}/journal/{file}")
            storage.remove_tree(f"{parent}/{number}")
            if is_there:
                storage.remove(mark)
