"""Options of `format("log")` as Spark hands them over: text, with names in lower case.

Nothing past this module sees a name or a value it does not know. Reads and writes know each
other's names, because a view in SQL has one set of options for both.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from broker import InvalidOption

logger = logging.getLogger(__name__)

READ_OPTIONS = (
    "assign",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
    "groupId",
    "includeHeaders",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "maxRecordsPerPartition",
    "maxTriggerDelay",
    "metricsPort",
    "minOffsetsPerTrigger",
    "minPartitions",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingOffsetsFallback",
    "startingTimestamp",
    "subscribe",
    "subscribePattern",
)
WRITE_OPTIONS = (
    "compression",
    "createTopic",
    "numPartitions",
    "topic",
    "txnAppId",
    "txnVersion",
)
# Of how a streaming query advances; Spark's Kafka connector ignores them in a batch, too.
_STREAM_OPTIONS = (
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "maxTriggerDelay",
    "minOffsetsPerTrigger",
)
# Spark's own, or given by its methods.
_COMMON_OPTIONS = ("checkpointLocation", "path", "paths", "queryName")
# Spark's Kafka connector has them; here there is no client, no broker and no group to configure.
_KAFKA_OPTIONS = (
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "partition.metadata.cache.ttl.ms",
)
_KAFKA_PREFIX = "kafka."
# Options of the store's driver: credentials, addresses.
_STORAGE_PREFIX = "storage."
_CANONICAL = {
    name.lower(): name
    for name in (*READ_OPTIONS, *WRITE_OPTIONS, *_COMMON_OPTIONS, *_KAFKA_OPTIONS)
}

EARLIEST, LATEST, GROUP, OFFSETS, TIMESTAMP, TIMESTAMPS = (
    "earliest",
    "latest",
    "group",
    "offsets",
    "timestamp",
    "timestamps",
)
OFFSET_LATEST, OFFSET_EARLIEST = -1, -2

_STRATEGIES = ("subscribe", "subscribePattern", "assign")
# Hadoop, and so Spark, writes the address of a local file with one slash.
_FILE = re.compile(r"^file:/(?!/)")
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")
_UNIT_MS = {
    "": 1, "us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000,
    "d": 86_400_000,
}  # fmt: skip
_TRIGGER_DELAY_MS = 15 * 60_000
_PORT_MAX = 65_535
_LONG_MAX = (1 << 63) - 1

Offsets = dict[str, dict[int, int]]

_warned: set[tuple[str, str]] = set()


class OptionText:
    """The options of one read or write, taken one by one. A name that nobody knows is an error."""

    def __init__(self, options: Mapping[str, str], *, others: tuple[str, ...] = ()) -> None:
        """Args:
        others: names that are known and mean nothing here.
        """
        self._given = {name.lower(): value for name, value in options.items()}
        for name in self._given:
            # Before any value is looked at: what seems to be missing may be misspelt.
            if (
                name not in _CANONICAL
                and not _is_kafkas(name)
                and not name.startswith(_STORAGE_PREFIX)
            ):
                raise unknown_option(name)
        for name in (*others, *_COMMON_OPTIONS):
            if name.lower() not in ("path", "paths"):
                self._given.pop(name.lower(), None)

    def has(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        return self._given.pop(name.lower(), None)

    def name(self, option: str) -> str | None:
        """Return a name of the user's choice, without the blanks around it."""
        text = self.text(option)
        if text is not None and not text.strip():
            raise InvalidOption(f"{option}={text!r} is empty; give a name, or leave it out")
        return None if text is None else text.strip()

    def path(self) -> str:
        """Return where the log is: the argument of `load`, `save` or `start`."""
        path, paths = self.text("path"), self.text("paths")
        if path is None and paths is not None:
            listed = json.loads(paths)
            if len(listed) > 1:
                raise InvalidOption(f"format('log') reads one log at a time, not {listed}")
            path = listed[0] if listed else None
        if path is None or not path.strip():
            raise InvalidOption(
                "format('log') needs the path of the log: give it to load(path), save(path) or "
                "start(path), or set option 'path'. A table in SQL made with a list of columns "
                "does not keep its options: use CREATE TABLE ... USING log OPTIONS (...) without "
                "one, or CREATE TEMPORARY VIEW ... USING log OPTIONS (...)"
            )
        return _FILE.sub("file:///", path)

    def storage(self) -> dict[str, str]:
        """Return what the store's driver is told."""
        names = [name for name in self._given if name.startswith(_STORAGE_PREFIX)]
        return {name[len(_STORAGE_PREFIX) :]: self._given.pop(name) for name in names}

    def integer(self, name: str, *, at_least: int = 1, at_most: int | None = None) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            number = int(text.strip())
        except ValueError:
            raise InvalidOption(f"{name}={text!r} is not a whole number") from None
        if number < at_least:
            kind = "positive" if at_least == 1 else f"at least {at_least}"
            raise InvalidOption(f"{name} must be {kind}, got {text!r}")
        if at_most is not None and number > at_most:
            raise InvalidOption(f"{name} must be at most {at_most}, got {text!r}")
        return number

    def boolean(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise InvalidOption(f"{name}={text!r} is not true or false")
        return text.strip().lower() == "true"

    def choice(self, name: str, choices: tuple[str, ...], *, default: str) -> str:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in choices:
            raise InvalidOption(f"{name}={text!r} is not one of {', '.join(choices)}")
        return text.strip().lower()

    def duration_ms(self, name: str) -> int | None:
        """Return a time such as 500, 500ms, 10s, 15m, 1h or 1d in milliseconds."""
        text = self.text(name)
        if text is None:
            return None
        found = _DURATION.fullmatch(text.strip().lower())
        if found is None or found[2] not in _UNIT_MS:
            raise InvalidOption(
                f"{name}={text!r} is not a time; use a number and us, ms, s, m, min, h or d, e.g. "
                "50s, 100ms or 15m; a bare number is milliseconds"
            )
        return int(int(found[1]) * _UNIT_MS[found[2]])

    def warn_of_leftovers(self) -> None:
        """Say what nobody took: options of Kafka's clients, which mean nothing here."""
        assert all(map(_is_kafkas, self._given)), self._given
        warn_once(sorted(self._given), "format('log') has no Kafka client")


def unknown_option(name: str) -> InvalidOption:
    """Build the error for an option nobody knows, with the nearest known name."""
    near = get_close_matches(name.lower(), _CANONICAL, n=1, cutoff=0.5)
    hint = (
        f"did you mean {_CANONICAL[near[0]]!r}?"
        if near
        else f"known: {', '.join(sorted((*READ_OPTIONS, *WRITE_OPTIONS)))}"
    )
    return InvalidOption(f"unknown option {_CANONICAL.get(name, name)!r} of format('log'); {hint}")


def _is_kafkas(name: str) -> bool:
    return name.startswith(_KAFKA_PREFIX) or name in {each.lower() for each in _KAFKA_OPTIONS}


def warn_once(names: Iterable[str], reason: str) -> None:
    """Say which options are ignored, and why: once in a process."""
    new = [name for name in names if (name, reason) not in _warned]
    _warned.update((name, reason) for name in new)
    if new:
        told = ", ".join(_CANONICAL.get(name, name) for name in new)
        logger.warning("%s; ignored: %s", reason, told)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which topics or partitions are read: by exactly one of three options."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partitions: Mapping[str, tuple[int, ...]] | None = None

    def includes(self, topic: str) -> bool:
        if self.pattern is not None:
            # Anywhere in the name, as in Spark's Kafka connector.
            return self.pattern.search(topic) is not None
        return topic in (self.topics if self.partitions is None else self.partitions)

    def names(self) -> tuple[str, ...]:
        """Return the topics that must be there; none for a pattern."""
        return self.topics if self.partitions is None else tuple(self.partitions)

    def selected(self, topic: str, partition_count: int) -> tuple[int, ...]:
        if self.partitions is None:
            return tuple(range(partition_count))
        return self.partitions[topic]


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a read starts or ends, as the user put it. `option` is for messages."""

    option: str
    kind: str
    values: Offsets = field(default_factory=dict)
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read. None: not given."""

    path: str
    selection: Selection
    starting: Edge | None
    ending: Edge | None
    latest_if_no_time: bool
    fail_on_data_loss: bool
    include_headers: bool
    offsets_per_trigger_max: int | None
    offsets_per_trigger_min: int | None
    trigger_delay_ms_max: int
    bytes_per_trigger_max: int | None
    task_count_min: int | None
    records_per_task_max: int | None
    group_id: str | None
    starting_fallback: str | None
    metrics_port: int | None
    storage: dict[str, str] = field(default_factory=dict)
    only_streaming: tuple[str, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        given = OptionText(options, others=WRITE_OPTIONS)
        only_streaming = tuple(name for name in _STREAM_OPTIONS if given.has(name))
        parsed = cls(
            path=given.path(),
            selection=_selection(given),
            starting=_edge(given, "starting"),
            ending=_edge(given, "ending"),
            latest_if_no_time=given.choice(
                "startingOffsetsByTimestampStrategy", ("error", "latest"), default="error"
            )
            == "latest",
            fail_on_data_loss=given.boolean("failOnDataLoss", default=True),
            include_headers=given.boolean("includeHeaders", default=False),
            offsets_per_trigger_max=given.integer("maxOffsetsPerTrigger"),
            offsets_per_trigger_min=given.integer("minOffsetsPerTrigger"),
            trigger_delay_ms_max=_or(given.duration_ms("maxTriggerDelay"), _TRIGGER_DELAY_MS),
            bytes_per_trigger_max=given.integer("maxBytesPerTrigger"),
            task_count_min=given.integer("minPartitions"),
            records_per_task_max=given.integer("maxRecordsPerPartition"),
            group_id=given.name("groupId"),
            starting_fallback=_fallback(given),
            metrics_port=given.integer("metricsPort", at_least=0, at_most=_PORT_MAX),
            storage=given.storage(),
            only_streaming=only_streaming,
        )
        given.warn_of_leftovers()
        parsed._check_limits()
        parsed._check_group()
        return parsed

    @property
    def _is_from_group(self) -> bool:
        return self.starting is not None and self.starting.kind == GROUP

    @property
    def starting_name(self) -> str:
        """The option that says where to start."""
        return "startingOffsets" if self.starting is None else self.starting.option

    def check_streaming(self) -> None:
        """Refuse what only a batch read can have."""
        if self.ending is not None:
            what = "timestamp" if self.ending.kind in (TIMESTAMP, TIMESTAMPS) else "offset"
            raise InvalidOption(
                f"ending {what} not valid in streaming queries: remove {self.ending.option}"
            )

    def check_batch(self) -> None:
        """Refuse what only a streaming read can have, or say that it means nothing."""
        warn_once(self.only_streaming, "a batch read has no triggers")
        if self.group_id is not None and not self._is_from_group:
            warn_once(["groupId"], "a batch read publishes no position to a group")
        if self.metrics_port is not None:
            raise InvalidOption("metricsPort is for streaming queries; remove it from a batch read")
        _check_batch_edge(self.starting, LATEST, OFFSET_LATEST, "starting offset")
        _check_batch_edge(self.ending, EARLIEST, OFFSET_EARLIEST, "ending offset")
        if self.starting is None or self.ending is None:
            return
        start, end = self.starting, self.ending
        if start.kind == end.kind and start.kind in (OFFSETS, TIMESTAMPS):
            _check_order(start, end)

    def _check_limits(self) -> None:
        low, high = self.offsets_per_trigger_min, self.offsets_per_trigger_max
        if low is not None and high is not None and low > high:
            raise InvalidOption(
                f"The value of minOffsetsPerTrigger({low}) is higher than the "
                f"maxOffsetsPerTrigger({high})."
            )

    def _check_group(self) -> None:
        if self._is_from_group and self.group_id is None:
            raise InvalidOption("startingOffsets=group needs the option groupId as well")
        if self.starting_fallback is not None and not self._is_from_group:
            raise InvalidOption(
                "startingOffsetsFallback is for startingOffsets=group: it says where to start if "
                "the group has no position"
            )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _fallback(given: OptionText) -> str | None:
    if not given.has("startingOffsetsFallback"):
        return None
    return given.choice("startingOffsetsFallback", (EARLIEST, LATEST), default=LATEST)


def _selection(given: OptionText) -> Selection:
    chosen = [name for name in _STRATEGIES if given.has(name)]
    if len(chosen) != 1:
        how = "One" if not chosen else "Only one"
        must = "must" if not chosen else "can"
        raise InvalidOption(
            f"{how} of the following options {must} be specified for a log source: "
            f"{', '.join(_STRATEGIES)}" + (f"; got {', '.join(chosen)}" if chosen else "")
        )
    (name,) = chosen
    text = given.text(name) or ""
    if name == "assign":
        return Selection(partitions=_partitions(text))
    if name == "subscribePattern":
        return Selection(pattern=_pattern(text))
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise InvalidOption(
            f"No topics to subscribe to as specified value for option 'subscribe' is {text!r}"
        )
    return Selection(topics=topics)


def _pattern(text: str) -> re.Pattern[str]:
    if not text.strip():
        raise InvalidOption(
            "Pattern to subscribe is empty as specified value for option 'subscribePattern' is "
            f"{text!r}"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidOption(
            f"subscribePattern={text!r} is not a regular expression: {error}"
        ) from error


def _partitions(text: str) -> dict[str, tuple[int, ...]]:
    if not text.strip().startswith("{"):
        raise InvalidOption(
            "No topicpartitions to assign as specified value for option 'assign' is " + repr(text)
        )
    try:
        found = json.loads(text)
        assigned = {
            topic: tuple(sorted({_whole(number) for number in numbers}))
            for topic, numbers in found.items()
        }
    except (ValueError, TypeError, AttributeError):
        assigned = {}
    if not assigned or not all(assigned.values()) or min(map(min, assigned.values())) < 0:
        raise InvalidOption(f'assign: Expected e.g. {{"topicA":[0,1],"topicB":[0,1]}}, got {text}')
    return assigned


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise ValueError(number)
    return number


def _edge(given: OptionText, side: str) -> Edge | None:
    """Return where the user wants to start or end; the more precise option wins, as in Kafka."""
    edges = [
        _time_edge(given, f"{side}Timestamp"),
        _json_edge(given, f"{side}OffsetsByTimestamp", TIMESTAMPS),
        _offset_edge(given, f"{side}Offsets"),
    ]
    return next((edge for edge in edges if edge is not None), None)


def _time_edge(given: OptionText, name: str) -> Edge | None:
    text = given.text(name)
    if text is None:
        return None
    try:
        timestamp_ms = int(text.strip())
    except ValueError:
        timestamp_ms = -1
    if not 0 <= timestamp_ms <= _LONG_MAX:
        raise InvalidOption(
            f"{name}: Expected a single long value (milliseconds since 1970), got {text!r}"
        )
    return Edge(name, TIMESTAMP, timestamp_ms=timestamp_ms)


def _offset_edge(given: OptionText, name: str) -> Edge | None:
    text = given.text(name)
    if text is None:
        return None
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return Edge(name, word)
    if word == GROUP and name == "startingOffsets":
        return Edge(name, GROUP)
    if not word.startswith("{"):
        words = "earliest, latest, group" if name == "startingOffsets" else "earliest, latest"
        raise InvalidOption(
            f"{name}={text!r} is not {words} or JSON such as "
            '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}'
        )
    return Edge(name, OFFSETS, _by_partition(name, text, OFFSETS))


def _json_edge(given: OptionText, name: str, kind: str) -> Edge | None:
    text = given.text(name)
    return None if text is None else Edge(name, kind, _by_partition(name, text, kind))


_EXAMPLES = {
    OFFSETS: '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}',
    TIMESTAMPS: '{"topicA": {"0": 123456789, "1": 123456789}, "topicB": {"0": 123456789}}',
}


def _by_partition(name: str, text: str, kind: str) -> Offsets:
    low = OFFSET_EARLIEST if kind == OFFSETS else 0
    try:
        parsed = {
            topic: {int(partition): _whole(value) for partition, value in values.items()}
            for topic, values in json.loads(text).items()
        }
        if any(
            not low <= value <= _LONG_MAX for values in parsed.values() for value in values.values()
        ):
            raise ValueError(text)
        return parsed
    except (ValueError, TypeError, AttributeError):
        raise InvalidOption(f"{name}: Expected e.g. {_EXAMPLES[kind]}, got {text}") from None


def _check_batch_edge(edge: Edge | None, word: str, number: int, what: str) -> None:
    if edge is None:
        return
    if edge.kind == word:
        raise InvalidOption(f"{what} can't be {word} for batch queries: {edge.option}={word}")
    if edge.kind != OFFSETS:
        return
    for topic, values in edge.values.items():
        for partition, value in values.items():
            if value == number:
                raise InvalidOption(
                    f"{edge.option} for {topic}-{partition} can't be {word} ({number}) for batch "
                    "queries"
                )


def _check_order(start: Edge, end: Edge) -> None:
    """Refuse two maps over different partitions, or with a start behind its end."""
    if _places(start.values) != _places(end.values):
        raise InvalidOption(
            f"{start.option} and {end.option} name different partitions: "
            f"{sorted(_places(start.values))} and {sorted(_places(end.values))}"
        )
    for topic, values in start.values.items():
        for partition, value in values.items():
            stop = end.values[topic][partition]
            if value >= 0 and stop >= 0 and value > stop:
                raise InvalidOption(
                    f"The specified start {value} ({start.option}) is greater than the end {stop} "
                    f"({end.option}) for topic {topic} partition {partition}"
                )


def _places(values: Offsets) -> set[tuple[str, int]]:
    return {(topic, partition) for topic in values for partition in values[topic]}
