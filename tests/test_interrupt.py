"""Ctrl-C while a command waits for a store that is silent: real processes, signals, servers."""

from __future__ import annotations

import fcntl
import signal
import socket
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

import broker
from servers import S3Server

COMMAND = [sys.executable, "-m", "broker.cli"]
# What a command may take that is asked to end.
SOON_SECONDS = 7
# Less than it takes when it is asked once.
AT_ONCE_SECONDS = 3

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run a command until the test is over."""
    started = []

    def call(*arguments: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def root(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log on S3 with a topic of one record, as the environment of commands knows it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    address = f"{s3_server.address}/{uuid.uuid4().hex}"
    log = broker.open(address)
    log.create_topic("clicks")
    with log.producer() as producer:
        producer.send("clicks", b"first")
    return address


def interrupt(process: subprocess.Popen[bytes], *, again: bool) -> bytes:
    """Press Ctrl-C, perhaps again and again; return what the command says."""
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    # Two signals that come before the first is noticed are one.
    while again and process.poll() is None and time.monotonic() - begun < AT_ONCE_SECONDS:
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.wait(AT_ONCE_SECONDS if again else SOON_SECONDS) == 130
    assert time.monotonic() - begun < (AT_ONCE_SECONDS if again else SOON_SECONDS)
    assert process.stderr is not None
    return process.stderr.read()


def test_an_hdfs_that_takes_connections_only(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start("topic", "list", "--log", f"hdfs://127.0.0.1:{server.getsockname()[1]}/x")
        server.accept()[0].close()  # It looks whether there is anybody.
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1)  # It asks.
            assert interrupt(process, again=False) == b"spark-log: interrupted\n"


@pytest.mark.parametrize("again", [False, True])
def test_a_producer_whose_store_is_silent(
    start: Start, root: str, s3_server: S3Server, again: bool
) -> None:
    process = start("produce", "clicks", "--log", root)
    assert process.stdin is not None
    process.stdin.write(b"second\n")
    process.stdin.flush()
    with broker.open(root).consumer("clicks") as consumer:
        while consumer.position(broker.TopicPartition("clicks", 0)) < 2:
            consumer.poll(1000)
    with s3_server.silent():
        process.stdin.write(b"third\n")
        process.stdin.flush()
        while int.from_bytes(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)), sys.byteorder):
            time.sleep(0.01)
        said = interrupt(process, again=again).decode()
    assert said.count("\n") == 1 and said.startswith("spark-log: interrupted; 1 record written")
    assert again or said.endswith(", of 1 more it is not known\n")


@pytest.mark.parametrize("again", [False, True])
def test_a_member_of_a_group_whose_store_is_silent(
    start: Start, root: str, s3_server: S3Server, again: bool
) -> None:
    process = start(
        "consume", "clicks", "--log", root, "--group", "g", "--from-beginning", "--follow"
    )
    assert process.stdout is not None and process.stdout.readline() == b"first\n"
    with s3_server.silent():
        assert interrupt(process, again=again) == b"spark-log: interrupted\n"


# A command that takes longer after Ctrl-C than one that does nothing may.
SLOW = """
import signal, threading, time
from broker.cli import ending

ending._SECONDS = 1.5
asked = threading.Event()
signal.signal(signal.SIGINT, lambda *_: asked.set())
with ending.Ending() as one:
    {before}
    print("ready", flush=True)
    asked.wait()
    for _ in range(50):
        time.sleep(0.05)
        {meanwhile}
print("done")
"""


@pytest.mark.parametrize(
    ("before", "meanwhile", "code", "said"),
    [
        ("pass", "pass", 130, b""),
        ("pass", "one.prolong()", 0, b"done\n"),
        ("one.wait_for_batch()", "pass", 0, b"done\n"),
    ],
    ids=["does nothing", "gets further", "is a job of Spark"],
)
def test_a_command_goes_on_for_as_long_as(
    before: str, meanwhile: str, code: int, said: bytes
) -> None:
    script = SLOW.format(before=before, meanwhile=meanwhile)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == said
    assert process.returncode == code
