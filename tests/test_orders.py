"""What becomes of an order: which lines are used, which are dead letters and why, what is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import broker
from pipelines import orders

pytestmark = pytest.mark.spark

GOOD = '{"order_id": "o-1", "product": "lamp", "amount": 20.5, "at": "2026-04-01T09:00:00Z"}'


def line(**changes: str) -> str:
    """Return the text of an order with some fields replaced, left out (""), or added."""
    fields = {
        "order_id": '"o-1"',
        "product": '"lamp"',
        "amount": "20",
        "at": '"2026-04-01T09:00:00Z"',
        **changes,
    }
    return "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items() if text) + "}"


REASONS: list[tuple[str | bytes | None, str | None]] = [
    (GOOD, None),
    (f"  {GOOD} ", None),
    (line(amount="0"), None),
    (line(amount='"20.50"'), None),
    (line(amount="2e1"), None),
    (line(at='"2026-04-01T11:00:00.123+02:00"'), None),
    (None, "not a JSON object"),
    ("", "not a JSON object"),
    ("not JSON at all", "not a JSON object"),
    (GOOD[:-12], "not a JSON object"),
    (f"[{GOOD}]", "not a JSON object"),
    (f"{GOOD}, {GOOD}", "not a JSON object"),
    (f"{GOOD}{GOOD}", "not a JSON object"),
    (f"{GOOD} and more", "not a JSON object"),
    (GOOD.replace('"', "'"), "not a JSON object"),
    (b"\xff\xfe\x00", "not a JSON object"),
    ("null", "not a JSON object"),
    ("{}", "missing or unusable: order_id, product, amount, at"),
    (f"{GOOD}] [", "missing or unusable: order_id, product, amount, at"),
    (line(amount=""), "missing or unusable: amount"),
    (line(amount='"many"'), "missing or unusable: amount"),
    (line(amount="NaN"), "not a JSON object"),
    (line(amount="1e400"), "missing or unusable: amount"),
    (line(amount="[1]"), "missing or unusable: amount"),
    (line(product="null"), "missing or unusable: product"),
    (line(at='"yesterday"'), "missing or unusable: at"),
    (line(at="1775034000"), "missing or unusable: at"),
    (line(at='"2026-04-01"'), "missing or unusable: at"),
    (line(product="", at='"soon"'), "missing or unusable: product, at"),
    (line(amount="-5"), "negative amount"),
    (line(amount="19.999"), "amount has more than two decimals"),
    (line(currency='"EUR"'), "unknown field: currency"),
    (line(currency='"EUR"', amount='"x"', tax="1"), "unknown field: currency, tax"),
    (GOOD.replace('"product"', '"order_id"'), "a field is there twice"),
]


def test_every_line_is_an_order_or_has_a_reason(spark: Any) -> None:
    lines = [one.encode() if isinstance(one, str) else one for one, _ in REASONS]
    frame = spark.createDataFrame(list(enumerate(lines)), "number INT, value BINARY")
    found = orders.parse(frame).orderBy("number").select("reason").collect()
    assert [row.reason for row in found] == [reason for _, reason in REASONS]


def test_silver_holds_each_order_once_and_none_that_is_too_late(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    for topic in ("orders", "silver"):
        log.create_topic(topic)
    hours = [(f"o-{hour}", f"2026-04-01T{hour:02}:00:00Z") for hour in range(8)]
    send(log, hours + hours[:4])
    assert refine(spark, log, tmp_path) == 0
    # The watermark is at five: what is not after it is too late.
    late, in_time = ("late", "2026-04-01T05:00:00Z"), ("in-time", "2026-04-01T05:00:01Z")
    send(log, [late, in_time, hours[7]])
    assert refine(spark, log, tmp_path) == 1
    assert sorted(silver(spark, log)) == sorted([*(name for name, _ in hours), "in-time"])


def send(log: broker.Log, times: list[tuple[str, str]]) -> None:
    with log.producer() as producer:
        for name, time in times:
            text = line(order_id=f'"{name}"', at=f'"{time}"')
            producer.send("orders", text.encode()).result(timeout=10)


def refine(spark: Any, log: broker.Log, tmp_path: Path) -> int:
    """Take what is new to silver; return how many orders were too late."""
    stream = spark.readStream.format("log").option("subscribe", "orders")
    parsed = orders.parse(stream.option("startingOffsets", "earliest").load(log.root))
    query = (
        orders.valid(parsed, "2 hours")
        .writeStream.format("log")
        .option("topic", "silver")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(log.root)
    )
    query.awaitTermination()
    return sum(
        operator["numRowsDroppedByWatermark"]
        for one in query.recentProgress
        for operator in one["stateOperators"]
    )


def silver(spark: Any, log: broker.Log) -> list[str]:
    rows = spark.read.format("log").option("subscribe", "silver").load(log.root)
    found = rows.selectExpr(
        "get_json_object(cast(value AS string), '$.order_id') AS name"
    ).collect()
    return [row.name for row in found]
