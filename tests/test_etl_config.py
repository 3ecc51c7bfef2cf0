"""The config of the ETL job: what conf/ says is what the code does, and nothing else is taken."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import broker
from pipelines.config import EtlConfig

CONF = Path(__file__).parent.parent / "conf" / "etl.toml"
NEEDED = {"log": "/log", "gold": "/gold", "checkpoints": "/checkpoints"}


def test_conf_lists_every_key_with_its_default() -> None:
    assert tomllib.loads(CONF.read_text()) == asdict(EtlConfig())


def test_conf_says_why_for_every_key() -> None:
    lines = CONF.read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if line and not line.startswith("#"):
            assert before.startswith("# "), f"{line} has no reason"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sliver": "x"}, "unknown key 'sliver'; did you mean 'silver'?"),
        ({"checkpoint": "x"}, "unknown key 'checkpoint'; did you mean 'checkpoints'?"),
        ({"gold": ""}, "gold is not set"),
        ({"gold": 3}, "gold=3 is not a text"),
        ({"partitions": 0}, "partitions=0 is not a whole number of 1 or more"),
        ({"partitions": True}, "partitions=True is not a whole number"),
        ({"records_per_batch": "many"}, "records_per_batch='many' is not a whole number"),
        ({"late": "soon"}, "late='soon' is not a time; use e.g. '10 seconds'"),
        ({"window": "0 hours"}, "window='0 hours' is not a time"),
        ({"silver": "orders"}, "must be three topics"),
        ({"spark": "local"}, "spark='local' is not a table of Spark's settings"),
        ({"spark": {"spark.master": []}}, "spark: spark.master=[] is not a text"),
    ],
)
def test_a_wrong_key_or_value_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(broker.InvalidOption) as caught:
        EtlConfig.parse(NEEDED | given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("log = ", "is not TOML"),
        ("glod = 'x'", "unknown key 'glod'; did you mean 'gold'?"),
        ("log = '/other'", "log is '/other' here, and '/log' by --log or SPARK_LOG_ROOT"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "etl.toml"
    path.write_text(text)
    with pytest.raises(broker.InvalidOption) as caught:
        EtlConfig.load(str(path), log="/log")
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(broker.InvalidOption, match="No such file"):
        EtlConfig.load(str(tmp_path / "none.toml"))


def test_settings_of_spark_come_in_both_spellings_of_toml(tmp_path: Path) -> None:
    path = tmp_path / "etl.toml"
    path.write_text(
        'gold = "/g"\ncheckpoints = "/c"\n'
        '[spark]\n"spark.master" = "local[1]"\nspark.ui.enabled = false\n'
    )
    config = EtlConfig.load(str(path), log="/log")
    assert config.spark == {"spark.master": "local[1]", "spark.ui.enabled": "false"}
    assert (config.log, config.checkpoint("gold")) == ("/log", "/c/gold")
