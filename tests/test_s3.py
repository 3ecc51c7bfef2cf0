"""What stores answer that speak S3's protocol, each a little differently."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import broker
from broker.errors import AlreadyExists, OutcomeUnknown, StorageError, StoreUnavailable
from broker.storage import RemoteStorage, s3
from broker.storage.s3 import S3Store


class Server(ThreadingHTTPServer):
    """A store of objects that honours If-None-Match and says so in as few words as allowed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.refusal = (412, "PreconditionFailed")
        self.conflicts = 0  # How many puts to come meet another one.
        self.uploads: dict[str, datetime] = {}  # When each was begun.
        self.is_careless = False  # Whether it creates an object twice.
        # What it says to every request instead of an answer.
        self.complaint: tuple[int, str] | None = None
        self.complaint_count = -1  # To how many; less than none: to all.
        # How many puts to come are carried out and not answered; then credentials expire.
        self.lost = 0
        self.kept: set[str] = set()  # What it does not let go of when all of a folder is removed.
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        path = self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked += 1
        assert "Expect" not in self.headers, "the driver waits without end for what that asks for"
        if self.server.complaint:
            self.complain(*self.server.complaint)
        elif self.server.lost:
            self.server.objects.setdefault(path, data)
            self.server.lost -= 1
            self.close_connection = True
            if not self.server.lost:
                self.server.complaint = 403, "ExpiredToken"
        elif self.headers.get("If-None-Match") and self.server.conflicts:
            self.server.conflicts -= 1
            self.refuse(409, "ConditionalRequestConflict")
        elif (
            self.headers.get("If-None-Match")
            and path in self.server.objects
            and not self.server.is_careless
        ):
            self.refuse(*self.server.refusal)
        else:
            self.server.objects[path] = data
            self.answer(200, b"")

    def do_GET(self) -> None:
        data = self.server.objects.get(self.path.partition("?")[0])
        self.server.asked += 1
        if self.server.complaint:
            self.complain(*self.server.complaint)
        elif "uploads" in self.path:
            self.list_uploads()
        elif "list-type=2" in self.path:
            self.list_objects()
        elif data is None:
            self.refuse(404, "NoSuchKey")
        else:
            self.answer(200, data)

    do_HEAD = do_GET

    def list_objects(self) -> None:
        """Say the name of one: there may be more than one answer holds."""
        query = parse_qs(urlsplit(self.path).query)
        last = query.get("continuation-token", [""])[0]
        keys = [name.removeprefix("/bucket/") for name in sorted(self.server.objects)]
        keys = [key for key in keys if key > last and key.startswith(query["prefix"][0])]
        text = f"<IsTruncated>{str(len(keys) > 1).lower()}</IsTruncated>"
        for key in keys[:1]:
            text += (
                f"<NextContinuationToken>{key}</NextContinuationToken>"
                f"<Contents><Key>{key}</Key><Size>1</Size>"
                "<LastModified>2026-11-18T15:00:00Z</LastModified></Contents>"
            )
        self.answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        """Remove the objects that the request names."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        text = ""
        for key in re.findall("<Key>(.*?)</Key>", data.decode()):
            if key in self.server.kept:
                text += f"<Error><Key>{key}</Key><Code>AccessDenied</Code></Error>"
            else:
                self.server.objects.pop(f"/bucket/{key}", None)
        self.answer(200, f"<DeleteResult>{text}</DeleteResult>".encode())

    def list_uploads(self) -> None:
        """One for each request: there may be more than one answer holds."""
        query = parse_qs(urlsplit(self.path).query)
        last = query.get("upload-id-marker", [""])[0]
        names = [name for name in sorted(self.server.uploads) if name > last]
        text = f"<IsTruncated>{str(len(names) > 1).lower()}</IsTruncated>"
        for name in names[:1]:
            begun = self.server.uploads[name].isoformat()
            text += (
                f"<NextKeyMarker>log/t/a</NextKeyMarker>"
                f"<NextUploadIdMarker>{name}</NextUploadIdMarker>"
                f"<Upload><Key>log/t/a</Key><UploadId>{name}</UploadId>"
                f"<Initiated>{begun}</Initiated></Upload>"
            )
        self.answer(
            200, f"<ListMultipartUploadsResult>{text}</ListMultipartUploadsResult>".encode()
        )

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.path, None)
        self.server.uploads.pop(self.path.rpartition("uploadId=")[2], None)
        self.answer(204, b"")

    def complain(self, status: int, code: str) -> None:
        self.server.complaint_count -= 1
        if not self.server.complaint_count:
            self.server.complaint = None
        self.refuse(status, code)

    def refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>" if code else ""
        self.answer(status, text.encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 15:00:00 GMT")
        self.send_header("ETag", '"x"')
        self.send_header("x-amz-bucket-region", "us-east-1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.02,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def store(server: Server) -> S3Store:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    options = {"endpoint_url": endpoint, "key": "a", "secret": "b", "region": "us-east-1"}
    return S3Store("s3://bucket/log", options)


@pytest.mark.parametrize("refusal", [(412, "PreconditionFailed"), (412, "")])
def test_a_taken_name_is_known_by_the_code_alone(
    store: S3Store, server: Server, refusal: tuple[int, str]
) -> None:
    server.refusal = refusal
    RemoteStorage(store, patience_seconds=3).create("probing", b"")
    store.put_new("a", b"first")
    with pytest.raises(AlreadyExists):
        store.put_new("a", b"second")
    assert store.get("a") == b"first"


def test_of_puts_that_meet_the_outcome_is_asked_for(store: S3Store, server: Server) -> None:
    storage = RemoteStorage(store, patience_seconds=10)
    server.conflicts = 2
    storage.create("a", b"mine")
    assert (storage.read("a"), server.conflicts) == (b"mine", 0)
    server.conflicts = 1
    with pytest.raises(AlreadyExists):
        storage.create("a", b"another's")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "not allowed to write or read s3://bucket/log/a: .*credentials"),
        (400, "ExpiredToken", "not allowed to write or read s3://bucket/log/a: .*credentials"),
        (400, "InvalidToken", "not allowed to write or read s3://bucket/log/a: .*credentials"),
        (400, "AuthorizationHeaderMalformed", "s3://bucket/log/a: the store refuses .*the region"),
        (400, "InvalidBucketName", "s3://bucket/log/a: the store refuses .*check the bucket"),
        (501, "NotImplemented", "s3://bucket/log/a: the store refuses .*the endpoint"),
    ],
)
def test_what_a_store_refuses_is_said_at_once(
    store: S3Store, server: Server, status: int, code: str, message: str
) -> None:
    storage = RemoteStorage(store, patience_seconds=60)
    server.complaint = (status, code)
    begun = time.monotonic()
    for call in (lambda: storage.read("a"), lambda: storage.overwrite("a", b"x")):
        with pytest.raises(StorageError, match=message) as refused:
            call()
        assert not isinstance(refused.value, StoreUnavailable)
        assert "\n" not in str(refused.value)
    assert server.asked == 2
    assert time.monotonic() - begun < 10


def test_a_bucket_that_is_elsewhere_is_looked_for_by_the_driver_only(
    store: S3Store, server: Server
) -> None:
    storage = RemoteStorage(store, patience_seconds=60)
    server.complaint = (301, "PermanentRedirect")
    with pytest.raises(StorageError, match="the store refuses .*check .* the region") as refused:
        storage.read("a")
    assert not isinstance(refused.value, StoreUnavailable)
    assert server.asked == 2  # Also where it was told that the bucket is.


@pytest.mark.parametrize(
    "complaint",
    [
        (503, "SlowDown"),
        (500, ""),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
        (400, "KMS.ThrottlingException"),
        (400, "BadDigest"),
    ],
)
def test_a_store_that_asks_for_patience_is_asked_again(
    store: S3Store, server: Server, complaint: tuple[int, str]
) -> None:
    storage = RemoteStorage(store, patience_seconds=30)
    server.objects["/bucket/log/a"] = b"here"
    server.complaint, server.complaint_count = complaint, 3
    assert storage.read("a") == b"here"
    assert server.asked == 4


def test_a_refusal_after_a_lost_answer_leaves_the_outcome_unknown(
    store: S3Store, server: Server
) -> None:
    """The first try was carried out; what the second one was told says nothing of it."""
    storage = RemoteStorage(store, patience_seconds=10)
    storage.create("a", b"first")
    server.lost = 1
    with pytest.raises(OutcomeUnknown, match="not known whether .*/b was written"):
        storage.create("b", b"mine")
    assert server.objects["/bucket/log/b"] == b"mine"
    with pytest.raises(StorageError, match="not allowed") as refused:
        storage.create("c", b"mine")
    assert not isinstance(refused.value, OutcomeUnknown)


def test_a_put_on_a_connection_that_is_cut_is_not_sent_again_by_the_driver(
    store: S3Store, server: Server
) -> None:
    """What the second one is told would be taken for what became of the first."""
    storage = RemoteStorage(store, patience_seconds=0)
    storage.create("a", b"over a connection that is kept")
    asked, server.lost = server.asked, 1
    with pytest.raises(OutcomeUnknown, match="the store does not answer"):
        storage.create("b", b"mine")
    assert server.objects["/bucket/log/b"] == b"mine"
    assert server.asked == asked + 1


def test_a_store_that_does_not_take_what_is_put_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "_REQUEST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": place, "key": "a", "secret": "b", "region": "us-east-1"}
        begun = time.monotonic()
        for size in (100, 10_000_000):  # All of the larger one fits into nobody's buffer.
            with pytest.raises(StoreUnavailable):
                S3Store("s3://bucket/log", options).put_new("a", b"x" * size)
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("by", ["token", "process"])
def test_a_missing_file_of_this_machine_is_not_taken_for_an_absent_object(
    by: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {missing}\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    if by == "process":
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    else:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(missing))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    endpoint = f"http://127.0.0.1:{server.server_port}"
    store = S3Store("s3://bucket/log", {"endpoint_url": endpoint, "region": "us-east-1"})
    server.objects["/bucket/log/a"] = b"here"
    calls: list[Callable[[str], object]] = [store.get, store.stat, store.entries, store.delete_tree]
    for call in (*calls, store.delete):
        with pytest.raises(StorageError, match=f"No such file .*{missing}") as failed:
            call("a")
        assert not isinstance(failed.value, StoreUnavailable)
    assert server.asked == 0


@pytest.mark.parametrize("by", ["option", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"])
def test_a_store_that_is_not_amazons_is_tried_however_it_is_named(
    by: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    options = {"key": "a", "secret": "b", "region": "us-east-1"}
    if by == "option":
        options["endpoint_url"] = endpoint
    elif by == "profile":
        (tmp_path / "config").write_text(f"[profile mine]\nendpoint_url = {endpoint}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        options = {"profile": "mine", **options}
    else:
        monkeypatch.setenv(by, endpoint)
    store = S3Store("s3://bucket/log", options)
    assert not store.is_known
    assert store.delta_options()["AWS_ENDPOINT_URL"] == endpoint
    server.is_careless = True
    with pytest.raises(broker.InvalidOption, match="created twice, so records would be lost"):
        RemoteStorage(store).create("a", b"first")
    assert server.objects == {}
    server.is_careless = False
    RemoteStorage(store).create("a", b"first")
    assert server.objects == {"/bucket/log/a": b"first"}


def test_amazons_own_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    options = {"key": "a", "secret": "b", "region": "eu-central-1"}
    store = S3Store("s3://bucket/log", options)
    assert store.is_known
    assert "AWS_ENDPOINT_URL" not in store.delta_options()


def test_only_uploads_that_are_old_are_aborted(store: S3Store, server: Server) -> None:
    now = datetime.now(UTC)
    days = {"a": 30, "b": 0, "c": 8, "d": 6}
    server.uploads = {name: now - timedelta(days=count) for name, count in days.items()}
    RemoteStorage(store).abort_uploads("t", 7 * 86_400_000)
    assert sorted(server.uploads) == ["b", "d"]


def test_whoever_may_not_list_uploads_may_maintain(store: S3Store, server: Server) -> None:
    server.complaint = 403, "AccessDenied"
    RemoteStorage(store).abort_uploads("t", 7 * 86_400_000)
    assert server.asked == 1


def test_a_folder_of_more_objects_than_one_answer_holds_is_removed(
    store: S3Store, server: Server
) -> None:
    for name in ("t/a", "t/b/c", "tt/a"):
        store.put(name, b"x")
    store.delete_tree("t")
    assert list(server.objects) == ["/bucket/log/tt/a"]


def test_a_folder_of_which_the_store_keeps_an_object_is_not_said_to_be_removed(
    store: S3Store, server: Server
) -> None:
    for name in ("t/a", "t/b", "t/c"):
        store.put(name, b"x")
    server.kept = {"log/t/b"}
    with pytest.raises(StorageError, match="not allowed to write or read s3://bucket/log/t/b"):
        store.delete_tree("t")
