"""Slices: any range of offsets, planned in one place and read in another."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import broker
from broker import slices

pytestmark = pytest.mark.any_store


@pytest.fixture
def reader(log: broker.Log) -> Iterator[broker.TopicReader]:
    """A topic of several files; partition 2 is empty, and a third of the frames lie in data/."""
    log.create_topic("t", partitions=3, config={"segment.bytes": 6000})
    with log.producer() as producer:
        for number in range(20):
            rows = [f"{number} {row}" for row in range(10)]
            places = [row % 2 for row in range(10)]
            if number % 3:
                producer.send_batch("t", pa.table({"value": rows, "partition": places})).result(30)
            else:
                stage = log.stage("t")
                stage.write(pa.table({"value": rows * 2, "partition": [0] * 8 + [1] * 12}))
                log.commit_staged("t", [stage.finish()])
                stage.close()
    opened = log.reader("t")
    opened.refresh()
    yield opened
    opened.close()


def whole(reader: broker.TopicReader) -> dict[int, tuple[int, int]]:
    return {partition: (0, end) for partition, end in enumerate(reader.state.ends)}


def expected(log: broker.Log) -> dict[int, list[bytes]]:
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        found: dict[int, list[bytes]] = {}
        for record in consumer:
            found.setdefault(record.partition, []).append(record.value)
        return found


def read(root: Path, tasks: list[list[broker.FileSlice]]) -> dict[int, list[tuple[int, bytes]]]:
    found: dict[int, list[tuple[int, bytes]]] = {}
    for task in tasks:
        for part in broker.read_slices(str(root), pickle.loads(pickle.dumps(task))):
            values = part.batch.column("value").to_pylist()
            rows = found.setdefault(part.partition, [])
            rows += [(part.base_offset + row, value) for row, value in enumerate(values)]
    return found


@pytest.mark.parametrize("task_count", [1, 2, 7, 1000])
@pytest.mark.parametrize("records_max", [None, 1, 13])
@pytest.mark.parametrize("frames_named_max", [0, 2000])
def test_every_record_is_in_exactly_one_task(
    log: broker.Log,
    root: Path,
    reader: broker.TopicReader,
    monkeypatch: pytest.MonkeyPatch,
    task_count: int,
    records_max: int | None,
    frames_named_max: int,
) -> None:
    monkeypatch.setattr(slices, "_FRAMES_NAMED_MAX", frames_named_max)
    planned = broker.plan_slices(reader, whole(reader))
    tasks = broker.pack_slices(planned, reader, task_count=task_count, records_max=records_max)
    found = {partition: sorted(rows) for partition, rows in read(root, tasks).items()}
    assert found == {place: list(enumerate(values)) for place, values in expected(log).items()}
    if records_max is not None:
        assert max(sum(piece.record_count for piece in task) for task in tasks) <= records_max


@pytest.mark.every_store
def test_a_range_inside_a_frame_gives_just_its_records(
    root: Path, reader: broker.TopicReader
) -> None:
    planned = broker.plan_slices(reader, {0: (3, 5), 1: (9, 9)})
    found = read(root, broker.pack_slices(planned, reader, task_count=4))
    assert [offset for offset, _ in found[0]] == [3, 4]
    assert set(found) == {0}


@pytest.mark.parametrize("wanted", [(0, 10_000), (5, 4), (-1, 3)])
def test_a_range_the_partition_does_not_hold_is_refused(
    reader: broker.TopicReader, wanted: tuple[int, int]
) -> None:
    with pytest.raises(broker.OffsetOutOfRange):
        broker.plan_slices(reader, {0: wanted})


def test_a_plan_stays_readable_while_the_log_goes_on(
    log: broker.Log, root: Path, reader: broker.TopicReader
) -> None:
    tasks = broker.pack_slices(broker.plan_slices(reader, whole(reader)), reader, task_count=2)
    before = read(root, tasks)
    with log.producer() as producer:
        for _ in range(50):
            producer.send("t", b"x" * 500).result(30)
    assert read(root, tasks) == before


def test_a_plan_over_many_small_frames_is_small_and_quick(log: broker.Log, root: Path) -> None:
    from broker import batch
    from broker.commit import Author
    from broker.ledger import new_token

    log.create_topic("t", partitions=4, config={"segment.bytes": 4 << 20})
    writer = log._open_writer("t")
    frame = batch.encode_records([None], [b"v" * 100], None, [1])
    for number in range(20_000):
        writer.append(((number & 3, frame),), Author(new_token()))
    writer.close()
    opened = log.reader("t")
    opened.refresh()
    planned = broker.plan_slices(opened, whole(opened))
    tasks = broker.pack_slices(planned, opened, task_count=8)
    opened.close()
    assert len(pickle.dumps(tasks)) < 20_000
    assert sum(len(rows) for rows in read(root, tasks).values()) == 20_000
