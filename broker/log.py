"""A log: topics below one root. What a person opens first."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker import checks, snapshot, stage
from broker import topic as topics
from broker.config import (
    ConsumerOptions,
    ProducerOptions,
    parse_group_settings,
    parse_options,
    parse_topic_settings,
)
from broker.consumer import Consumer
from broker.errors import (
    AlreadyExists,
    InvalidOption,
    InvalidTopicName,
    LogError,
    LogNotFound,
    MaintenanceFailed,
    NotALog,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
    UnsupportedFormat,
)
from broker.group import GroupConsumer, GroupDescription, Groups, Position, Reset
from broker.home import newest_incarnation, remove_deleted, remove_leftovers, topic_home
from broker.maintenance import apart, delta_view
from broker.maintenance.keeper import Keeper
from broker.maintenance.keeping import Round, TopicMaintenance, new_metrics
from broker.maintenance.units import Progress, Write, write_here
from broker.metrics import Readings
from broker.producer import Producer
from broker.reader import TopicReader
from broker.records import TopicPartition
from broker.snapshot import TopicSnapshot
from broker.stage import Committed, Stage, Staged
from broker.storage import Storage, open_storage
from broker.storage.watch import Pause
from broker.subscription import Catalog
from broker.topic import Topic
from broker.verify import (
    Damage,
    GroupReport,
    TopicReport,
    VerifyReport,
    verify_groups,
    verify_topics,
)

FORMAT_VERSION = 1
_MARK = "_log.json"
_PARTITIONS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """One partition: it holds the offsets [start_offset, end_offset).

    `record_count` is less where compaction has removed some. It is counted without opening files:
    if the log start lies within a compacted file, then until maintenance has written that anew, it
    is the most that there can be.
    """

    partition: int
    start_offset: int
    end_offset: int
    record_count: int


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as of one commit."""

    name: str
    incarnation: int
    epoch: int
    commit_count: int
    partitions: tuple[PartitionDescription, ...]
    config: dict[str, Any]
    given_config: dict[str, Any]
    byte_count: int
    sealed_byte_count: int
    sealed_file_count: int
    sealed_ends: tuple[int, ...]

    @property
    def record_count(self) -> int:
        return sum(partition.record_count for partition in self.partitions)


