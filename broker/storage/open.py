"""From what a user calls the place to the storage that keeps it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from broker.errors import InvalidOption
from broker.storage.local import LocalStorage
from broker.storage.memory import MemoryStore
from broker.storage.remote import RemoteStorage
from broker.storage.store import ObjectStore

Storage = LocalStorage | RemoteStorage

# Drivers whose conditional put was read in their source but never seen at work are not trusted.
_REFUSED = {
    "gs": "Google Cloud Storage",
    "gcs": "Google Cloud Storage",
    "abfs": "Azure",
    "abfss": "Azure",
    "az": "Azure",
    "webhdfs": "WebHDFS (its create always overwrites)",
}
_ENVIRONMENT = "SPARK_LOG_STORAGE_"

# Those of one process that open the same place share its connections and what they have read.
_remote: dict[tuple[str, tuple[tuple[str, str], ...]], RemoteStorage] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_remote.clear)


def open_storage(root: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> Storage:
    """Return the storage for a path or address; nothing is created or read yet.

    Args:
        options: of the store's driver: credentials, addresses. Those that are not given are taken
            from variables `SPARK_LOG_STORAGE_<NAME>`.
    """
    text = _check_root(root)
    given = _from_environment() | dict(options or {})
    if "://" not in text:
        return LocalStorage(os.path.expanduser(text))
    address = urlsplit(text)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return LocalStorage(unquote(address.path))
    key = text, tuple(sorted(given.items()))
    with _lock:
        if key not in _remote:
            _remote[key] = RemoteStorage(_open_store(address.scheme, text, given), options=given)
        return _remote[key]


def _check_root(root: Any) -> str:
    text = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(text, str):
        raise InvalidOption(f"the log's path is {root!r}; give text or a pathlib.Path")
    if not text:
        raise InvalidOption("the log's path is empty; give a directory")
    if "\0" in text:
        raise InvalidOption(f"the log's path {text!r} has a character NUL; give a directory")
    return text


def environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hand options over to another process."""
    return {
        _ENVIRONMENT + name.upper().replace(".", "__"): value for name, value in options.items()
    }


def _open_store(scheme: str, address: str, options: Mapping[str, str]) -> ObjectStore:
    if scheme == "hdfs":
        try:
            from broker.storage.hdfs import HdfsStore
        except ImportError:
            raise _not_installed(address, "hdfs-native", "hdfs") from None
        return HdfsStore(address, options)
    if scheme in ("s3", "s3a", "s3n"):
        try:
            from broker.storage.s3 import S3Store
        except ImportError:
            raise _not_installed(address, "s3fs", "s3") from None
        return S3Store(address, options)
    if scheme == "memory":
        return MemoryStore(address)
    if scheme in _REFUSED:
        raise InvalidOption(
            f"cannot open {address}: {_REFUSED[scheme]} was not shown to be safe for a log; "
            "use a local path, hdfs:// or s3://"
        )
    raise InvalidOption(
        f"cannot open {address}: {scheme}:// is not known; use a local path, hdfs:// or s3://"
    )


def _not_installed(address: str, package: str, extra: str) -> InvalidOption:
    return InvalidOption(
        f"cannot open {address}: the package {package} is not installed; "
        f"pip install 'spark-log[{extra}]'"
    )


def _from_environment() -> dict[str, str]:
    return {
        name[len(_ENVIRONMENT) :].lower().replace("__", "."): value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT)
    }
