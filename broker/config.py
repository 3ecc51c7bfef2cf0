"""What can be set: topic settings (Kafka's dotted names) and client options (kafka-python's names).

Each is parsed once, here; nothing past this module sees a name or a value it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from broker import checks
from broker.errors import InvalidOption, unknown_name

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
CLEANUP_POLICIES = ("delete", "compact", "compact,delete", "delete,compact")
TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """How the text or number of one option becomes its value."""

    kind: type
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    is_optional: bool = False

    def parse(self, name: str, value: object) -> Any:
        if value is None and self.is_optional:
            return None
        if self.choices:
            return self._choice(name, value)
        if self.kind is bool:
            return _boolean(name, value)
        if self.kind is str:
            return _text(name, value)
        parsed = self._number(name, value)
        if self.at_least is not None and parsed < self.at_least:
            raise InvalidOption(f"{name}={value!r} is too small; use at least {self.at_least:g}")
        if self.at_most is not None and parsed > self.at_most:
            raise InvalidOption(f"{name}={value!r} is too large; use at most {self.at_most:g}")
        return parsed

    def _choice(self, name: str, value: object) -> str:
        if isinstance(value, str) and value in self.choices:
            return value
        raise InvalidOption(f"{name}={value!r} is not one of {', '.join(self.choices)}")

    def _number(self, name: str, value: object) -> Any:
        noun = "a whole number" if self.kind is int else "a number"
        try:
            if isinstance(value, bool):
                raise ValueError(value)
            parsed = self.kind(value)
            if self.kind is int and isinstance(value, float) and parsed != value:
                raise ValueError(value)
            if parsed != parsed:
                raise ValueError(value)
            return parsed
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidOption(f"{name}={value!r} is not {noun}") from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidOption(f"{name}={value!r} is not a text")
    return value


def _boolean(name: str, value: object) -> bool:
    found = {"true": True, "false": False}.get(str(value).lower())
    if found is None:
        raise InvalidOption(f"{name}={value!r} is not true or false")
    return found


# Bytes of one journal file. Tests use tiny files to reach every roll.
SEGMENT_BYTES = 64 << 20

TOPIC_SETTINGS: dict[str, tuple[Rule, Any]] = {
    "checkpoint.commits": (Rule(int, at_least=1), 1000),
    "cleanup.policy": (Rule(str, choices=CLEANUP_POLICIES), "delete"),
    "compression.type": (Rule(str, choices=("producer", *CODECS)), "producer"),
    "delete.retention.ms": (Rule(int, at_least=0), 86_400_000),
    "file.delete.delay.ms": (Rule(int, at_least=0), 3_600_000),
    "maintenance.enabled": (Rule(bool), True),
    "max.message.bytes": (Rule(int, at_least=0, at_most=1 << 30), 1_048_588),
    "message.timestamp.type": (Rule(str, choices=TIMESTAMP_TYPES), "CreateTime"),
    "min.cleanable.dirty.ratio": (Rule(float, at_least=0, at_most=1), 0.5),
    "min.compaction.lag.ms": (Rule(int, at_least=0), 0),
    "retention.bytes": (Rule(int, at_least=-1), -1),
    "retention.ms": (Rule(int, at_least=-1), 604_800_000),
    "seal.bytes": (Rule(int, at_least=1), 128 << 20),
    "seal.ms": (Rule(int, at_least=0), 3_600_000),
    "segment.bytes": (Rule(int, at_least=1, at_most=1 << 30), SEGMENT_BYTES),
    "table.delete.delay.ms": (Rule(int, at_least=0), 604_800_000),
}


def parse_topic_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """Check the settings a user gave; None stays, and means the default."""
    parsed = {}
    for name, value in given.items():
        if name not in TOPIC_SETTINGS:
            raise unknown_name("topic setting", name, TOPIC_SETTINGS)
        rule, _default = TOPIC_SETTINGS[name]
        parsed[name] = None if value is None else rule.parse(name, value)
    return parsed


def topic_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a topic: what was given, and the defaults."""
    return {name: given.get(name, default) for name, (_rule, default) in TOPIC_SETTINGS.items()}


GROUP_SETTINGS: dict[str, tuple[Rule, Any]] = {
    "offsets.retention.minutes": (Rule(int, at_least=1, is_optional=True), None),
}


def parse_group_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """Check the settings of a group; None goes back to the default."""
    for name in given:
        if name not in GROUP_SETTINGS:
            raise unknown_name("group setting", name, GROUP_SETTINGS)
    return {name: GROUP_SETTINGS[name][0].parse(name, value) for name, value in given.items()}


_TEXT = Rule(str, is_optional=True)
_POLL = Rule(int, at_least=1, at_most=86_400_000)

# Options of a store's driver, by the kind of store.
STORAGE_OPTIONS: dict[str, dict[str, tuple[Rule, Any]]] = {
    "hdfs": {
        "kerberos_cache": (_TEXT, None),
        "kerberos_keytab": (_TEXT, None),
        "kerberos_principal": (_TEXT, None),
        "poll.ms": (_POLL, 100),
        "user": (_TEXT, None),
    },
    "memory": {"poll.ms": (_POLL, 10)},
    "s3": {
        "anon": (Rule(bool), False),
        "endpoint_url": (_TEXT, None),
        "key": (_TEXT, None),
        "poll.ms": (_POLL, 1000),
        "profile": (_TEXT, None),
        "region": (_TEXT, None),
        "secret": (_TEXT, None),
        "token": (_TEXT, None),
    },
}
# HDFS's client also takes what Hadoop's own would.
HADOOP_PREFIXES = ("dfs.", "fs.", "hadoop.", "ipc.")


