"""From what a user calls the place to the storage that keeps it."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from broker.errors import InvalidOption
from broker.storage.local import LocalStorage


def open_storage(root: str | os.PathLike[str]) -> LocalStorage:
    """Return the storage for a path or address; nothing is created or read yet."""
    text = os.fspath(root)
    if not text:
        raise InvalidOption("the log's path is empty; give a directory")
    if "://" not in text:
        return LocalStorage(os.path.expanduser(text))
    address = urlsplit(text)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return LocalStorage(unquote(address.path))
    raise InvalidOption(
        f"cannot open {text}: only local paths and file:// addresses are understood"
    )
