"""The config of the ETL job: a TOML file, read once. Nothing past this class sees its text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from broker import InvalidOption
from broker.errors import unknown_name

_DURATION = re.compile(r"([1-9][0-9]{0,8}) (second|minute|hour|day)s?")


@dataclass(frozen=True, slots=True)
class EtlConfig:
    """What the job reads and writes. An empty text is "not set"."""

    log: str = ""
    input: str = ""
    bronze: str = "orders"
    silver: str = "orders-silver"
    dead_letter: str = "orders-dead-letter"
    gold: str = ""
    checkpoints: str = ""
    partitions: int = 4
    late: str = "2 hours"
    window: str = "1 hour"
    records_per_batch: int = 1_000_000
    interval: str = "10 seconds"
    spark: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str, *, log: str | None = None) -> EtlConfig:
        """Read a file.

        Args:
            log: the log that the user named elsewhere; used if the file names none.

        Raises:
            InvalidOption: the file cannot be read, or has a key or a value that cannot be used.
        """
        try:
            given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidOption(f"cannot read the config {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidOption(f"{path} is not TOML: {error}") from error
        try:
            if log and given.get("log", log) not in ("", log):
                raise InvalidOption(
                    f"log is {given['log']!r} here, and {log!r} by --log or SPARK_LOG_ROOT: which?"
                )
            return cls.parse({**given, "log": given.get("log") or log or ""})
        except InvalidOption as error:
            raise InvalidOption(f"{path}: {error}") from error

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> EtlConfig:
        known = {one.name: one.type for one in fields(cls)}
        for name in given:
            if name not in known:
                raise unknown_name("key", name, known)
        parsed = cls(**{name: _checked(name, known[name], value) for name, value in given.items()})
        parsed._check()
        return parsed

    def checkpoint(self, step: str) -> str:
        return f"{self.checkpoints.rstrip('/')}/{step}"

    def _check(self) -> None:
        for name in ("log", "bronze", "silver", "dead_letter", "gold", "checkpoints"):
            if not getattr(self, name):
                raise InvalidOption(f"{name} is not set")
        for name in ("late", "window", "interval"):
            if not _DURATION.fullmatch(getattr(self, name)):
                raise InvalidOption(
                    f"{name}={getattr(self, name)!r} is not a time; use e.g. '10 seconds' or "
                    "'2 hours'"
                )
        if len({self.bronze, self.silver, self.dead_letter}) < 3:
            raise InvalidOption(
                "bronze, silver and dead_letter must be three topics: a job that reads what it "
                "writes never ends"
            )


def _checked(name: str, kind: object, value: Any) -> Any:
    if kind == "int":
        if type(value) is not int or not 1 <= value <= 1 << 31:
            raise InvalidOption(f"{name}={value!r} is not a whole number of 1 or more")
    elif kind == "str":
        if not isinstance(value, str):
            raise InvalidOption(f"{name}={value!r} is not a text")
    elif not isinstance(value, dict):
        raise InvalidOption(f"{name}={value!r} is not a table of Spark's settings")
    else:
        return {key: _setting(key, one) for key, one in _flat(value).items()}
    return value


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML reads `sql.shuffle.partitions = 2` as tables within tables."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _setting(key: str, value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise InvalidOption(f"spark: {key}={value!r} is not a text, a number or true or false")
    return str(value).lower() if isinstance(value, bool) else str(value)
