"""The shape of what commits say: nothing else is written, and nothing else is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import broker
from broker import TopicPartition, commit, shapes
from broker.commit import Author, Kind
from broker.group.group import Group
from broker.ledger import Ledger, new_token
from broker.storage import LocalStorage
from broker.topic import Topic

FIRST = TopicPartition("orders", 0)

OF_TOPICS = [
    (Kind.TRUNCATE, {"starts": {"False": 1}}),
    (Kind.TRUNCATE, {"starts": {"-1": 1}}),
    (Kind.TRUNCATE, {"starts": {"0": 2.5}}),
    (Kind.TRUNCATE, {"starts": {"0": True}}),
    (Kind.TRUNCATE, {"starts": {"0": 1 << 63}}),
    (Kind.TRUNCATE, {"starts": {"7": 1}}),
    (Kind.TRUNCATE, {}),
    (Kind.CONFIG, {"partitions": "3"}),
    (Kind.APPEND, {"transaction": [5, 1]}),
    (Kind.APPEND, {"transaction": ["job", 1.5]}),
    (Kind.SEAL, {"added": [["name", 0, 0, 1]]}),
    (Kind.TRIM, {"before": None}),
    (Kind.JOIN, {"member": "a"}),
]
OF_GROUPS = [
    (Kind.POSITION, {"positions": {"orders": [1, 0, {"0.0": 3}]}}),
    (Kind.POSITION, {"positions": {"orders": [1, 0, {"x": 3}]}}),
    (Kind.POSITION, {"positions": {"orders": [1, 0, {"0": 3.0}]}}),
    (Kind.POSITION, {"positions": {"orders": [1, 0, {"0": 3}]}, "metadata": {"orders": {"0": 5}}}),
    (Kind.ASSIGN, {"generation": 1, "topics": {}, "members": {"a": {"orders": [0.0]}}}),
    (Kind.JOIN, {"member": "a", "client": 5}),
    (Kind.FORGET, {"positions": {"orders": "0"}}),
]


@pytest.fixture
def log(root: Path) -> broker.Log:
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    log.publish_positions("billing", {FIRST: 0})
    return log


def append_raw(ledger: Ledger[Any], root: Path, kind: Kind, details: dict[str, Any]) -> Path:
    """Write a commit behind the last, past everything that would refuse it; return its file."""
    state = ledger.state
    parts, *_ = commit.pack(
        kind, Author(new_token()), incarnation=1, number=state.number, position=state.position,
        time=state.time, details=details,
    )  # fmt: skip
    path = root / ledger.journal.file_path(state.file_number)
    with path.open("ab") as file:
        file.write(b"".join(bytes(part) for part in parts))
    ledger.close()
    return path


@pytest.mark.parametrize(("kind", "details"), OF_TOPICS)
def test_a_commit_that_no_topic_can_apply_is_damage_with_a_place(
    log: broker.Log, root: Path, kind: Kind, details: dict[str, Any]
) -> None:
    topic = Topic(LocalStorage(str(root)), "orders", 1)
    position = topic.state.position
    path = append_raw(topic, root, kind, details)
    with pytest.raises(broker.CorruptLog, match=r"commit 1 \(\w+\) cannot be applied") as raised:
        log.describe_topic("orders")
    assert (raised.value.path, raised.value.position) == (str(path), position)
    (damage,) = log.verify("orders").damage
    assert (damage.path, damage.position) == (str(path), position)


@pytest.mark.parametrize(("kind", "details"), OF_GROUPS)
def test_a_commit_that_no_group_can_apply_is_damage_with_a_place(
    log: broker.Log, root: Path, kind: Kind, details: dict[str, Any]
) -> None:
    group = Group(LocalStorage(str(root)), "billing", 1)
    position = group.state.position
    path = append_raw(group, root, kind, details)
    with pytest.raises(broker.CorruptLog, match=r"commit 2 \(\w+\) cannot be applied") as raised:
        log.describe_group("billing")
    assert (raised.value.path, raised.value.position) == (str(path), position)
    assert log.verify(group="billing").damage[0].position == position


@pytest.mark.parametrize("start", [2.5, True, "1", None])
def test_what_could_not_be_applied_is_not_written(log: broker.Log, root: Path, start: Any) -> None:
    topic = Topic(LocalStorage(str(root)), "orders", 1, write=True)
    path = root / topic.journal.file_path(0)
    before = path.read_bytes()
    with pytest.raises(broker.InvalidRecord, match="cannot have starts=.* nothing was written"):
        topic._change(Kind.TRUNCATE, lambda state: {"starts": {"0": start}})
    assert path.read_bytes() == before
    topic.truncate({0: 0})
    topic.close()
    assert log.verify().is_sound


def test_a_field_that_is_not_known_is_left_alone() -> None:
    shapes.check("TRUNCATE", {"starts": {"0": 1}, "why": [None, 1.5]})


def test_details_are_an_object() -> None:
    with pytest.raises(ValueError, match="not an object"):
        shapes.check("TRUNCATE", [1])
