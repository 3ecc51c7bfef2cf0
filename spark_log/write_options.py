"""The options of `format("log")` writes, parsed once. Nothing past this class sees their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from broker import InvalidOption
from spark_log.options import READ_OPTIONS, OptionText

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# What Spark's Kafka sink calls it; the names of the codecs are the same.
_KAFKA_CODEC = "kafka.compression.type"
_VERSION_MAX = (1 << 63) - 1
_PARTITIONS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What is written where. None: not given."""

    path: str
    topic: str | None = None
    application: str | None = None
    version: int | None = None
    create_topic: bool = False
    partition_count: int | None = None
    compression: str = "none"
    storage: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_streaming: bool = False) -> WriteOptions:
        given = OptionText(options, others=READ_OPTIONS)
        _refuse_serializers(given)
        _check_partition_count(given)
        kafka_codec = given.choice(_KAFKA_CODEC, CODECS, default="none")
        parsed = cls(
            path=given.path(),
            topic=given.name("topic"),
            application=given.name("txnAppId"),
            version=_bounded(given, "txnVersion", at_least=0, at_most=_VERSION_MAX),
            create_topic=given.boolean("createTopic", default=False),
            partition_count=_bounded(given, "numPartitions", at_least=1, at_most=_PARTITIONS_MAX),
            compression=given.choice("compression", CODECS, default=kafka_codec),
            storage=given.storage(),
        )
        given.warn_of_leftovers()
        parsed._check_identity(is_streaming)
        return parsed

    @property
    def transaction(self) -> tuple[str, int] | None:
        """The identity of a batch write: what the user gave, never anything else."""
        if self.application is None or self.version is None:
            return None
        return self.application, self.version

    def _check_identity(self, is_streaming: bool) -> None:
        if is_streaming and self.version is not None:
            raise InvalidOption(
                f"txnVersion={self.version} in a streaming query: each micro-batch has a number of "
                "its own, and with one version for all only the first would be written. Leave it "
                "out, or use it in foreachBatch"
            )
        if not is_streaming and (self.application is None) != (self.version is None):
            raise InvalidOption(
                "txnAppId and txnVersion belong together: give both, and a write with the same "
                "pair adds nothing the second time, or neither"
            )


def _bounded(given: OptionText, option: str, *, at_least: int, at_most: int) -> int | None:
    number = given.integer(option, at_least=at_least)
    if number is not None and number > at_most:
        raise InvalidOption(f"{option}={number} is too large; use at most {at_most}")
    return number


def _check_partition_count(given: OptionText) -> None:
    if given.has("numPartitions") and not given.has("createTopic"):
        raise InvalidOption(
            "numPartitions is for a topic that is created: set createTopic to true as well, or use "
            "create_partitions for a topic that exists"
        )


def _refuse_serializers(given: OptionText) -> None:
    for what in ("key", "value"):
        if given.has(f"kafka.{what}.serializer"):
            raise InvalidOption(
                f"Kafka option '{what}.serializer' is not supported as {what}s are written as they "
                "are, text or bytes"
            )
