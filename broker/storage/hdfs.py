"""HDFS through `hdfs-native`: the protocol itself, with no Java and no gateway.

Put-if-absent is a temporary file, closed, then renamed without overwriting: the name node does
that at once or not at all, and nobody sees a file in the making under its own name. The client
repeats a request whose connection broke, so our own success can come back as "exists": whoever
calls `put_new` compares what is there with what it put.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from xml.etree import ElementTree

import hdfs_native

from broker.config import HADOOP_PREFIXES, parse_storage_options
from broker.errors import AlreadyExists, InvalidOption, StorageError, StoreUnavailable
from broker.storage.hdfs_errors import translate
from broker.storage.hedge import Hedge
from broker.storage.reach import check_reachable
from broker.storage.store import Entry
from broker.storage.temporary import TEMPORARY
from broker.workers import Workers

Answer = TypeVar("Answer")

# A write goes on with the datanodes that are left, instead of failing because there is no other
# to take the place of a dead one.
_DEFAULTS = {
    "dfs.client.block.write.replace-datanode-on-failure.enable": "false",
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
}
# Until the name node knows that a datanode is dead, it may hand it out again.
_WRITE_SECONDS = 30.0
# A name node that was stopped, or whose machine is gone, does not even close connections.
_ANSWER_SECONDS = 60.0
# What has never answered may be something else: the client would ask it for three minutes.
_FIRST_ANSWER_SECONDS = 20.0
_REQUESTS_AT_ONCE = 64
_WRITE_PAUSE_SECONDS = 1.0
_BLOCK_BYTES = 4 << 20
# When a file is closed before a datanode has told the name node of its end, which happens to one in
# a hundred, and to more under load, the client sleeps for half a second. So what is small is
# written a second time when it takes too long.
_SMALL_BYTES_MAX = 1 << 20
# Where Hadoop's name nodes listen unless told otherwise.
_PORT = 8020
# What nobody on the way writes in another way: `deltalake` does so with spaces and umlauts.
_FOLDER = re.compile(r"[A-Za-z0-9/._=+@:,-]*")
_KERBEROS = ("kerberos_cache", "kerberos_keytab", "kerberos_principal")


class HdfsStore:
    """One folder of an HDFS.

    Args:
        address: `hdfs://host:port/folder`, where the port may be left out if it is 8020, or
            `hdfs://nameservice/folder` with Hadoop's own configuration in `HADOOP_CONF_DIR`.
        options: those of `STORAGE_OPTIONS`, and Hadoop's own settings of a client.
    """

    is_known = True

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(address)
        if not parts.hostname:
            raise InvalidOption(
                f"{address} names no name node; write hdfs://host:port/folder of your HDFS"
            )
        if parts.username is not None:
            raise InvalidOption(f"{address} names a user; give it by the option storage.user")
        if not _FOLDER.fullmatch(unquote(parts.path)):
            raise InvalidOption(
                f"{address}: on HDFS only letters a to z, digits and . _ - = + @ : , may be in the "
                "folder of a log, since the names of its Delta tables would be others; rename it"
            )
        given = parse_storage_options("hdfs", options)
        self.poll_seconds = given["poll.ms"] / 1000
        self._folder = unquote(parts.path).rstrip("/")
        if given["user"] is not None:
            _be(given["user"])
        self._settings = _DEFAULTS | {
            name: text for name, text in given.items() if name.startswith(HADOOP_PREFIXES)
        }
        self._credentials = {name: given[name] for name in _KERBEROS}
        self._server = f"hdfs://{_name_node(parts, self._settings)}"
        self.root = f"{self._server}{self._folder}"
        self._clients: dict[int, _Client] = {}
        self._lock = threading.Lock()
        self._hedge: Hedge[str] = Hedge("spark-log-hdfs")
        self._asking = Workers(_REQUESTS_AT_ONCE, "spark-log-hdfs")

    def locate(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def get(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        def read(client: hdfs_native.Client) -> bytes:
            reader = client.read(self._path(path))
            size = len(reader)
            count = size - start if length is None else min(length, size - start)
            return bytes(reader.read_range(start, count)) if count > 0 else b""

        try:
            return self._ask(path, read)
        except FileNotFoundError:
            return None

    def put_new(self, path: str, data: bytes) -> None:
        self._rename(self._write_data(path, data), path, overwrite=False)

    def put(self, path: str, data: bytes) -> None:
        self._rename(self._write_data(path, data), path, overwrite=True)

    def put_file(self, path: str, file: BinaryIO) -> None:
        def write(to: str) -> None:
            # Not given up while it goes on: two attempts would read from one file.
            with self._translated(path):
                _write(self._client().native, to, _blocks(file))

        self._rename(self._write_aside(path, write), path, overwrite=False)

    def stat(self, path: str) -> Entry | None:
        try:
            status = self._ask(path, lambda client: client.get_file_info(self._path(path)))
        except FileNotFoundError:
            return None
        return _entry(status)

    def entries(self, path: str) -> list[Entry]:
        try:
            found = self._ask(path, lambda client: list(client.list_status(self._path(path))))
        except FileNotFoundError:
            return []
        return [_entry(status) for status in found]

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(path, lambda client: client.delete(self._path(path), recursive=False))

    def delete_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(path, lambda client: client.delete(self._path(path), recursive=True))

    def rename(self, path: str, to: str) -> None:
        def move(client: hdfs_native.Client) -> None:
            client.mkdirs(os.path.dirname(self._path(to)), 0o755, create_parent=True)
            client.rename(self._path(path), self._path(to), overwrite=False)

        self._ask(path, move)

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        """There are none: what is not finished is listed."""

    def begin_anew(self) -> None:
        self._lock = threading.Lock()

    def delta_options(self) -> dict[str, str]:
        return dict(self._settings)

    def translate(self, error: Exception, path: str) -> StorageError:
        return translate(error, self.locate(path))

    def close(self) -> None:
        self._clients.clear()

    def _rename(self, temporary: str, path: str, *, overwrite: bool) -> None:
        try:
            self._ask(
                path, lambda client: client.rename(temporary, self._path(path), overwrite=overwrite)
            )
        except FileExistsError:
            self._delete_quietly(temporary)
            raise AlreadyExists(f"{self.locate(path)} exists already") from None
        except FileNotFoundError:
            # The rename was carried out and its answer lost: the client asked a second time.
            raise StoreUnavailable(f"{self.locate(path)}: the rename was asked for twice") from None
        except StoreUnavailable:
            raise
        except StorageError as error:
            # What it refuses may be a second asking by the client; what is still there was not
            # renamed by the first.
            if not self._delete_quietly(temporary):
                raise StoreUnavailable(str(error)) from error
            raise

    def _write_data(self, path: str, data: bytes) -> str:
        """Write a temporary file; a second one if the first takes too long."""

        def write(to: str) -> None:
            self._ask(path, lambda client: _write(client, to, [data]))

        def write_aside() -> str:
            return self._write_aside(path, write)

        if len(data) > _SMALL_BYTES_MAX:
            return write_aside()
        self._client()  # Here, where it refuses a forked child, which has no threads.
        return self._hedge.first(write_aside, self._delete_quietly)

    def _write_aside(self, path: str, write: Callable[[str], None]) -> str:
        """Write a temporary file; another one if a datanode died under the first."""
        deadline = time.monotonic() + _WRITE_SECONDS
        while True:
            temporary = self._temporary(path)
            try:
                write(temporary)
                return temporary
            except (StoreUnavailable, FileExistsError, FileNotFoundError) as error:
                # A name that was asked for twice, or a folder that was removed meanwhile.
                self._asking.submit(self._delete_quietly, temporary)
                if time.monotonic() > deadline:
                    raise translate(error, self.locate(path)) from error
                time.sleep(_WRITE_PAUSE_SECONDS)

    def _ask(self, path: str, request: Callable[[hdfs_native.Client], Answer]) -> Answer:
        """Return the answer to a request, which the client itself would wait for without end."""
        client = self._client()
        is_first = self._has_port and not client.has_answered
        seconds = _FIRST_ANSWER_SECONDS if is_first else _ANSWER_SECONDS
        with self._translated(path):
            try:
                answer = self._asking.submit(request, client.native).result(seconds)
            except TimeoutError:
                if is_first:
                    raise StorageError(
                        f"{self.locate(path)}: what answers there is no name node; check that this "
                        "is the port of its RPC, which is 8020 or 9000 as a rule"
                    ) from None
                raise StoreUnavailable(
                    f"{self.locate(path)}: HDFS has not answered for {seconds:.0f} s"
                ) from None
            except (FileExistsError, FileNotFoundError):
                client.has_answered = True
                raise
            client.has_answered = True
            return answer

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError, StorageError):
            raise
        except (OSError, RuntimeError) as error:
            raise translate(error, self.locate(path)) from error

    def _client(self) -> _Client:
        """Return this process's client: its threads do not survive a fork."""
        process_id = os.getpid()
        client = self._clients.get(process_id)
        if client is None:
            with self._lock:
                client = self._clients.get(process_id)
                if client is None:
                    _Client.check_not_forked(self.root)
                    self._check_reachable()
                    try:
                        client = _Client(
                            hdfs_native.Client(self._server, self._settings, **self._credentials)
                        )
                    except (OSError, RuntimeError, ValueError) as error:
                        raise translate(error, self.root) from error
                    self._clients = {process_id: client}
        return client

    def _check_reachable(self) -> None:
        """Say at once what the client would say after minutes: that there is no such name node."""
        parts = urlsplit(self._server)
        if parts.port is not None:
            check_reachable(self.root, parts.hostname, parts.port, "name node")

    @property
    def _has_port(self) -> bool:
        """Whether this is one name node, not a service whose nodes Hadoop's configuration knows."""
        return urlsplit(self._server).port is not None

    def _path(self, path: str) -> str:
        return f"{self._folder}/{path}" if path else self._folder or "/"

    def _temporary(self, path: str) -> str:
        folder = os.path.dirname(self._path(path))
        return f"{folder}/{TEMPORARY}{uuid.uuid4().hex}"

    def _delete_quietly(self, full_path: str) -> bool:
        """Remove a file; tell whether it was there and is gone."""
        with contextlib.suppress(OSError, RuntimeError, StorageError):
            return bool(self._client().native.delete(full_path, recursive=False))
        return False


