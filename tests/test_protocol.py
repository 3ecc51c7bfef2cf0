"""docs/PROTOCOL.md and the golden files: what is written down is what is read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import broker
from broker import TopicPartition, batch, commit, synced
from broker.commit import Kind
from broker.group.group import Group
from broker.group.state import GroupState
from broker.storage import LocalStorage

DOCS = Path(__file__).parent.parent / "docs" / "PROTOCOL.md"
GOLDEN = Path(__file__).parent / "golden" / "format-1"


def example(kind: str) -> bytes:
    found = re.search(rf"```hex {kind}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None, f"PROTOCOL.md has no example of a {kind}"
    return bytes.fromhex(found[1])


def test_the_example_commit_is_a_commit() -> None:
    data = example("commit")
    read, _ = commit.unpack(data, 0, incarnation=1, number=0, position=0, path="example")
    assert read is not None
    assert (read.kind, read.length, read.time) == (Kind.CREATE, len(data), 1_700_000_000_000)
    assert read.details() == {"partitions": 2, "config": {}}


SIZES = {"4 bytes": "4s", "16 bytes": "16s", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
         "i64": "q"}  # fmt: skip


@pytest.mark.parametrize(
    ("heading", "layout"),
    [
        ("A frame holds records", batch.HEADER),
        ("## Commits", commit.HEADER),
        ("A row of the table:", commit.ROW),
    ],
)
def test_the_field_tables_are_the_layouts(heading: str, layout: object) -> None:
    import struct

    assert isinstance(layout, struct.Struct)
    text = DOCS.read_text().split(heading, 1)[1]
    first_table = re.search(r"(\|.*\n)+", text)
    assert first_table is not None
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", first_table[0], re.MULTILINE)
    fields = [(int(byte), kind.strip()) for byte, kind in rows if kind.strip()]
    codes, at = "<", 0
    for byte, kind in fields:
        assert byte == at, f"{heading}: a field is said to be at {byte}, but is at {at}"
        codes += SIZES[kind]
        at = struct.calcsize(codes)
    assert codes == layout.format


def test_the_kinds_are_the_ones_written_down() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([a-z ]+) \|", DOCS.read_text().split("| kind | name")[1], re.M
    )
    written = {int(number): name.strip().replace(" ", "_").upper() for number, name in rows}
    assert written == {int(kind): kind.name for kind in Kind}


def test_the_synced_hint_has_the_size_written_down() -> None:
    assert len(synced.Synced(1, 2, "x").encode()) == 64


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    copied = tmp_path / "golden"
    shutil.copytree(GOLDEN / "log", copied)
    return copied


def read_all(root: Path, topic: str) -> list[list[object]]:
    log = broker.open(root, create=False)
    with log.consumer(topic, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return sorted(
            [
                record.partition,
                record.offset,
                record.timestamp,
                record.timestamp_type,
                None if record.key is None else record.key.hex(),
                None if record.value is None else record.value.hex(),
                [[name, None if data is None else data.hex()] for name, data in record.headers],
            ]
            for record in consumer
        )


def test_format_1_is_still_read(golden: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    log = broker.open(golden, create=False)
    assert log.topics() == sorted(expected)
    for topic, wanted in expected.items():
        described = log.describe_topic(topic)
        assert described.incarnation == wanted["incarnation"]
        assert described.given_config == wanted["config"]
        assert [[p.start_offset, p.end_offset] for p in described.partitions] == wanted["offsets"]
        assert read_all(golden, topic) == wanted["records"]


def asdict_of_group(state: GroupState) -> dict[str, object]:
    return {
        "number": state.number,
        "config": state.config,
        "generation": state.generation,
        "members": [member.details() for member in state.members.values()],
        "owners": {f"{p.topic}-{p.partition}": list(who) for p, who in state.owners.items()},
        "target": {f"{p.topic}-{p.partition}": who for p, who in state.target.items()},
        "topics": {name: list(known) for name, known in state.topics.items()},
        "is_unsettled": state.is_unsettled,
        "positions": {f"{p.topic}-{p.partition}": list(at) for p, at in state.positions.items()},
    }


def test_a_group_of_format_1_is_still_read_and_written(golden: Path) -> None:
    expected = json.loads((GOLDEN / "expected-group.json").read_text())
    log = broker.open(golden, create=False)
    assert log.groups() == ["a/b"]
    opened = Group(LocalStorage(str(golden)), "a/b", 1)
    assert asdict_of_group(opened.state) == expected
    opened.close()
    assert log.describe_group("a/b").members[0].member_id == "three"
    place = TopicPartition("orders", 0)
    log.reset_group("a/b", {place: 3})
    assert log.group_positions("a/b")[place] == 3


def test_format_1_is_still_read_without_indexes_and_checkpoints(golden: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    for derived in [*golden.glob("topics/*/*/index"), *golden.glob("topics/*/*/checkpoint")]:
        shutil.rmtree(derived)
    for topic, wanted in expected.items():
        assert read_all(golden, topic) == wanted["records"]


def test_format_1_is_still_written(golden: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    log = broker.open(golden, create=False)
    for topic, wanted in expected.items():
        with log.producer() as producer:
            sent = producer.send(topic, b"new", key=b"k", partition=0).result(30)
        assert sent.offset == wanted["offsets"][0][1]
        with log.consumer(topic) as consumer:
            end = consumer.end_offsets([TopicPartition(topic, 0)])
        assert list(end.values()) == [sent.offset + 1]
