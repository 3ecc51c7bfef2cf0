"""Bytes on a local disk, HDFS or an object store: the only package that touches files."""

from broker.storage.append_file import AppendFile
from broker.storage.local import LocalStorage
from broker.storage.locks import FileLock, LeaseLock
from broker.storage.open import Storage, environment, open_storage
from broker.storage.pieces import PieceFile, RangeFile
from broker.storage.remote import RemoteStorage
from broker.storage.watch import Watch

File = AppendFile | PieceFile | RangeFile
GrowingFile = AppendFile | PieceFile

__all__ = [
    "AppendFile",
    "File",
    "FileLock",
    "GrowingFile",
    "LeaseLock",
    "LocalStorage",
    "PieceFile",
    "RangeFile",
    "RemoteStorage",
    "Storage",
    "Watch",
    "environment",
    "open_storage",
]
