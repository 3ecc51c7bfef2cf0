"""Where a journal lives: the folder of one incarnation of a topic or a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.errors import LogError, UnknownTopic


@dataclass(frozen=True, slots=True)
class Home:
    """`<folder>/<name>/<incarnation>`: a name that is deleted and made again gets the next number.

    Until a later incarnation exists, `<incarnation>.deleted` keeps a number from being used again.
    """

    noun: str
    folder: str
    name: str
    incarnation: int
    lock: str
    unknown: Callable[..., LogError]

    @property
    def directory(self) -> str:
        return f"{self.folder}/{self.name}/{self.incarnation}"

    @property
    def deletion_mark(self) -> str:
        return f"{self.directory}.deleted"

    def absent(self) -> LogError:
        return self.unknown(self.name)

    def deleted(self) -> LogError:
        return self.unknown(self.name, "was deleted", "create it again or choose another")


def topic_home(name: str, incarnation: int) -> Home:
    return Home("topic", "topics", name, incarnation, lock=name, unknown=UnknownTopic)
