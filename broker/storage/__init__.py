"""Bytes on local disk: the only package that touches files."""

from broker.storage.local import AppendFile, FileLock, LocalStorage
from broker.storage.open import open_storage
from broker.storage.watch import Watch

__all__ = ["AppendFile", "FileLock", "LocalStorage", "Watch", "open_storage"]
