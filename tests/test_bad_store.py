"""What a person reads who names a store that is not there, or is not theirs: one line, soon."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path

import hdfs_native
import pytest

import broker
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


def test_a_folder_of_somebody_else(hdfs_cluster: HdfsCluster) -> None:
    client = hdfs_native.Client(hdfs_cluster.address, hdfs_cluster.client_options)
    folder = f"/{uuid.uuid4().hex}"
    client.mkdirs(folder, 0o700, True)
    root = f"{hdfs_cluster.address}{folder}/log"
    broker.open(root)
    line = refuse(root, {"HADOOP_USER_NAME": "stranger"})
    assert f"not allowed to write or read {root}/_log.json as stranger: " in line
    assert "check its owner, or set HADOOP_USER_NAME" in line


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
