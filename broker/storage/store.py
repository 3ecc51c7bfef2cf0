"""What a store of whole objects must do, so that a log can live on it.

One class for each store (`hdfs`, `s3`, `memory`). Paths are relative to the store's root. What all
of them promise: `put_new` never replaces anything, whoever else puts at the same time, and an
object is never seen in part. Errors: `AlreadyExists`; `StoreUnavailable` if the store did not
answer, so that the request may or may not have been carried out; `StorageError` if it said no.
"""

from __future__ import annotations

from typing import BinaryIO, NamedTuple, Protocol

from broker.errors import StorageError


class Entry(NamedTuple):
    """One name in a folder. `changed_ms` is by the store's own clock; a folder may have none."""

    name: str
    size: int
    changed_ms: int
    is_folder: bool


class ObjectStore(Protocol):
    """The requests that a remote log is made of."""

    root: str
    # How often somebody who waits asks again, in seconds.
    poll_seconds: float

    @property
    def is_known(self) -> bool:
        """Whether its put-if-absent is known to be one; others are tried first."""

    def locate(self, path: str) -> str:
        """Return the whole address, for people and for other libraries."""

    def get(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return an object's bytes, or a range of them; None if it is absent."""

    def put_new(self, path: str, data: bytes) -> None:
        """Put an object where none is; `AlreadyExists` if one is."""

    def put(self, path: str, data: bytes) -> None:
        """Put an object, replacing what is there."""

    def put_file(self, path: str, file: BinaryIO) -> None:
        """Put all of a local file, under a name that nobody else makes.

        May be asked again, then from the file's beginning.
        """

    def stat(self, path: str) -> Entry | None:
        """Return what is known of an object; None if it is absent."""

    def entries(self, path: str) -> list[Entry]:
        """Return what a folder holds; nothing if it is absent."""

    def delete(self, path: str) -> None:
        """Remove an object; that it is gone already is fine."""

    def delete_tree(self, path: str) -> None:
        """Remove a folder and all in it; that it is gone already is fine."""

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        """Let go of parts of files in a folder that were begun so long ago and never finished.

        Only for what no listing shows.
        """

    def begin_anew(self) -> None:
        """In a forked child: a lock may be held by a thread that is not here."""

    def delta_options(self) -> dict[str, str]:
        """Return what the library `deltalake` needs to know to get here."""

    def translate(self, error: Exception, path: str) -> StorageError:
        """Turn the driver's error into ours: what, where, and what to do."""

    def close(self) -> None:
        """Let go of connections."""
