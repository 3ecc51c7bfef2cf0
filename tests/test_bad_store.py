"""What a person reads who names a store that is not there, or is not theirs: one line, soon."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hdfs_native
import pytest

import broker
from broker.cli.warnings import Warnings
from broker.errors import StoreUnavailable
from broker.storage import hdfs
from broker.storage.hdfs import HdfsStore
from servers import HdfsCluster, S3Server
from servers.children import free_port

# Starting Python takes some of it; the drivers by themselves would ask for minutes.
SOON_SECONDS = 30
NO_CREDENTIALS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_CONFIG_FILE": os.devnull,
}


def refuse(root: str, environment: Mapping[str, str]) -> str:
    """Return the one line that the command line says of a log there."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", "topic", "list", "--log", root],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=SOON_SECONDS,
    )
    assert done.returncode == 1 and not done.stdout, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def endpoint_of(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
    }


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_a_host_that_does_not_exist(kind: str) -> None:
    root = "hdfs://nowhere.invalid:9000/x" if kind == "hdfs" else "s3://bucket/x"
    line = refuse(root, {"AWS_ENDPOINT_URL": "http://nowhere.invalid"})
    assert f"{root}: there is no host 'nowhere.invalid'; check the address" in line


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_a_port_where_nobody_listens(kind: str) -> None:
    place = f"127.0.0.1:{free_port()}"
    root = f"hdfs://{place}/x" if kind == "hdfs" else "s3://bucket/x"
    line = refuse(root, {"AWS_ENDPOINT_URL": f"http://{place}"})
    assert f"{root}: nobody answers at {place}" in line and "check the address" in line


def test_an_hdfs_without_a_port_is_looked_for_at_hadoops_own() -> None:
    # Not at the address of `make hdfs`, which may be running here.
    line = refuse("hdfs://127.0.0.77/x", {"HADOOP_CONF_DIR": "", "HADOOP_HOME": ""})
    assert "hdfs://127.0.0.77:8020/x: nobody answers" in line, line


def test_a_name_service_is_left_to_hadoops_configuration(tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    settings = {
        "dfs.nameservices": "mine",
        "dfs.ha.namenodes.mine": "one",
        "dfs.namenode.rpc-address.mine.one": place,
    }
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration>"
        + "".join(
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in settings.items()
        )
        + "</configuration>"
    )
    script = "import sys, broker.storage.hdfs as h; print(h.HdfsStore(sys.argv[1], {}).root)"
    done = subprocess.run(
        [sys.executable, "-c", script, "hdfs://mine/x"],
        env={**os.environ, "HADOOP_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=SOON_SECONDS,
    )
    assert done.stdout == "hdfs://mine/x\n"


def test_what_takes_connections_and_is_no_name_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver by itself would ask for three minutes, or wait without end."""
    monkeypatch.setattr(hdfs, "_FIRST_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        root = f"hdfs://127.0.0.1:{silent.getsockname()[1]}/x"
        begun = time.monotonic()
        with pytest.raises(broker.StorageError, match="is no name node; check that this is the"):
            broker.open(root)
        assert time.monotonic() - begun < 10


def test_what_speaks_http_and_is_no_store(tmp_path: Path) -> None:
    """As the port of a name node does: all it says is that there is no such thing."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        line = refuse("s3://bucket/x", {"AWS_ENDPOINT_URL": place, **keys})
        server.shutdown()
    assert f"what answers at {place} does not speak S3" in line
    assert "check the option endpoint_url" in line


SAFE_MODE = (
    "org.apache.hadoop.hdfs.server.namenode.SafeModeException: Cannot create file{} Name node"
)
NO_DATANODE = (
    "java.io.IOException: File {} could only be written to 0 of the 1 minReplication nodes."
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SAFE_MODE, "the name node is in safe mode; waiting for it"),
        (NO_DATANODE, "no datanode does that could hold or take this"),
        ("IO error occurred while communicating with {}: it is closed", "HDFS does not answer"),
    ],
    ids=["safe_mode", "no_datanode", "no_answer"],
)
@pytest.mark.parametrize("topic", ["kerberos-audit", "sasl", "gssapi.errors"])
def test_what_hdfs_says_of_a_path_is_not_what_it_says_of_a_login(
    text: str, topic: str, message: str
) -> None:
    path = f"/logs/topics/{topic}/1/journal/a"
    error = HdfsStore("hdfs://host:9000/logs", {}).translate(RuntimeError(text.format(path)), "a")
    assert isinstance(error, StoreUnavailable) and message in str(error), error


@pytest.mark.parametrize(
    "text",
    [
        "SASL error: no valid mechanism",
        "GSSAPI error: No Kerberos credentials available (default cache: FILE:/tmp/krb5cc_0)",
        "GSSAPI error: Server hdfs/host@EXAMPLE.COM not found in Kerberos database",
        "RPC error: javax.security.sasl.SaslException, GSS initiate failed",
    ],
)
def test_a_login_that_hdfs_does_not_take(text: str) -> None:
    error = HdfsStore("hdfs://host:9000/logs", {}).translate(RuntimeError(text), "a")
    assert not isinstance(error, StoreUnavailable)
    assert text in str(error) and "check the Kerberos ticket (kinit)" in str(error)


