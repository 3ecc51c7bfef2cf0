"""What stores answer that speak S3's protocol, each a little differently."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from broker.errors import AlreadyExists
from broker.storage import RemoteStorage
from broker.storage.s3 import S3Store


class Server(ThreadingHTTPServer):
    """A store of objects that honours If-None-Match and says so in as few words as allowed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.refusal = (412, "PreconditionFailed")
        self.conflicts = 0  # How many puts to come meet another one.


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        path = self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("If-None-Match") and self.server.conflicts:
            self.server.conflicts -= 1
            self.refuse(409, "ConditionalRequestConflict")
        elif self.headers.get("If-None-Match") and path in self.server.objects:
            self.refuse(*self.server.refusal)
        else:
            self.server.objects[path] = data
            self.answer(200, b"")

    def do_GET(self) -> None:
        data = self.server.objects.get(self.path.partition("?")[0])
        if data is None:
            self.refuse(404, "NoSuchKey")
        else:
            self.answer(200, data)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.path, None)
        self.answer(204, b"")

    def refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>" if code else ""
        self.answer(status, text.encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 15:00:00 GMT")
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        thread = threading.Thread(target=started.serve_forever)
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
    RemoteStorage(store, patience_seconds=3).check_is_safe()
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
