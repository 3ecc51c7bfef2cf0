"""What callers give, checked where it comes in: past here a number is a number, a place a place.

A wrong type must not get as far as a commit, and a caller hears of it as of every other error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from broker.errors import InvalidOption, InvalidTopicName, LogError
from broker.records import TopicPartition
from broker.shapes import NUMBER_MAX as NUMBER_MAX

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_NAME_LENGTH_MAX = 249


def whole_number(
    value: Any, refusal: str, *, at_least: int = 0, error: type[LogError] = InvalidOption
) -> int:
    """Return an `int`. Numpy's whole numbers are taken; `True`, 1.0 and "1" are not.

    Args:
        refusal: what cannot be, up to the value: "cannot seek to".
    """
    number = value if type(value) is int else index(value)
    if number is None or not at_least <= number <= NUMBER_MAX:
        limit = f" from {at_least} on" if at_least > -NUMBER_MAX else ""
        raise error(f"{refusal} {value!r}; give a whole number (int){limit}")
    return number


def index(value: Any) -> int | None:
    """Return a whole number of any type as an `int`, or None if it is not one."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def milliseconds(value: Any, what: str) -> float:
    """Return how long to wait; `float("inf")` is taken."""
    number = value if isinstance(value, (int, float)) else index(value)
    if number is None or number != number:
        raise InvalidOption(f"{what}={value!r} is not a number of milliseconds")
    return number


def text(value: Any, what: str) -> str:
    """Return text that can be stored: not empty, and no half of a surrogate pair."""
    if not isinstance(value, str) or not value:
        raise InvalidOption(f"{what}={value!r} is not a text of 1 character or more")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"{what}={value!r} is not text that UTF-8 can hold") from None
    return value


def topic_name(name: Any) -> str:
    """Return the name of a topic, as Kafka allows it."""
    if not isinstance(name, str):
        raise InvalidTopicName(name, f"is of type {type(name).__name__}, not text")
    if not name:
        raise InvalidTopicName(name, "is empty")
    if name in (".", ".."):
        raise InvalidTopicName(name, "is a directory's name")
    if len(name) > _NAME_LENGTH_MAX:
        raise InvalidTopicName(name, f"has {len(name)} characters")
    wrong = sorted(set(name) - _NAME_CHARACTERS)
    if wrong:
        raise InvalidTopicName(name, f"has the character {wrong[0]!r}")
    return name


def place(given: Any) -> TopicPartition:
    """Return a partition of a topic; a pair that is not a `TopicPartition` is taken as well."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        topic, partition = given
        if type(given) is TopicPartition and type(partition) is int:
            return given
        number = partition if type(partition) is int else index(partition)
        if number is not None:
            return TopicPartition(topic, number)
    raise InvalidOption(f"{given!r} is not a partition; give TopicPartition(text, int)")


def places(given: Any) -> list[TopicPartition]:
    """Return partitions; those of one list, not one alone."""
    if isinstance(given, TopicPartition) or not isinstance(given, Iterable):
        raise InvalidOption(f"{given!r} is not a list of partitions; give [TopicPartition(...)]")
    return [place(one) for one in given]


def by_place(given: Any) -> dict[TopicPartition, Any]:
    """Return values by partition."""
    if not isinstance(given, Mapping):
        raise InvalidOption(f"{given!r} is not a dict; give {{TopicPartition(...): ...}}")
    return {place(one): value for one, value in given.items()}


def settings(given: Any) -> dict[str, Any]:
    """Return settings by name."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidOption(f"config={given!r} is not a dict of names and values")
    return dict(given)