class _Client:
    """The driver's client. Its threads are not in a forked child, which would wait for them.

    So the child never lets go of a client that it inherited, and gets no new one either: the
    driver keeps connections for the whole process, and those of the parent do not answer there.
    """

    _alive: ClassVar[weakref.WeakSet[_Client]] = weakref.WeakSet()
    _held: ClassVar[list[list[_Client]]] = []  # One list for each thread that forks.

    _process_id: ClassVar[int | None] = None  # Whose threads the driver has.

    def __init__(self, native: hdfs_native.Client) -> None:
        self.native = native
        self.has_answered = False
        self._alive.add(self)
        _Client._process_id = os.getpid()

    @classmethod
    def check_not_forked(cls, root: str) -> None:
        if cls._process_id not in (None, os.getpid()):
            raise StorageError(
                f"{root} cannot be used here: this process was forked from one that used HDFS; "
                "start it anew instead, as multiprocessing does with the method 'spawn'"
            )

    @classmethod
    def hold_all(cls) -> None:
        cls._held.append(list(cls._alive))

    @classmethod
    def release_all(cls) -> None:
        cls._held.pop()


# The child does not release them.
os.register_at_fork(before=_Client.hold_all, after_in_parent=_Client.release_all)


_user_given: str | None = None


def _be(user: str) -> None:
    """Let this process be this user. The driver knows one for all of its connections."""
    global _user_given
    if _user_given not in (None, user):
        raise InvalidOption(
            f"storage option user={user!r}: this process is {_user_given!r} on HDFS already; use "
            "another process"
        )
    _user_given = os.environ["HADOOP_USER_NAME"] = user


