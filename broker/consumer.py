"""The consumer: pulls records from any offset, and waits for new ones without asking."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from broker import checks
from broker.chunk import Chunk
from broker.config import ConsumerOptions
from broker.errors import (
    Closed,
    ForkedHandle,
    InvalidOption,
    LogError,
    NoPosition,
    UnknownPartition,
)
from broker.listener import ConsumerRebalanceListener
from broker.metrics import Metrics, Readings, export_if_asked
from broker.records import (
    ConsumerRecord,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from broker.subscription import Catalog, Subscription

Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]
CommitCallback = Callable[[Offsets, Exception | None], None]

# Frames smaller than this are merged into one batch; larger ones are handed over as they are.
_MERGE_BYTES = 1 << 20


class Consumer:
    """Reads topics. Made by `log.consumer(...)`; for one thread at a time."""

    def __init__(self, catalog: Catalog, topics: tuple[str, ...], options: ConsumerOptions) -> None:
        self._options = options
        self._catalog = catalog
        self._subscription = Subscription(catalog, options.metadata_max_age_ms)
        self._watch = catalog.storage.watch()
        # None: nowhere to start, and auto_offset_reset is "none".
        self._positions: dict[TopicPartition, int | None] = {}
        self._chunks: dict[TopicPartition, list[Chunk]] = {}
        self._paused: set[TopicPartition] = set()
        self._turn = 0
        self._process_id = os.getpid()
        self._is_closed = False
        self._records: Iterator[ConsumerRecord] | None = None
        self._moves = 0
        self._yielded: ConsumerRecord | None = None
        self._counts = Metrics(
            "consumer-fetch-manager-metrics",
            ["records-consumed", "bytes-consumed", "fetch"],
            {"fetch-latency": "fetch"},
        )
        self._exported = export_if_asked(options.metrics_port, options.client_id, self)
        if topics:
            try:
                self.subscribe(topics)
            except BaseException:
                self.close()
                raise

    # What to read.

    def subscribe(
        self,
        topics: Iterable[str] = (),
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Read all partitions of these topics, or of those whose whole name fits a pattern.

        With a group, the members share the partitions, and the listener hears of every change.
        """
        self._check_usable()
        names = check_subscription(topics, pattern)
        compiled = None if pattern is None else compile_pattern(pattern)
        if listener is not None:
            raise InvalidOption("a listener needs a consumer group; give a group_id")
        self._forget_positions()
        if compiled is None:
            self._subscription.use_topics(names)
        else:
            self._subscription.use_pattern(compiled)
        self._assign_new()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions."""
        self._check_usable()
        wanted = checks.places(partitions)
        self._forget_positions()
        self._subscription.use_partitions(wanted)
        self._watch.changed()
        self._assign_new()

    def unsubscribe(self) -> None:
        self._check_usable()
        self._forget_positions()
        self._subscription.use_topics([])

    def subscription(self) -> set[str]:
        """Return the topics that are read by name or pattern."""
        return self._subscription.topics()

    def assignment(self) -> set[TopicPartition]:
        return set(self._positions)

    def topics(self) -> set[str]:
        """Return all topics of the log."""
        self._check_usable()
        return set(self._catalog.topic_names())

    def partitions_for_topic(self, topic: str) -> set[int]:
        self._check_usable()
        reader = self._subscription.reader(checks.topic_name(topic))
        return set(range(reader.refresh().partition_count))

    # Where to read.

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record this consumer gives."""
        self._check_usable()
        self._settle_iteration()
        self._watch.changed()
        return self._known_position(self._assigned(partition))

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on from this offset; whether the partition holds it shows at the next read."""
        self._check_usable()
        offset = checks.whole_number(offset, f"cannot seek {partition} to")
        self._settle_iteration()
        place = self._assigned(partition)
        self._positions[place] = offset
        self._chunks.pop(place, None)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go to the first record of these partitions, or of all."""
        wanted = list(partitions or self._positions)
        for place, offset in self.beginning_offsets(wanted).items():
            self.seek(place, offset)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go behind the last record of these partitions, or of all."""
        wanted = list(partitions or self._positions)
        for place, offset in self.end_offsets(wanted).items():
            self.seek(place, offset)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: bounds[0] for place, bounds in self._bounds(partitions).items()}

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset that the next record of each partition will get."""
        return {place: bounds[1] for place, bounds in self._bounds(partitions).items()}

    def offsets_for_times(
        self, times: dict[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after each time (milliseconds), or None."""
        self._check_usable()
        found = {}
        for place, given in checks.by_place(times).items():
            refusal = f"cannot look in {place.topic}-{place.partition} for the time"
            timestamp_ms = checks.whole_number(given, refusal, at_least=-checks.NUMBER_MAX)
            reader = self._subscription.reader(place.topic)
            reader.refresh()
            found[place] = reader.offset_for_time(place.partition, timestamp_ms * 1000)
        return found

    def pause(self, *partitions: TopicPartition) -> None:
        """Give no records of these until `resume`; their positions stay."""
        self._check_usable()
        self._settle_iteration()
        for place in [self._assigned(one) for one in partitions]:
            self._paused.add(place)
            self._chunks.pop(place, None)

    def resume(self, *partitions: TopicPartition) -> None:
        self._paused.difference_update([checks.place(one) for one in partitions])

    def paused(self) -> set[TopicPartition]:
        return set(self._paused)

    def commit(self, offsets: Offsets | None = None) -> None:
        raise InvalidOption("commit needs a consumer group; give a group_id")

    def commit_async(
        self, offsets: Offsets | None = None, callback: CommitCallback | None = None
    ) -> Future[None]:
        raise InvalidOption("commit_async needs a consumer group; give a group_id")

    def committed(self, partition: TopicPartition, metadata: bool = False) -> Any:
        raise InvalidOption("committed needs a consumer group; give a group_id")

    # Counting.

    def metrics(self) -> Readings:
        """Return what was read so far, as totals and rates, and the lag at the last fetch."""
        lags = list(self._lags().values())
        return self._counts.read(records_lag=sum(lags), records_lag_max=max(lags, default=0))

    @property
    def metrics_port(self) -> int | None:
        """The port on which the metrics are served."""
        return None if self._exported is None else self._exported.port

    # Reading.

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return some records, waiting up to `timeout_ms` for the first."""
        self._check_usable()
        self._settle_iteration()
        limit = self._options.max_poll_records
        if max_records is not None:
            limit = checks.whole_number(max_records, "max_records cannot be", at_least=1)
        if not self._chunks:
            self._fetch(checks.milliseconds(timeout_ms, "timeout_ms"))
        polled: dict[TopicPartition, list[ConsumerRecord]] = {}
        wanted = limit
        for place in list(self._chunks):
            try:
                limit -= self._take_records(place, limit, polled)
            except Exception:
                # A deserializer failed. What was taken before is given out, and the others have
                # their turn before it fails again.
                self._chunks[place] = self._chunks.pop(place)
                if not polled:
                    raise
                break
            if limit == 0:
                break
        self._counts.totals["records-consumed"] += wanted - limit
        return polled

    def poll_batches(self, timeout_ms: float = 0) -> dict[TopicPartition, pa.RecordBatch]:
        """Return Arrow batches with an offset column; large frames come without a copy."""
        self._check_usable()
        self._settle_iteration()
        if not self._chunks:
            self._fetch(checks.milliseconds(timeout_ms, "timeout_ms"))
        batches = {place: self._take_batch(place) for place in list(self._chunks)}
        self._counts.totals["records-consumed"] += sum(one.num_rows for one in batches.values())
        return batches

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Give records one by one, waiting for more up to `consumer_timeout_ms`."""
        self._check_usable()
        self._settle_iteration()
        while True:
            self._check_usable()
            if not self._chunks and not self._fetch(self._options.consumer_timeout_ms):
                return
            place, chunks = next(iter(self._chunks.items()))
            chunk = chunks[0]
            count = chunk.count
            # A deserializer that fails, fails here: the records stay where they are.
            records = chunk.records(chunk.count, self._options)
            chunks.pop(0)
            if not chunks:
                del self._chunks[place]
            moves = self._moves
            self._counts.totals["records-consumed"] += count
            for record in records:
                self._yielded = record
                yield record
                if self._moves != moves:
                    break  # Somebody moved the position: what is left of the chunk is void.
            else:
                self._yielded = None
                self._positions[place] = chunk.end_offset

    def __next__(self) -> ConsumerRecord:
        self._check_usable()
        if self._records is None:
            self._records = iter(self)
        try:
            return next(self._records)
        except BaseException:
            # An iterator that has failed would say from now on that there are no more records.
            self._records = None
            raise

    def close(self, autocommit: bool = True) -> None:
        """Let go of everything. Without a group there is nothing that `autocommit` would commit."""
        if not self._is_closed:
            self._is_closed = True
            if self._exported is not None:
                self._exported.close()
            self._watch.close()
            self._subscription.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # What was given out before an exception may not have been dealt with.
        self.close(autocommit=kind is None)

    # How it is done.

    def _settle_iteration(self) -> None:
        """Before anything else moves the positions: make them what iteration has given so far.

        Iteration itself only remembers its last record, for that is all it has time for.
        """
        record, self._yielded = self._yielded, None
        if record is not None:
            self._moves += 1
            place = TopicPartition(record.topic, record.partition)
            self._positions[place] = record.offset + 1
            self._chunks.pop(place, None)

    def _take_records(
        self, place: TopicPartition, limit: int, polled: dict[TopicPartition, list[ConsumerRecord]]
    ) -> int:
        """Move records into `polled`, and the position behind them; return how many."""
        chunks = self._chunks[place]
        count = 0
        while chunks and count < limit:
            chunk = chunks[0]
            taken = chunk.records(limit - count, self._options)
            records = polled.setdefault(place, [])
            records.extend(taken)
            count = len(records)
            self._positions[place] = chunk.offset
            if chunk.count == 0:
                chunks.pop(0)
        if not chunks:
            del self._chunks[place]
        return count

    def _take_batch(self, place: TopicPartition) -> pa.RecordBatch:
        chunks = self._chunks[place]
        taken = [chunks.pop(0)]
        size = taken[0].byte_count
        while chunks and size + chunks[0].byte_count <= _MERGE_BYTES:
            taken.append(chunks.pop(0))
            size += taken[-1].byte_count
        if not chunks:
            del self._chunks[place]
        self._positions[place] = taken[-1].end_offset
        batches = [chunk.with_offsets() for chunk in taken]
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _fetch(self, timeout_ms: float) -> bool:
        """Fill the chunks; wait up to `timeout_ms` for records. Returns whether there are any."""
        begun = time.monotonic()
        deadline = begun + timeout_ms / 1000
        gather_until = begun + min(timeout_ms, self._options.fetch_max_wait_ms) / 1000
        has_looked = False
        while True:
            # Who was held up until the deadline may look, if it was not time to do so before.
            is_last = time.monotonic() >= deadline
            self._watch.clear()
            has_looked = self._assign_new() or has_looked
            size = self._fetch_once()
            now = time.monotonic()
            is_enough = size >= self._options.fetch_min_bytes
            is_over = now >= deadline and (has_looked or is_last)
            if (size and (is_enough or now >= gather_until)) or is_over:
                if size:
                    self._watch.changed()
                return bool(self._chunks)
            self._chunks.clear()
            self._watch.keep(self._directories())
            until = min(deadline, gather_until) if size else deadline
            self._watch.wait(self._wait_seconds(until - now))

    def _fetch_once(self) -> int:
        """Read what is there, fairly over the partitions; return how many bytes."""
        begun = time.monotonic()
        size = self._fetch_places()
        totals = self._counts.totals
        totals["fetch"] += 1
        totals["fetch-latency"] += time.monotonic() - begun
        totals["bytes-consumed"] += size
        return size

    def _fetch_places(self) -> int:
        budget = self._options.fetch_max_bytes
        size = 0
        places = [place for place in self._positions if place not in self._paused]
        self._turn += 1
        for step in range(len(places)):
            place = places[(self._turn + step) % len(places)]
            reader = self._subscription.reader(place.topic)
            limit = min(self._options.max_partition_fetch_bytes, budget - size)
            fetched = reader.fetch(place.partition, self._known_position(place), limit)
            while fetched and not any(one.batch.num_rows for one in fetched):
                # Compaction has left nothing here: go on behind it.
                self._positions[place] = fetched[-1].end_offset
                fetched = reader.fetch(place.partition, fetched[-1].end_offset, limit)
            if fetched:
                self._chunks[place] = [Chunk(place, one) for one in fetched if one.batch.num_rows]
                size += sum(one.byte_count for one in fetched)
            if size >= budget:
                break
        return size

    def _assign_new(self) -> bool:
        """Bring readers up to date, and give new partitions a position; not if it is too early.

        Returns whether it was time to do so.
        """
        if not self._watch.may_look():
            return False
        try:
            gone, added = self._subscription.refresh(self._positions)
        except LogError:
            self._watch.changed()  # The next call is to hear of it too.
            raise
        self._drop(gone)
        for place, is_late in added:
            self._positions[place] = self._start(place, is_late=is_late)
        return True

    def _start(self, place: TopicPartition, *, is_late: bool) -> int | None:
        """Return where to begin in a partition."""
        start, end = self._subscription.reader(place.topic).bounds(place.partition)
        # One that appeared later is read from its beginning, or its first records were missed.
        reset = "earliest" if is_late else self._options.auto_offset_reset
        return {"earliest": start, "latest": end, "none": None}[reset]

    def _drop(self, places: Iterable[TopicPartition]) -> None:
        """Read these no longer."""
        for place in places:
            self._positions.pop(place, None)
            self._chunks.pop(place, None)
            self._paused.discard(place)

    def _directories(self) -> set[str]:
        """Return the directories in which news would show."""
        return self._subscription.directories()

    def _wait_seconds(self, seconds: float) -> float:
        """Return for how long to wait for news, given until when the caller would."""
        return seconds

    def _lags(self) -> dict[TopicPartition, int]:
        """Return the records between each position and the end, as of the last fetch.

        Any thread may ask: nothing is read, and nothing is changed.
        """
        lags = {}
        for place, position in list(self._positions.items()):
            reader = self._subscription.opened(place.topic)
            if reader is not None and position is not None:
                lags[place] = max(0, reader.state.ends[place.partition] - position)
        return lags

    def _known_position(self, place: TopicPartition) -> int:
        position = self._positions[place]
        if position is None:
            raise NoPosition(place)
        return position

    def _bounds(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, int]]:
        self._check_usable()
        found = {}
        for place in checks.places(partitions):
            reader = self._subscription.reader(place.topic)
            reader.refresh()
            found[place] = reader.bounds(place.partition)
        return found

    def _forget_positions(self) -> None:
        self._settle_iteration()
        self._positions.clear()
        self._chunks.clear()
        self._paused.clear()

    def _assigned(self, partition: TopicPartition) -> TopicPartition:
        """Return a partition that is this consumer's."""
        place = checks.place(partition)
        if place not in self._positions:
            raise self._not_assigned(place)
        return place

    def _not_assigned(self, place: TopicPartition) -> LogError:
        if place.topic in self._subscription.topics():
            count = self._subscription.reader(place.topic).state.partition_count
            return UnknownPartition(place.topic, place.partition, count)
        return InvalidOption(
            f"{place.topic}-{place.partition} is not assigned to this consumer; assign or "
            "subscribe to it first"
        )

    def _check_usable(self) -> None:
        if self._process_id != os.getpid():
            raise ForkedHandle("consumer")
        if self._is_closed:
            raise Closed("consumer")


def check_subscription(topics: Iterable[str], pattern: str | None) -> list[str]:
    """Return the topics of a subscription as a list."""
    if isinstance(topics, str):
        raise InvalidOption(f"subscribe takes a list of topics; use [{topics!r}]")
    if not isinstance(topics, Iterable):
        raise InvalidOption(f"subscribe takes a list of topics, not {topics!r}")
    names = [checks.topic_name(topic) for topic in topics]
    if pattern is not None and names:
        raise InvalidOption("subscribe takes topics or a pattern, not both")
    return names


def compile_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that its text says all of: members of a group tell each other the text."""
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise InvalidOption(f"pattern {pattern!r} is not text; give a regular expression")
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise InvalidOption(f"pattern {text!r} is not a regular expression: {error}") from error
    if isinstance(pattern, re.Pattern) and pattern != compiled:
        raise InvalidOption(f"pattern {pattern!r} has flags; write them into its text, as (?i)")
    return compiled
