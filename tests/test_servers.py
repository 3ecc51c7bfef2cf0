"""The servers that other tests rely on do what the log will ask of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hdfs_native
import pytest
import s3fs

from servers import Children, HdfsCluster, S3Server, ServerError, hadoop_jars
from servers.children import free_port, wait_until

PATIENCE_SECONDS = 60
_STARTER = """
import sys, time
from pathlib import Path
from servers import Children

child = Children().start(["sleep", "1000"], Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def client(hdfs_cluster: HdfsCluster) -> hdfs_native.Client:
    return hdfs_native.Client(hdfs_cluster.address, hdfs_cluster.client_options)


@pytest.fixture
def whole_cluster(hdfs_cluster: HdfsCluster) -> Iterator[HdfsCluster]:
    """The cluster, whole again after the test."""
    yield hdfs_cluster
    hdfs_cluster.start_all()


def put(client: hdfs_native.Client, path: str, data: bytes) -> None:
    with client.create(path, hdfs_native.WriteOptions(overwrite=True)) as file:
        file.write(data)


def put_with_patience(client: hdfs_native.Client, path: str, data: bytes) -> None:
    """Put, again and again while the name node still offers nodes that are dead."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return put(client, path, data)
        except (OSError, RuntimeError):
            if time.monotonic() > end:
                raise


def test_a_rename_never_replaces_a_file(client: hdfs_native.Client) -> None:
    put(client, "/servers/temp", b"new")
    put(client, "/servers/final", b"old")
    with pytest.raises(FileExistsError):
        client.rename("/servers/temp", "/servers/final", overwrite=False)
    assert client.read("/servers/final").read() == b"old"


def test_each_file_is_on_all_three_datanodes(
    hdfs_cluster: HdfsCluster, client: hdfs_native.Client
) -> None:
    put(client, "/servers/replicated", b"thrice")
    assert client.get_file_info("/servers/replicated").replication == 3
    assert set(hdfs_cluster.process_ids()) == {"namenode", "datanode0", "datanode1", "datanode2"}


def test_writes_and_reads_go_on_with_one_datanode_left(
    whole_cluster: HdfsCluster, client: hdfs_native.Client
) -> None:
    put(client, "/servers/before", b"on three")
    for number in (0, 1):
        whole_cluster.kill_datanode(number)
    assert client.read("/servers/before").read() == b"on three"
    whole_cluster.wait_until_ready()
    put_with_patience(client, "/servers/last", b"on one")
    whole_cluster.start_datanode(0)
    put_with_patience(client, "/servers/two", b"on two")
    assert client.read("/servers/last").read() == b"on one"


def test_a_restarted_name_node_knows_all_files(
    whole_cluster: HdfsCluster, client: hdfs_native.Client
) -> None:
    put(client, "/servers/kept", b"kept")
    whole_cluster.kill_name_node()
    whole_cluster.start_name_node()
    assert client.read("/servers/kept").read() == b"kept"
    put_with_patience(client, "/servers/after", b"after")


def test_a_conditional_put_to_s3_never_replaces_an_object(s3_server: S3Server) -> None:
    files = s3fs.S3FileSystem(**s3_server.client_options, skip_instance_cache=True)
    path = f"{s3_server.bucket}/servers/one"
    files.pipe_file(path, b"first", mode="create")
    with pytest.raises(FileExistsError):
        files.pipe_file(path, b"second", mode="create")
    assert files.cat_file(path) == b"first"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_die_with_the_process_that_started_them(
    tmp_path: Path, how: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
    ) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        os.kill(child, 0)
        starter.send_signal(how)
    limit = time.monotonic() + PATIENCE_SECONDS
    while is_running(child):
        assert time.monotonic() < limit, "the child outlived its starter"
        time.sleep(0.02)


def test_a_wanted_port_is_taken_only_if_it_is_free() -> None:
    wanted = free_port()
    assert free_port(wanted) == wanted
    with socket.create_server(("127.0.0.1", wanted)):
        assert free_port(wanted) != wanted


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_the_demo_runs_on_hdfs_and_finds_nothing_lost_or_doubled(hdfs_cluster: HdfsCluster) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/demo.py"],
        env={**os.environ, "LOG_ROOT": f"{hdfs_cluster.address}/demo"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    children, log = Children(), tmp_path / "log"
    child = children.start(["sh", "-c", "echo the disk is full; exit 1"], log)
    with pytest.raises(ServerError, match="(?s)a process ended.*the disk is full"):
        wait_until(lambda: False, "the server", PATIENCE_SECONDS, {log: child})
    children.end()


def test_jars_that_cannot_be_had_are_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServerError, match="Cannot fetch .* put the jar there by hand") as error:
        hadoop_jars.class_path()
    assert str(error.value).count("\n") == 0


def is_running(id: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
