"""Fixtures that many tests share: a fresh log, the storage below it, and a Spark session."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import broker
import spark_log
from broker.storage import LocalStorage

# A shell starts background jobs, this one too perhaps, with the signal ignored; what the tests
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(root: Path) -> broker.Log:
    return broker.open(root)


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    return LocalStorage(str(root))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Spark session for all tests that need one; it knows `format("log")`."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        # Tests are over before the better code of the JVM's second compiler would pay.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    spark_log.register(session)
    yield session
    session.stop()