def _let_go(writer: Any) -> None:
    """Forget a writer that failed, elsewhere: the client completes its file, which may take long.

    What it leaves under its temporary name is nobody's.
    """
    held = [writer]
    threading.Thread(target=held.clear, name="spark-log-hdfs", daemon=True).start()


def _name_node(parts: SplitResult, settings: Mapping[str, str]) -> str:
    """Return `host:port`, or a name whose name nodes Hadoop's own configuration knows.

    For any other name without a port the client would look for a minute, and find nothing.
    """
    try:
        has_port = parts.port is not None
    except ValueError as error:
        raise InvalidOption(f"{parts.geturl()}: {error}; write hdfs://host:port/folder") from None
    name_nodes = f"dfs.ha.namenodes.{parts.netloc}"
    if has_port or name_nodes in settings or name_nodes in _configured():
        return parts.netloc
    return f"{parts.netloc}:{_PORT}"


def _configured() -> set[str]:
    """Return the names of what is set where the client looks for Hadoop's own configuration."""
    home = os.environ.get("HADOOP_HOME")
    folder = os.environ.get("HADOOP_CONF_DIR") or (f"{home}/etc/hadoop" if home else None)
    names: set[str] = set()
    for file in ("core-site.xml", "hdfs-site.xml") if folder else ():
        try:
            root = ElementTree.parse(f"{folder}/{file}").getroot()
        except FileNotFoundError:
            continue
        except (OSError, ElementTree.ParseError) as error:
            raise InvalidOption(f"{folder}/{file} cannot be read: {error}") from error
        names.update((one.findtext("name") or "").strip() for one in root.iter("property"))
    return names


def _new_file() -> hdfs_native.WriteOptions:
    return hdfs_native.WriteOptions(overwrite=False, create_parent=True)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield bytes: any other buffer the driver takes apart one by one, twenty times as slow."""
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        yield block


def _write(client: hdfs_native.Client, path: str, blocks: Iterable[bytes]) -> None:
    writer = client.create(path, _new_file())
    try:
        for block in blocks:
            writer.write(block)
        writer.close()
    except BaseException as error:
        _let_go(writer)
        # The error must not hold it: a child forked meanwhile would wait for it without end.
        del writer
        error.__traceback__ = None
        raise


def _entry(status: Any) -> Entry:
    name = status.path.rstrip("/").rpartition("/")[2]
    return Entry(name, status.length, status.modification_time, status.isdir)
