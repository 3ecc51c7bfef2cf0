"""Is there anybody at an address? Said at once, where a driver would ask for minutes."""

from __future__ import annotations

import socket

from broker.errors import StorageError

_SECONDS = 5.0


def check_reachable(root: str, host: str | None, port: int, what: str) -> None:
    """Raise a `StorageError`, not worth asking again, if nobody listens there.

    Args:
        root: the log's address, for the message.
        host: name or address of the server.
        port: where it should listen.
        what: what the server is, such as "name node".
    """
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except (socket.gaierror, UnicodeError):
        raise StorageError(f"{root}: there is no host {host!r}; check the address") from None
    except OSError as error:
        raise StorageError(
            f"{root}: nobody answers at {host}:{port} ({error.strerror or error}); check the "
            f"address, and that the {what} runs"
        ) from None
