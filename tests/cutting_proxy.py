"""A TCP proxy that cuts one connection at the n-th request: before it, or instead of its answer.

A request is what a client sends after it has heard the server, or at first. So it knows nothing of
the protocol, and stands before a name node as well as before an S3 server.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading

_BYTES = 1 << 16


class CuttingProxy:
    """Listens on a port of its own until the `with` block ends.

    Args:
        at: the request, counted from 0 over all connections, at which to cut; -1 for none.
        after: let the server have the request, and keep its answer.
    """

    def __init__(self, host: str, port: int, *, at: int = -1, after: bool = False) -> None:
        self._upstream = (host, port)
        self._at = at
        self._after = after
        self._mutex = threading.Lock()
        self.request_count = 0
        self.is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._mutex:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # It was closed.
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with socket.create_connection(self._upstream) as server:
                ends = {client, server}
                with self._mutex:
                    self._open |= ends
                try:
                    self._pass_on(client, server)
                finally:
                    with self._mutex:
                        self._open -= ends

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        is_request = is_cutting = False
        waiting = select.poll()  # Not `select`, which knows no descriptor above 1023.
        for one in (client, server):
            waiting.register(one, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if client.fileno() in ready:
                data = client.recv(_BYTES)
                if data and not is_request:
                    is_request, is_cutting = True, self._is_next_cut()
                if not data or (is_cutting and not self._after):
                    return
                server.sendall(data)
            if server.fileno() in ready:
                data = server.recv(_BYTES)
                if not data or is_cutting:
                    return
                is_request = False
                client.sendall(data)

    def _is_next_cut(self) -> bool:
        with self._mutex:
            number, self.request_count = self.request_count, self.request_count + 1
            self.is_cut = self.is_cut or number == self._at
            return number == self._at
