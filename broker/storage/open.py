"""From what a user calls the place to the storage that keeps it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from broker.config import STORAGE_OPTIONS, is_storage_option
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
_KINDS = {"hdfs": "hdfs", "s3": "s3", "s3a": "s3", "s3n": "s3", "memory": "memory"}
_ENVIRONMENT = "SPARK_LOG_STORAGE_"

# Those of one process that open the same place share its connections and what they have read.
_remote: dict[tuple[str, tuple[tuple[str, str], ...]], RemoteStorage] = {}
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: the lock may be held by a thread that is not here."""
    global _lock
    _lock = threading.Lock()
    _remote.clear()


os.register_at_fork(after_in_child=_begin_anew)


def open_storage(root: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> Storage:
    """Return the storage for a path or address; nothing is created or read yet.

    Args:
        options: of the store's driver: credentials, addresses. Those that are not given are taken
            from variables `SPARK_LOG_STORAGE_<NAME>`.
    """
    text = _check_root(root)
    try:
        path = _local_path(text)
    except ValueError as error:
        raise InvalidOption(f"cannot open {text}: {error}; check the address") from error
    if path is not None:
        for name in options or ():
            raise InvalidOption(f"storage option {name!r} is for hdfs:// and s3://, not for {text}")
        return LocalStorage(path)
    scheme = text.partition("://")[0].lower()
    kind = _KINDS.get(scheme)
    if kind is None:
        raise _unknown_store(scheme, text)
    given = _from_environment(kind) | _as_text(options or {})
    key = text, tuple(sorted(given.items()))
    with _lock:
        if key not in _remote:
            _remote[key] = RemoteStorage(_open_store(kind, text, given), options=given)
        return _remote[key]


def _local_path(root: str) -> str | None:
    if "://" not in root:
        scheme, separator, rest = root.partition(":")
        if not separator or scheme not in {*_KINDS, *_REFUSED, "file"}:
            return os.path.expanduser(root)
        if scheme != "file" or not rest.startswith("/"):  # Java writes file:/folder.
            raise InvalidOption(
                f"cannot open {root}: write {scheme}://{rest.lstrip('/')}, as text, or ./{root} "
                "for a local directory"
            )
        root = f"file://{rest}"
    for sign in "?#":  # What follows would be no part of the path.
        if sign in root:
            raise InvalidOption(
                f"cannot open {root}: {sign!r} cannot be in the address of a log; choose another"
            )
    address = urlsplit(root)
    is_local = address.scheme == "file" and address.netloc in ("", "localhost")
    return unquote(address.path) if is_local else None


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


def _as_text(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as variables and Spark would hand them over; None is not set."""
    if not isinstance(options, Mapping):
        raise InvalidOption(f"storage is {options!r}; give options by name, {{name: value}}")
    return {
        str(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }


def _open_store(kind: str, address: str, options: Mapping[str, str]) -> ObjectStore:
    if kind == "hdfs":
        try:
            from broker.storage.hdfs import HdfsStore
        except ImportError:
            raise _not_installed(address, "hdfs-native", "hdfs") from None
        return HdfsStore(address, options)
    if kind == "s3":
        try:
            from broker.storage.s3 import S3Store
        except ImportError:
            raise _not_installed(address, "s3fs", "s3") from None
        return S3Store(address, options)
    return MemoryStore(address, options)


def _unknown_store(scheme: str, address: str) -> InvalidOption:
    reason = f"{scheme}:// is not known"
    if scheme in _REFUSED:
        reason = f"{_REFUSED[scheme]} was not shown to be safe for a log"
    return InvalidOption(f"cannot open {address}: {reason}; use a local path, hdfs:// or s3://")


def _not_installed(address: str, package: str, extra: str) -> InvalidOption:
    return InvalidOption(
        f"cannot open {address}: the package {package} is not installed; "
        f"pip install 'spark-log[{extra}]'"
    )


def _from_environment(kind: str) -> dict[str, str]:
    """Return the options that variables give, but for those that only other stores have."""
    found = {
        name[len(_ENVIRONMENT) :].lower().replace("__", "."): value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT)
    }
    others = [other for other in STORAGE_OPTIONS if other != kind]
    return {
        name: value
        for name, value in found.items()
        if is_storage_option(kind, name)
        or not any(is_storage_option(other, name) for other in others)
    }
