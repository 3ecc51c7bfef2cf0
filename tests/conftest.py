"""Fixtures that many tests share: a fresh log, the storage below it, a Spark session, servers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import broker
import spark_log
from broker.storage import RemoteStorage, Storage, environment, open_storage
from servers import HdfsCluster, S3Server, ServerError

# A shell starts background jobs, this one too perhaps, with the signal ignored; what the tests
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose few tests take minutes. They are begun first: at the end, one would run alone.
LONG = (
    "test_spark_jobs.py",
    "test_notebooks.py",
    "test_etl.py",
    "test_documentation.py",
    "test_load.py",
    "test_spark_maintenance.py",
    "test_hdfs_faults.py",
    "test_spark_remote.py",
    "test_remote.py",
    "test_servers.py",
    "test_spark_table.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `any_store` run on a local disk and on a store of whole objects.

    Those marked `every_store` also run on a real HDFS and a real S3 server. But not those marked
    `on_disk`: they look at files, or meet other processes at a lock.
    """
    is_marked = metafunc.definition.get_closest_marker
    if "root" not in metafunc.fixturenames or is_marked("on_disk"):
        return
    if is_marked("every_store"):
        metafunc.parametrize("root", ["disk", "store", "hdfs", "s3"], indirect=True)
    elif is_marked("any_store"):
        metafunc.parametrize("root", ["disk", "store"], indirect=True)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    kind = getattr(request, "param", "disk")
    if kind == "store":
        return f"memory://{uuid.uuid4().hex}"
    if kind == "hdfs":
        return f"{request.getfixturevalue('hdfs_cluster').address}/{uuid.uuid4().hex}"
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        for name, value in environment({**server.client_options, "poll.ms": "100"}).items():
            request.getfixturevalue("monkeypatch").setenv(name, value)
        return f"{server.address}/{uuid.uuid4().hex}"
    return tmp_path / "log"


@pytest.fixture
def log(root: Path | str) -> broker.Log:
    return broker.open(root)


@pytest.fixture
def remove_log(root: Path | str) -> Callable[[], None]:
    """Remove all files of the log, as a person would by other tools."""

    def remove() -> None:
        if isinstance(root, Path):
            shutil.rmtree(root)
            return
        storage = open_storage(root)
        assert isinstance(storage, RemoteStorage)
        for entry in storage.entries(""):
            if entry.is_folder:
                storage._store.delete_tree(entry.name)
            else:
                storage._store.delete(entry.name)

    return remove


@pytest.fixture
def storage(root: Path | str) -> Storage:
    return open_storage(root)


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


@pytest.fixture(scope="session")
def hdfs_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """A real HDFS of three datanodes, one for each worker. Who kills a part starts it again."""
    try:
        cluster = HdfsCluster.start(tmp_path_factory.mktemp("hdfs"))
    except ServerError as error:
        pytest.fail(str(error), pytrace=False)
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with one bucket for all tests; each uses a prefix of its own."""
    try:
        server = S3Server.start(tmp_path_factory.mktemp("s3"))
    except ServerError as error:
        pytest.fail(str(error), pytrace=False)
    with server:
        yield server