def is_storage_option(kind: str, name: str) -> bool:
    return name in STORAGE_OPTIONS[kind] or (kind == "hdfs" and name.startswith(HADOOP_PREFIXES))


def parse_storage_options(kind: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return every option of a kind of store: what was given, and the defaults."""
    known = STORAGE_OPTIONS[kind]
    parsed = {name: default for name, (_rule, default) in known.items()}
    for name, value in given.items():
        if not is_storage_option(kind, name):
            raise unknown_name(f"storage option of {kind}", name, known)
        if value == "" and name in known:
            continue  # As it stands in conf/storage.toml: not given.
        rule = known[name][0] if name in known else _TEXT
        parsed[name] = rule.parse(f"storage option {name}", value)
    return parsed


def _option(default: Any, rule: Rule | None = None) -> Any:
    return field(default=default, metadata={"rule": rule})


def _integer(default: int, at_least: int = 0) -> Any:
    return _option(default, Rule(int, at_least=at_least))


def _port() -> Any:
    return _option(None, Rule(int, at_least=0, at_most=65_535, is_optional=True))


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options of `log.producer(...)`."""

    key_serializer: Serializer | None = _option(None)
    value_serializer: Serializer | None = _option(None)
    compression_type: str | None = _option(None, Rule(str, choices=CODECS, is_optional=True))
    batch_size: int = _integer(1 << 20, at_least=1)
    linger_ms: int = _integer(0)
    buffer_memory: int = _integer(32 << 20, at_least=1)
    max_block_ms: int = _integer(60_000)
    delivery_timeout_ms: int = _integer(120_000)
    request_timeout_ms: int = _integer(30_000)
    partitioner: Any = _option("sticky")
    durability: str = _option("buffered", Rule(str, choices=("buffered", "fsync")))
    transactional_id: str | None = _option(None)
    client_id: str | None = _option(None)
    metrics_port: int | None = _port()

    def __post_init__(self) -> None:
        if not callable(self.partitioner) and self.partitioner not in ("sticky", "round_robin"):
            raise InvalidOption(
                f"partitioner={self.partitioner!r} is not sticky, round_robin or a function"
            )
        _check_text(self, ("transactional_id", "client_id"))
        _check_callables(self, ("key_serializer", "value_serializer"))


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of `log.consumer(...)`."""

    group_id: str | None = _option(None)
    client_id: str | None = _option(None)
    key_deserializer: Deserializer | None = _option(None)
    value_deserializer: Deserializer | None = _option(None)
    auto_offset_reset: str = _option("latest", Rule(str, choices=("earliest", "latest", "none")))
    fetch_min_bytes: int = _integer(1)
    fetch_max_wait_ms: int = _integer(500)
    fetch_max_bytes: int = _integer(52_428_800, at_least=1)
    max_partition_fetch_bytes: int = _integer(8 << 20, at_least=1)
    max_poll_records: int = _integer(500, at_least=1)
    metadata_max_age_ms: int = _integer(5_000)
    request_timeout_ms: int = _integer(30_000)
    consumer_timeout_ms: float = _option(float("inf"), Rule(float, at_least=0))
    group_instance_id: str | None = _option(None)
    enable_auto_commit: bool = _option(True)
    auto_commit_interval_ms: int = _integer(5_000)
    session_timeout_ms: int = _integer(10_000, at_least=1)
    heartbeat_interval_ms: int = _integer(3_000, at_least=1)
    max_poll_interval_ms: int = _integer(300_000, at_least=1)
    partition_assignment_strategy: Any = _option("sticky")
    metrics_port: int | None = _port()

    def __post_init__(self) -> None:
        _check_callables(self, ("key_deserializer", "value_deserializer"))
        _check_text(self, ("group_id", "group_instance_id", "client_id"))
        if self.group_instance_id is not None and self.group_id is None:
            raise InvalidOption("group_instance_id needs a group_id")
        if type(self.enable_auto_commit) is not bool:
            raise InvalidOption(
                f"enable_auto_commit={self.enable_auto_commit!r}: use True or False"
            )
        if self.heartbeat_interval_ms * 3 > self.session_timeout_ms:
            raise InvalidOption(
                f"heartbeat_interval_ms={self.heartbeat_interval_ms} is over a third of "
                f"session_timeout_ms={self.session_timeout_ms}; a member would look dead"
            )


# Options that people bring along from Kafka's clients, and why they have nothing to set here.
_KAFKA_ONLY = {
    "acks": "there are no replicas to wait for, and a commit is a commit; see durability",
    "bootstrap_servers": "there is no server; the log is the directory that was opened",
    "enable_idempotence": "a retry never duplicates; leave it out",
    "isolation_level": "readers only ever see what is committed; leave it out",
    "max_in_flight_requests_per_connection": "what is sent keeps its order; leave it out",
    "retries": "retries go on until delivery_timeout_ms has passed; set that",
    "retry_backoff_ms": "retries go on until delivery_timeout_ms has passed; set that",
}


Options = TypeVar("Options", ProducerOptions, ConsumerOptions)


def parse_options(options: type[Options], kind: str, given: Mapping[str, object]) -> Options:
    """Build checked client options from keyword arguments."""
    known = {option.name: option.metadata["rule"] for option in fields(options)}
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            if name in _KAFKA_ONLY:
                raise InvalidOption(f"unknown {kind} option {name!r}: {_KAFKA_ONLY[name]}")
            raise unknown_name(f"{kind} option", name, known)
        rule = known[name]
        parsed[name] = value if rule is None else rule.parse(name, value)
    return options(**parsed)


def _check_callables(options: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not callable(value):
            raise InvalidOption(f"{name}={value!r} cannot be called; give a function")


def _check_text(options: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            checks.text(value, name)
