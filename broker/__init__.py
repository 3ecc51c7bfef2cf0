"""A partitioned, durable, replayable log stored as plain files: Kafka's model without a cluster."""

from broker.errors import (
    AlreadyExists,
    BufferExhausted,
    Closed,
    CorruptLog,
    DiskFull,
    ForkedHandle,
    InvalidOption,
    InvalidRecord,
    InvalidTopicName,
    LockTimeout,
    LogError,
    LogNotFound,
    NoPosition,
    NotALog,
    OffsetOutOfRange,
    OutcomeUnknown,
    ProducerFenced,
    RecordTooLarge,
    SequenceError,
    StorageError,
    TopicExists,
    TransactionError,
    UnknownPartition,
    UnknownTopic,
    UnsupportedFormat,
)
from broker.log import Log, PartitionDescription, TopicDescription
from broker.log import open_log as open
from broker.reader import TopicReader
from broker.records import (
    BatchMetadata,
    ConsumerRecord,
    OffsetAndTimestamp,
    RecordMetadata,
    TopicPartition,
)
from broker.slices import FileSlice, SliceBatch
from broker.slices import pack as pack_slices
from broker.slices import plan as plan_slices
from broker.slices import read as read_slices
from broker.stage import Committed, Stage, Staged
from broker.verify import Damage, TopicReport, VerifyReport

__all__ = [
    "AlreadyExists",
    "BatchMetadata",
    "BufferExhausted",
    "Closed",
    "Committed",
    "ConsumerRecord",
    "CorruptLog",
    "Damage",
    "DiskFull",
    "FileSlice",
    "ForkedHandle",
    "InvalidOption",
    "InvalidRecord",
    "InvalidTopicName",
    "LockTimeout",
    "Log",
    "LogError",
    "LogNotFound",
    "NoPosition",
    "NotALog",
    "OffsetAndTimestamp",
    "OffsetOutOfRange",
    "OutcomeUnknown",
    "PartitionDescription",
    "ProducerFenced",
    "RecordMetadata",
    "RecordTooLarge",
    "SequenceError",
    "SliceBatch",
    "Stage",
    "Staged",
    "StorageError",
    "TopicDescription",
    "TopicExists",
    "TopicPartition",
    "TopicReader",
    "TopicReport",
    "TransactionError",
    "UnknownPartition",
    "UnknownTopic",
    "UnsupportedFormat",
    "VerifyReport",
    "open",
    "pack_slices",
    "plan_slices",
    "read_slices",
]