def test_a_folder_of_somebody_else(hdfs_cluster: HdfsCluster) -> None:
    client = hdfs_native.Client(hdfs_cluster.address, hdfs_cluster.client_options)
    folder = f"/{uuid.uuid4().hex}"
    client.mkdirs(folder, 0o700, True)
    root = f"{hdfs_cluster.address}{folder}/log"
    broker.open(root)
    line = refuse(root, {"HADOOP_USER_NAME": "stranger"})
    assert f"not allowed to write or read {root}/_log.json as stranger: " in line
    assert "check its owner, or set HADOOP_USER_NAME" in line


def test_a_producer_that_may_not_write_says_it_once(hdfs_cluster: HdfsCluster) -> None:
    root = f"{hdfs_cluster.address}/{uuid.uuid4().hex}"
    broker.open(root).create_topic("clicks")
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", "produce", "clicks", "--log", root],
        env={**os.environ, "HADOOP_USER_NAME": "stranger"},
        input="first\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=SOON_SECONDS,
    )
    (line,) = done.stderr.splitlines()  # Not that its maintenance may not write, too.
    assert done.returncode == 1 and "not allowed to write" in line, line
    assert line.endswith("(0 records written before)")


# Otherwise the store has a minute to come back.
PATIENT_FOR = """
import sys
import broker.cli
from broker.storage import open_storage

seconds = float(sys.argv.pop())
open_storage(sys.argv[2])._patience = seconds
broker.cli.main()
"""


def test_a_store_that_dies_is_waited_for_once_and_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server.start(tmp_path) as server:
        for name, value in endpoint_of(server).items():
            monkeypatch.setenv(name, value)
        root = f"{server.address}/{uuid.uuid4().hex}"
        log = broker.open(root)
        log.create_topic("clicks")
        with log.producer() as producer:
            producer.send("clicks", b"first")
        command = "consume --group g --from-beginning --follow clicks"
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT_FOR, "--log", root, *command.split(), "3"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"first\n"
    begun = time.monotonic()
    try:
        _, said = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    (line,) = said.decode().splitlines()
    assert process.returncode == 1 and root in line, line
    assert time.monotonic() - begun < 3 + 4 + 4  # Patience, what closing may take, and ours.


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("ENDPOINT_URL", "127.0.0.1:9000", "check the options endpoint_url and region"),
        ("REGION", "on the moon", "check the options endpoint_url and region"),
        ("PROFILE", "nobodys", "The config profile (nobodys) could not be found; check the opt"),
        ("POLL__MS", "often", "storage option poll.ms='often' is not a whole number"),
    ],
)
def test_options_that_cannot_be(option: str, value: str, message: str) -> None:
    assert message in refuse("s3://bucket/x", {f"SPARK_LOG_STORAGE_{option}": value})


@pytest.mark.parametrize(
    ("root", "endpoint", "message"),
    [
        ("hdfs://127.0.0.1:99999/x", None, "Port out of range 0-65535; write hdfs://host:port/"),
        ("hdfs://:8020/x", None, "names no name node; write hdfs://host:port/folder"),
        ("hdfs://[::1/x", None, "Invalid IPv6 URL; check the address"),
        ("s3://[b/x", None, "Invalid IPv6 URL; check the address"),
        ("s3://b/x", "http://127.0.0.1:99999", "Port out of range 0-65535; check the options end"),
        ("s3://b/x", "http://127.0.0.1:abc", "as 'abc'; check the options endpoint_url and region"),
    ],
)
def test_addresses_that_cannot_be(root: str, endpoint: str | None, message: str) -> None:
    with pytest.raises(broker.InvalidOption, match=re.escape(message)) as refused:
        broker.open(root, storage={"endpoint_url": endpoint} if endpoint else None, create=False)
    assert root in str(refused.value) and "\n" not in str(refused.value)


def test_a_bucket_that_does_not_exist(s3_server: S3Server) -> None:
    line = refuse("s3://no-such-bucket/x", endpoint_of(s3_server))
    assert "there is no bucket 'no-such-bucket'; create it first" in line


def test_no_credentials(s3_server: S3Server) -> None:
    environment = {**NO_CREDENTIALS, "AWS_ENDPOINT_URL": s3_server.endpoint_url}
    assert "no credentials; set AWS_ACCESS_KEY_ID and" in refuse("s3://logs/x", environment)


def test_wrong_credentials(tmp_path: Path) -> None:
    with S3Server.start(tmp_path) as server:
        # From now on the server asks who it is.
        begin = urllib.request.Request(
            f"{server.endpoint_url}/moto-api/reset-auth",
            data=b"0",
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(begin).close()
        line = refuse("s3://logs/x", endpoint_of(server))
    assert "not allowed to write or read s3://logs/x" in line and "check the credentials" in line


def test_what_the_store_says_to_others_is_said_when_the_command_does_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings = Warnings()

    def warn(text: str, about: object) -> None:
        warnings.handle(logging.LogRecord("x", logging.WARNING, "", 0, text, (about,), None))

    for what in ("one", "one", "two"):
        warn("could not maintain clicks: %s", StoreUnavailable(what))
    assert capsys.readouterr().err == ""
    warn("topic %r was deleted", "clicks")
    assert capsys.readouterr().err == "topic 'clicks' was deleted\n"
    warnings.let_out()
    said = capsys.readouterr().err.splitlines()
    assert said == ["could not maintain clicks: one", "could not maintain clicks: two"]