class Log:
    """A partitioned, durable, replayable log stored as plain files. Opened by `broker.open`."""

    def __init__(self, storage: Storage, *, create: bool = True) -> None:
        self._storage = storage
        self.root = storage.root
        self.cluster_id = _open_mark(storage, create=create)
        self._maintenance_metrics = new_metrics()
        self._groups = Groups(storage, self._open_topic, self._open_reader)

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> None:
        """Make a topic; a deleted one of that name comes back as a new incarnation, empty."""
        checks.topic_name(name)
        partitions = _check_partition_count(name, partitions)
        given = {} if config is None else checks.settings(config)
        settings = parse_topic_settings({k: v for k, v in given.items() if v is not None})
        self._check_collision(name)
        incarnation, is_there = self._incarnation(name)
        if is_there:
            if not self._is_deleted(name, incarnation):
                raise TopicExists(name)
            remove_deleted(self._storage, topic_home(name, incarnation))
            incarnation += 1
        topics.create(self._storage, name, incarnation, partitions=partitions, config=settings)
        remove_leftovers(self._storage, topic_home(name, incarnation).parent)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return [name for name in self._storage.list("topics") if self._incarnation(name)[1]]

    def describe_topic(self, name: str) -> TopicDescription:
        """Return what the topic is, as of now."""
        reader = self._open_reader(name)
        try:
            state = reader.refresh()
            sealed_bytes = sum(file.byte_length for file in state.sealed)
            return TopicDescription(
                name=name,
                incarnation=state.incarnation,
                epoch=state.epoch,
                commit_count=state.number,
                partitions=tuple(
                    PartitionDescription(number, start, end, state.record_count(number, start, end))
                    for number, (start, end) in enumerate(
                        zip(state.starts, state.ends, strict=True)
                    )
                ),
                config=dict(state.settings),
                given_config=dict(state.given),
                byte_count=sealed_bytes
                + sum(file.byte_length for file in state.files)
                + state.position,
                sealed_byte_count=sealed_bytes,
                sealed_file_count=len(state.sealed),
                sealed_ends=tuple(state.sealed_ends),
            )
        finally:
            reader.close()

    def alter_topic(self, name: str, config: Mapping[str, object | None]) -> None:
        """Change settings; a value of None goes back to the default."""
        settings = parse_topic_settings(checks.settings(config))
        with self._writing(name) as topic:
            topic.configure(config=settings)

    def create_partitions(self, name: str, partitions: int) -> None:
        """Let the topic have this many partitions, more than now. Keys may move to others."""
        partitions = _check_partition_count(name, partitions)
        with self._writing(name) as topic:
            topic.configure(partitions=partitions)

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Remove all records before these offsets (-1: all); return the new log starts."""
        by_topic: dict[str, dict[int, int]] = {}
        for place, offset in checks.by_place(offsets).items():
            refusal = f"cannot delete the records of {place.topic}-{place.partition} before"
            start = checks.whole_number(offset, refusal, at_least=-1)
            by_topic.setdefault(place.topic, {})[place.partition] = start
        starts: dict[TopicPartition, int] = {}
        for name, wanted in by_topic.items():
            with self._writing(name) as topic:
                state = topic.truncate(wanted)
                for partition in wanted:
                    starts[TopicPartition(name, partition)] = state.starts[partition]
        return starts

    def delete_topic(self, name: str) -> None:
        """Remove the topic and its records."""
        with self._writing(name) as topic:
            topic.delete()

    def producer(self, **options: Any) -> Producer:
        """Return a producer; see `broker.config.ProducerOptions` for its options."""
        parsed = parse_options(ProducerOptions, "producer", options)
        return Producer(
            self._open_writer, parsed, Keeper(self._round), is_remote=self._storage.is_remote
        )

    def consumer(self, *topics: str, **options: Any) -> Consumer:
        """Return a consumer of these topics; see `broker.config.ConsumerOptions`."""
        parsed = parse_options(ConsumerOptions, "consumer", options)
        catalog = Catalog(self._storage, self.topics, self._open_reader)
        if parsed.group_id is None:
            return Consumer(catalog, topics, parsed)
        return GroupConsumer(catalog, self._groups, topics, parsed)

    def groups(self) -> list[str]:
        """Return the names of all consumer groups."""
        return self._groups.names()

    def group_positions(self, group: str) -> dict[TopicPartition, int]:
        """Return the offset at which a group goes on in each partition; {} for no such group."""
        positions = self._groups.positions(group)
        return {place: position.offset for place, position in positions.items()}

    def located_positions(self, group: str) -> dict[TopicPartition, Position]:
        """Return a group's positions with the incarnation and epoch of their topics.

        By these one can tell a position whose records were lost in a power cut: see `lost_from`.
        """
        return self._groups.positions(group)

    def publish_positions(
        self, group: str, positions: Mapping[TopicPartition, int | Position]
    ) -> None:
        """Commit positions for a group, made if it is absent, on behalf of somebody outside it.

        An offset is one in the topic as it is now; a `Position` says which topic it was in.

        Raises:
            GroupNotEmpty: it has members, and the positions are theirs to commit.
            UnknownPartition: a topic of today has no partition of this number.
        """
        self._groups.publish(group, positions)

    def describe_group(self, group: str) -> GroupDescription:
        """Return a group's members, positions and lag, as of now."""
        return self._groups.describe(group)

    def reset_group(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        """Put a group's positions somewhere else; it is made if it is absent.

        Raises:
            GroupNotEmpty: it has members, which would go on from where they are.
            OffsetOutOfRange: a partition does not hold this offset.
        """
        self._groups.reset(group, positions)

    def plan_reset(
        self, group: str, partitions: Iterable[TopicPartition], reset: Reset
    ) -> dict[TopicPartition, int]:
        """Return what `reset_group` is to be given to reset these partitions by a rule."""
        return self._groups.plan_reset(group, partitions, reset)

    def alter_group(self, group: str, config: Mapping[str, object | None]) -> None:
        """Change settings of a group, made if it is absent; None goes back to the default."""
        self._groups.configure(group, parse_group_settings(checks.settings(config)))

    def delete_group(self, group: str) -> None:
        """Remove a group and its positions.

        Raises:
            GroupNotEmpty: it has members.
        """
        self._groups.delete(group)

    def current_cluster_id(self) -> str:
        """Return the id that the log has now: another one if it was removed and made again.

        Raises:
            LogNotFound: it was removed.
        """
        return _open_mark(self._storage, create=False)

    def pause(self) -> Pause:
        """Return what tells those who wait when to ask again what is new: on a disk, always."""
        return Pause(self._storage.poll_seconds)

    def reader(self, topic: str) -> TopicReader:
        """Return a reader of one topic: offsets, look-ups by time, plans. Close it after use."""
        return self._open_reader(topic)

    def stage(self, topic: str, *, compression_type: str = "none") -> Stage:
        """Return a writer of records that `commit_staged` will commit later, with others'."""
        return Stage(self._open_writer(topic), compression_type=compression_type)

    def commit_staged(
        self, topic: str, staged: Sequence[Staged], transaction: tuple[str, int] | None = None
    ) -> Committed:
        """Commit what `stage` writers have written for a topic: all of it, once.

        Args:
            transaction: (application, version): a version not above the last one adds nothing.
        """
        with self._writing(topic) as open_topic:
            committed = stage.commit(open_topic, staged, transaction)
            apart.start_if_due(open_topic)
            return committed

    def transaction_version(self, topic: str, application: str) -> int | None:
        """Return the last version that an application has committed to a topic; None: none."""
        reader = self._open_reader(topic)
        try:
            last = reader.refresh().transactions.get(application)
            return None if last is None else last.version
        finally:
            reader.close()

    def discard_staged(self, topic: str, staged: Sequence[Staged]) -> None:
        """Remove what was staged and will never be committed."""
        with self._writing(topic) as open_topic:
            stage.discard(open_topic, staged)

    def maintain(
        self,
        topic: str | None = None,
        *,
        seal: bool = False,
        progress: Progress | None = None,
        write: Write = write_here,
    ) -> list[TopicMaintenance]:
        """Do what is due for a topic, or for all: seal, retention, compaction, garbage. Once.

        Args:
            seal: seal everything that is committed now, due or not.
            progress: told what is being done.
            write: writes the files, here and now or on many machines.

        Raises:
            MaintenanceFailed: some of all topics or groups could not be maintained, and the others
                were. With `topic`, its own error is raised.
        """
        if topic is not None:
            return [self._round(topic, progress, write).run(is_forced=seal)]
        done: list[TopicMaintenance] = []
        failures: dict[str, LogError] = {}
        for name in self.topics():
            try:
                done.append(self._round(name, progress, write).run(is_forced=seal))
            except UnknownTopic:
                continue  # Deleted since it was listed.
            except LogError as error:
                failures[f"topic {name!r}"] = error
        expired, broken = self._groups.expire()
        self._maintenance_metrics.add("expired-positions", expired)
        failures |= {f"group {name!r}": error for name, error in broken.items()}
        for kind in ("topics", "groups"):
            for name in self._storage.list(kind):
                remove_leftovers(self._storage, f"{kind}/{name}")
        if failures:
            raise MaintenanceFailed(failures, done)
        return done

    def metrics(self) -> Readings:
        """Return what maintenance by this log and its producers has done, as totals and rates."""
        return self._maintenance_metrics.read()

    def snapshot(self, topic: str) -> TopicSnapshot:
        """Return which files hold a topic's sealed records, and where its partitions end: now."""
        reader = self._open_reader(topic)
        try:
            location = self._storage.locate(f"{reader.topic.directory}/sealed")
            return snapshot.take(topic, location, reader.refresh())
        finally:
            reader.close()

    def table_path(self, topic: str) -> str:
        """Return where the Delta table of a topic's sealed records is: from the first seal on.

        A topic that is deleted and created again has another one.
        """
        directory = topic_home(topic, self._existing(topic)).directory
        return self._storage.locate(f"{directory}/{delta_view.TABLE}")

    def verify(self, topic: str | None = None, *, group: str | None = None) -> VerifyReport:
        """Read every byte of a topic, of a group, or of all, and report all damage.

        Changes nothing, takes no lock, and can be used while others write.
        """
        topics: list[TopicReport] = []
        groups: list[GroupReport] = []
        notes: list[str] = []
        if topic is not None:
            checks.topic_name(topic)
        if topic is not None or group is None:
            topics = verify_topics(self._storage, topic)
        if group is not None or topic is None:
            groups, notes = verify_groups(self._storage, group)
        if topic is not None and not topics:
            raise UnknownTopic(topic, hint=f"create it with create_topic({topic!r})")
        if group is not None and not groups:
            raise UnknownGroup(group)
        found = [(one.topic, one) for one in topics] + [(f"group {g.group}", g) for g in groups]
        return VerifyReport(
            self.root,
            tuple(topics),
            tuple(groups),
            damage=(*self._verify_mark(), *(one for _, report in found for one in report.damage)),
            notes=(*notes, *(f"{name}: {note}" for name, report in found for note in report.notes)),
        )

    def close(self) -> None:
        """Nothing is held open by the log itself; here for `with`."""

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Log({self.root!r})"

    def _writing(self, name: str) -> _ClosingTopic:
        return _ClosingTopic(self._open_writer(name))

    def _open_writer(self, name: str) -> Topic:
        return Topic(self._storage, name, self._existing(name), write=True)

    def _open_topic(self, name: str) -> Topic:
        return Topic(self._storage, name, self._existing(name))

    def _open_reader(self, name: str) -> TopicReader:
        return TopicReader(self._storage, name, self._existing(name))

    def _round(
        self, name: str, progress: Progress | None = None, write: Write = write_here
    ) -> Round:
        return Round(
            self._storage,
            name,
            self._existing(name),
            progress=progress,
            metrics=self._maintenance_metrics,
            write=write,
        )

    def _existing(self, name: str) -> int:
        checks.topic_name(name)
        incarnation, is_there = self._incarnation(name)
        if not is_there or self._is_deleted(name, incarnation):
            raise UnknownTopic(name, hint=f"create it with create_topic({name!r})")
        return incarnation

    def _incarnation(self, name: str) -> tuple[int, bool]:
        """Return the newest incarnation and whether it is there, or the next free number."""
        return newest_incarnation(self._storage, f"topics/{name}")

    def _is_deleted(self, name: str, incarnation: int) -> bool:
        """Tell whether a delete was committed and its files were not removed any more."""
        try:
            topic = Topic(self._storage, name, incarnation)
        except UnknownTopic:
            if not self._storage.holds(self._storage.identity):
                raise  # Another log is here now: whether it has such a topic is not the question.
            return True
        try:
            return topic.state.is_deleted
        finally:
            topic.close()

    def _verify_mark(self) -> tuple[Damage, ...]:
        path = self._storage.locate(_MARK)
        try:
            cluster_id = _open_mark(self._storage, create=False)
        except LogError as error:
            return (Damage(path, 0, str(error)),)
        if cluster_id != self.cluster_id:
            return (Damage(path, 0, "the cluster id is not the one that the log was opened with"),)
        return ()

    def _check_collision(self, name: str) -> None:
        """As Kafka: names that differ only in '.' and '_' would collide in metrics."""
        folded = name.replace(".", "_")
        for other in self.topics():
            if other != name and other.replace(".", "_") == folded:
                raise InvalidTopicName(name, f"collides with topic {other!r}")


class _ClosingTopic:
    """`with` for a topic that one call opens, uses and closes."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def __enter__(self) -> Topic:
        return self._topic

    def __exit__(self, *exception: object) -> None:
        self._topic.close()


def open_log(
    root: str | os.PathLike[str],
    *,
    create: bool = True,
    storage: Mapping[str, str] | None = None,
) -> Log:
    """Open the log at a path or address; make it if there is none and `create` is true.

    Args:
        storage: options of the store's driver, such as credentials.
    """
    return Log(open_storage(root, storage), create=create)


def _check_partition_count(topic: str, count: Any) -> int:
    number = checks.index(count)
    if number is None or not 1 <= number <= _PARTITIONS_MAX:
        raise InvalidOption(
            f"partitions={count!r} of topic {topic!r}: use a whole number from 1 to "
            f"{_PARTITIONS_MAX}"
        )
    return number


def _open_mark(storage: Storage, *, create: bool) -> str:
    data = storage.read(_MARK)
    if data is None:
        if not create:
            raise LogNotFound(storage.root)
        foreign = [name for name in storage.list("") if name not in ("topics", "locks", "groups")]
        if foreign:
            raise NotALog(
                f"{storage.root} is not a log and not empty (it holds {foreign[0]!r}); "
                "choose an empty or new directory"
            )
        mark = {"format": FORMAT_VERSION, "cluster_id": uuid.uuid4().hex}
        try:
            storage.create(_MARK, json.dumps(mark).encode() + b"\n")
        except AlreadyExists:
            pass
        data = storage.read(_MARK) or b""
    try:
        mark = json.loads(data)
        version, cluster_id = mark["format"], mark["cluster_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotALog(f"{storage.locate(_MARK)} is not what a log begins with: {error}") from error
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(storage.root, version, f"version {FORMAT_VERSION}")
    storage.identify(_MARK, data)
    return str(cluster_id)
