"""Commits as bytes: what is packed is what is read, at its own place and nowhere else."""

from __future__ import annotations

from typing import Any

import google_crc32c
import pytest

from broker.batch import encode_records
from broker.commit import (
    BY_REFERENCE,
    HEADER,
    LOG_APPEND,
    ROW,
    ROW_TYPE,
    TRANSACTIONAL,
    Author,
    Commit,
    FramePlace,
    Kind,
    pack,
    pack_one,
    results,
    unpack,
)
from broker.errors import CorruptLog, LogError, UnsupportedFormat

TOKEN = bytes(range(16))
AUTHOR = Author(TOKEN, producer_id=77, sequence=5, epoch=2)
PLACE = {"incarnation": 3, "number": 9, "position": 1000}
FRAME = encode_records([None, None], [b"a", b"bcd"], None, [5000, 3000])
ELSEWHERE = FramePlace("x.frames", 40, 500, 7, 1000, 2000)


def joined(**given: Any) -> bytes:
    parts, length, _table = pack(
        given.pop("kind", Kind.APPEND), given.pop("author", AUTHOR), time=1234, **PLACE, **given
    )
    data = b"".join(bytes(part) for part in parts)
    assert len(data) == length
    return data


def opened(data: bytes) -> Commit:
    commit, _needed = unpack(data, 0, path="a file", **PLACE)
    assert commit is not None
    return commit


def test_header_and_rows_are_read_as_they_were_packed() -> None:
    commit = opened(joined(frames=[(1, 10, FRAME), (0, 4, FRAME)]))
    assert commit[:10] == (Kind.APPEND, 0, 9, 1000, commit.length, 1234, TOKEN, 77, 5, 2)
    rows = commit.rows()
    assert [row[:6] for row in rows] == [
        (1, 0, 0, 10, 2, FRAME.byte_length),
        (0, 0, 0, 4, 2, FRAME.byte_length),
    ]
    assert [row[7:] for row in rows] == [(3000, 5000)] * 2
    assert commit.details() == {}


def test_each_frame_lies_where_its_row_says_on_a_multiple_of_eight() -> None:
    frames = [encode_records([None], [b"v" * size], None, [1], "gzip") for size in range(9)]
    data = joined(frames=[(number, 0, frame) for number, frame in enumerate(frames)])
    for row, frame in zip(opened(data).rows(), frames, strict=True):
        start = row[6]
        assert start % 8 == 0
        assert data[start : start + row[5]] == b"".join(bytes(part) for part in frame.parts)
    assert len(data) % 8 == 0


def test_frames_elsewhere_are_named_with_their_file() -> None:
    other = FramePlace("y.frames", 0, 100, 1, 5, 5)
    frames = [(0, 0, other), (1, 0, FRAME), (2, 0, ELSEWHERE)]
    commit = opened(joined(frames=frames, details={"transaction": ["app", 3]}))
    details = commit.details()
    assert details["transaction"] == ["app", 3]
    rows = commit.rows()
    assert [bool(row[1] & BY_REFERENCE) for row in rows] == [True, False, True]
    assert details["files"][rows[0][2]] == "y.frames"
    assert details["files"][rows[2][2]] == "x.frames"
    assert (rows[2][4:7], rows[2][7:]) == ((7, 500, 40), (1000, 2000))


def test_with_log_append_time_the_rows_have_the_commits_time() -> None:
    for frames in ([(0, 0, FRAME)], [(0, 0, FRAME), (1, 0, ELSEWHERE)]):
        for row in opened(joined(frames=frames, log_append=True)).rows():
            assert row[1] & LOG_APPEND
            assert row[7:] == (1_234_000, 1_234_000)


def test_a_transactional_author_is_marked() -> None:
    commit = opened(joined(author=AUTHOR._replace(is_transactional=True)))
    assert commit.flags & TRANSACTIONAL
    assert not opened(joined()).flags & TRANSACTIONAL


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_carries_details(kind: Kind) -> None:
    details = {"text": "grün", "numbers": [1, 2], "none": None}
    commit = opened(joined(kind=kind, details=details))
    assert (commit.kind, commit.details()) == (kind, details)


@pytest.mark.parametrize("log_append", [False, True])
@pytest.mark.parametrize("is_transactional", [False, True])
def test_the_short_way_to_pack_one_frame_makes_the_same_bytes(
    log_append: bool, is_transactional: bool
) -> None:
    author = AUTHOR._replace(is_transactional=is_transactional)
    for size in range(17):
        frame = encode_records([None], [b"v" * size], None, [7], "gzip")
        parts, length, table, newest = pack_one(author, 3, 9, 1000, 1234, 1, 10, frame, log_append)
        data = b"".join(bytes(part) for part in parts)
        assert data == joined(author=author, frames=[(1, 10, frame)], log_append=log_append)
        assert (len(data), opened(data).table) == (length, table)
        assert newest == opened(data).rows()[0][8]


def test_a_commit_is_not_there_until_its_table_is() -> None:
    data = joined(frames=[(0, 0, FRAME)])
    needed = HEADER.size + ROW.size
    for length in range(needed):
        commit, wanted = unpack(data[:length], 0, path="a file", **PLACE)
        assert commit is None
        assert wanted == (HEADER.size if length < HEADER.size else needed)
    assert unpack(data[:needed], 0, path="a file", **PLACE)[0] is not None


@pytest.mark.parametrize(
    "place", [{"incarnation": 4}, {"number": 8}, {"number": 10}, {"position": 1008}], ids=repr
)
def test_a_commit_is_not_believed_at_another_place(place: dict[str, int]) -> None:
    with pytest.raises(CorruptLog, match="is expected here"):
        unpack(joined(), 0, path="a file", **{**PLACE, **place})


def test_a_changed_bit_before_the_frames_is_found() -> None:
    data = joined(frames=[(0, 0, FRAME)], details={"a": 1})
    for position in range(opened(data).rows()[0][6]):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(LogError):
                opened(bytes(damaged))


def test_a_damaged_length_is_damage_not_a_long_wait() -> None:
    data = bytearray(joined(frames=[(0, 0, FRAME)]))
    data[35] ^= 0x7F
    with pytest.raises(CorruptLog, match="header's checksum"):
        unpack(bytes(data[: HEADER.size]), 0, path="a file", **PLACE)


@pytest.mark.parametrize(("field", "at"), [("version", 8), ("kind", 9)])
def test_a_newer_commit_is_refused_not_skipped(field: str, at: int) -> None:
    data = bytearray(joined())
    data[at] = 99
    data[4:8] = google_crc32c.value(bytes(data[8 : HEADER.size])).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormat, match="the commit at byte 1000 of a file"):
        opened(bytes(data))


def test_results_are_the_first_offset_and_count_of_each_partition() -> None:
    frames = [(1, 10, FRAME), (0, 4, FRAME), (1, 12, FRAME)]
    assert results(opened(joined(frames=frames)).table) == {1: (10, 4), 0: (4, 2)}
    assert results(b"") == {}


def test_rows_have_the_same_layout_for_numpy() -> None:
    assert ROW_TYPE.itemsize == ROW.size
    assert HEADER.size % 8 == ROW.size % 8 == 0
