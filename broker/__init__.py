"""A partitioned, durable, replayable log stored as plain files: Kafka's model without a cluster."""

from broker.errors import (
    AlreadyExists,
    BufferExhausted,
    Closed,
    CommitFailed,
    CorruptLog,
    DiskFull,
    FencedInstanceId,
    ForkedHandle,
    GroupNotEmpty,
    InvalidGroupName,
    InvalidOption,
    InvalidRecord,
    InvalidTopicName,
    LockTimeout,
    LogError,
    LogNotFound,
    LostPosition,
    MaintenanceFailed,
    MissingFile,
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
    UnknownGroup,
    UnknownPartition,
    UnknownTopic,
    UnsupportedFormat,
)
from broker.group import GroupDescription, MemberDescription, PartitionLag, Position, Reset
from broker.listener import ConsumerRebalanceListener
from broker.log import Log, PartitionDescription, TopicDescription
from broker.log import open_log as open
from broker.maintenance.keeping import TopicMaintenance
from broker.maintenance.units import AnyUnit as MaintenanceUnit
from broker.maintenance.units import Progress, Written
from broker.maintenance.units import cut as cut_unit
from broker.maintenance.units import record_count as count_of_unit
from broker.maintenance.units import write_elsewhere as write_unit
from broker.metrics import Exported, Metrics, Readings
from broker.metrics import export_if_asked as export_metrics
from broker.reader import TopicReader
from broker.records import (
    BatchMetadata,
    ConsumerRecord,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    RecordMetadata,
    TopicPartition,
)
from broker.sealed import SealedFile
from broker.slices import FileSlice, SliceBatch, name_frames
from broker.slices import pack as pack_slices
from broker.slices import plan as plan_slices
from broker.slices import read as read_slices
from broker.snapshot import PartitionSnapshot, TopicSnapshot
from broker.stage import Committed, Stage, Staged
from broker.verify import Damage, GroupReport, TopicReport, VerifyReport

__all__ = [
    "AlreadyExists",
    "BatchMetadata",
    "BufferExhausted",
    "Closed",
    "CommitFailed",
    "Committed",
    "ConsumerRebalanceListener",
    "ConsumerRecord",
    "CorruptLog",
    "Damage",
    "DiskFull",
    "Exported",
    "FencedInstanceId",
    "FileSlice",
    "ForkedHandle",
    "GroupDescription",
    "GroupNotEmpty",
    "GroupReport",
    "InvalidGroupName",
    "InvalidOption",
    "InvalidRecord",
    "InvalidTopicName",
    "LockTimeout",
    "Log",
    "LogError",
    "LogNotFound",
    "MaintenanceFailed",
    "LostPosition",
    "MemberDescription",
    "MaintenanceUnit",
    "Metrics",
    "MissingFile",
    "NoPosition",
    "NotALog",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetOutOfRange",
    "OutcomeUnknown",
    "PartitionDescription",
    "PartitionLag",
    "PartitionSnapshot",
    "Position",
    "ProducerFenced",
    "Progress",
    "Readings",
    "RecordMetadata",
    "RecordTooLarge",
    "Reset",
    "SealedFile",
    "SequenceError",
    "SliceBatch",
    "Stage",
    "Staged",
    "StorageError",
    "TopicDescription",
    "TopicExists",
    "TopicMaintenance",
    "TopicPartition",
    "TopicReader",
    "TopicReport",
    "TopicSnapshot",
    "TransactionError",
    "UnknownGroup",
    "UnknownPartition",
    "UnknownTopic",
    "UnsupportedFormat",
    "VerifyReport",
    "Written",
    "count_of_unit",
    "cut_unit",
    "export_metrics",
    "name_frames",
    "open",
    "pack_slices",
    "plan_slices",
    "read_slices",
    "write_unit",
]
