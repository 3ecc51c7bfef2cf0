"""Names of files that are written before a commit names them, and how long it may do so.

A name begins with the time at which the file was begun. A commit may name a file only within some
days of that, by the commit's own time; since commit times never go back, a file that is older than
the journal's time by more than that, and that nothing names, will never be named: it is garbage.
So a slow job and a cleaner cannot both win, and nobody has to remember what was removed.
"""

from __future__ import annotations

import uuid

NAMED_WITHIN_MS = 3 * 86_400_000
GARBAGE_AFTER_MS = 7 * 86_400_000


def new_name(clock_ns: int, suffix: str) -> str:
    return f"{clock_ns // 1_000_000:013d}-{uuid.uuid4().hex}{suffix}"


def may_be_named(name: str, commit_time: int) -> bool:
    """Tell whether a commit of this time may name the file."""
    born = born_ms(name)
    return born is None or commit_time - born <= NAMED_WITHIN_MS


def is_garbage(name: str, journal_time: int) -> bool:
    """Tell whether a file that nothing names will never be named."""
    born = born_ms(name)
    return born is not None and journal_time - born > GARBAGE_AFTER_MS


def born_ms(name: str) -> int | None:
    """Return when a file was begun; None for names without a time."""
    text = name.rpartition("/")[2].partition("-")[0]
    return int(text) if len(text) == 13 and text.isdigit() else None
