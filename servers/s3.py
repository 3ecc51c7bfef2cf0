"""A real S3 server on this machine: moto's, in a process of its own, with one bucket.

It keeps everything in memory and honours conditional puts (If-None-Match). Nothing outlives the
process that started it.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

from servers.children import Children, free_port, stopped, wait_until

HOST = "127.0.0.1"
PATIENCE_SECONDS = 60


class S3Server:
    """A running S3. Made by `start`; a `with` statement stops it."""

    key, secret, region = "test-key", "test-secret", "us-east-1"

    def __init__(self, directory: Path, bucket: str) -> None:
        """Use `start`: this does not wait until the server answers."""
        self.bucket = bucket
        self.port = free_port()
        self._children = Children()
        self._log = directory / "s3.log"
        command = [sys.executable, "-m", "moto.server", "--host", HOST, "--port", str(self.port)]
        self._process = self._children.start(command, self._log)

    @classmethod
    def start(cls, directory: str | Path, bucket: str = "logs") -> S3Server:
        """Start a new, empty S3 with one bucket, and wait until it answers.

        Raises:
            ServerError: it did not start.
        """
        server = cls(Path(directory), bucket)
        try:
            what = f"the S3 server at {server.endpoint_url}"
            wait_until(server._make_bucket, what, PATIENCE_SECONDS, {server._log: server._process})
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def address(self) -> str:
        """The bucket's URL, as `s3://bucket`."""
        return f"s3://{self.bucket}"

    @property
    def client_options(self) -> dict[str, str]:
        """Settings for a client, `s3fs.S3FileSystem(**client_options)`."""
        return {"endpoint_url": self.endpoint_url, "key": self.key, "secret": self.secret}

    def requests(self) -> list[str]:
        """Return what it was asked so far: method and path of each request."""
        return re.findall(r'"(?:\x1b\[[\d;]*m)*([A-Z]+ \S+) HTTP/', self._log.read_text())

    def silent(self) -> AbstractContextManager[None]:
        """Let it take connections and answer nothing, while inside."""
        return stopped(self._process)

    def stop(self) -> None:
        """Kill it. All it stored is gone."""
        self._children.end()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_bucket(self) -> bool:
        request = urllib.request.Request(f"{self.endpoint_url}/{self.bucket}", method="PUT")
        # A proxy of the environment knows nothing of this machine's own ports.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10):
                return True
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
