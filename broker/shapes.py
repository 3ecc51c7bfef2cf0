"""What the details of each kind of commit look like, by the kind's name in docs/PROTOCOL.md.

Checked before a commit is written and whenever it is read: one whose details have another shape
could not be applied by anybody, and would end the topic or the group that it is in. Fields that are
not known are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

# The largest number that checkpoints and the tables of commits hold.
NUMBER_MAX = (1 << 63) - 1
_PRODUCER_ID_MAX = (1 << 64) - 1

Shape = Callable[[Any], bool]


def check(kind: str, details: Any) -> None:
    """Raise `ValueError` if the details of a commit of this kind have another shape.

    A field that is missing shows when the commit is applied: some are only missing at times.
    """
    if not isinstance(details, dict):
        raise ValueError(f"the details of a {kind} commit are not an object")
    for name, is_right in _SHAPES.get(kind, {}).items():
        if name in details and not is_right(details[name]):
            text = repr(details[name])
            shown = text if len(text) <= 80 else text[:77] + "..."
            raise ValueError(f"a {kind} commit cannot have {name}={shown}")


def _integer(value: Any) -> bool:
    return type(value) is int and -NUMBER_MAX <= value <= NUMBER_MAX


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _producer_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _PRODUCER_ID_MAX


def _text(value: Any) -> bool:
    return type(value) is str


def _text_or_null(value: Any) -> bool:
    return value is None or type(value) is str


def _anything(value: Any) -> bool:
    return True


def _counts(value: Any) -> bool:
    return type(value) is list and _are_counts(value)


def _by_partition(item: Shape) -> Shape:
    return lambda value: _has_partitions(value) and all(map(item, value.values()))


def _offsets(value: Any) -> bool:
    return _has_partitions(value) and _are_counts(value.values())


def _are_counts(values: Collection[Any]) -> bool:
    """Tell as `_count` of each, in a fraction of the time: a member reads many of these."""
    return not values or (
        set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= NUMBER_MAX
    )


def _has_partitions(value: Any) -> bool:
    """Tell whether the names of the fields are partitions."""
    return type(value) is dict and "".join(value).isascii() and all(map(str.isdecimal, value))


def _list(item: Shape) -> Shape:
    return lambda value: type(value) is list and all(map(item, value))


def _map(key: Shape, item: Shape) -> Shape:
    return lambda value: (
        type(value) is dict and all(map(key, value)) and all(map(item, value.values()))
    )


def _row(*items: Shape) -> Shape:
    return lambda value: (
        type(value) is list
        and len(value) == len(items)
        and all(item(one) for item, one in zip(items, value, strict=True))
    )


_PLACES = _map(_text, _counts)
_CONFIG = _map(_text, _anything)
_SEALED_FILE = _row(_text, *([_integer] * 10))

_SHAPES: dict[str, dict[str, Shape]] = {
    "CREATE": {"partitions": _count, "config": _CONFIG, "group": _text},
    "APPEND": {"files": _list(_text), "transaction": _row(_text, _integer)},
    "CONFIG": {"partitions": _count, "config": _CONFIG},
    "TRUNCATE": {"starts": _offsets},
    "RECOVER": {"epoch": _count, "ends": _counts},
    "EXPIRE": {"producers": _list(_producer_id)},
    "SEAL": {"added": _list(_SEALED_FILE), "removed": _list(_text), "cleaned": _offsets},
    "TRIM": {"before": _count},
    "JOIN": {
        "member": _text,
        "client": _text,
        "host": _text,
        "instance": _text_or_null,
        "topics": _list(_text),
        "pattern": _text_or_null,
        "strategies": _list(_text),
        "session_timeout_ms": _count,
        "replaces": _text_or_null,
    },
    "LEAVE": {"member": _text},
    "EVICT": {"members": _list(_text)},
    "RELEASE": {"member": _text, "partitions": _PLACES},
    "ASSIGN": {
        "generation": _count,
        "topics": _map(_text, _row(_count, _count)),
        "members": _map(_text, _PLACES),
    },
    "POSITION": {
        "member": _text,
        "generation": _count,
        "positions": _map(_text, _row(_count, _count, _offsets)),
        "metadata": _map(_text, _by_partition(_text)),
    },
    "FORGET": {"positions": _PLACES},
}
