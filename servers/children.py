"""Processes that never outlive the one that started them, even if that one is killed.

All of them share a process group with a keeper, which waits at a pipe of which only their starter
holds the other end. The kernel closes that end however the starter ends; then the keeper kills the
group. The group of their own also keeps a terminal's Ctrl-C from them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_KEEPER = "import os, signal, sys; sys.stdin.buffer.read(); os.killpg(0, signal.SIGKILL)"
# Below the range from which kernels take the ports of outgoing connections: one of those must not
# get the port of a server that is down for a moment.
_PORTS = range(20_000, 32_000)
_POLL_SECONDS = 0.3


class ServerError(Exception):
    """A server could not be started, or did not get where it was told to go."""


class Children:
    """Starts processes, each with its output in a file, and ends them all."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a command until it ends or is killed; what it prints is appended to `log`."""
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=self._keeper.pid,
            )
        self._started.append(child)
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """End one of them at once, as a crash would."""
        child.kill()
        child.wait()
        self._started.remove(child)

    def end(self) -> None:
        """End them all at once, and the keeper."""
        for child in list(self._started):
            self.kill(child)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        # A process forked from this one may hold the pipe's other end for as long as it likes.
        self._keeper.kill()
        self._keeper.wait()


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let a process that this one has started do nothing, while inside."""
    process.send_signal(signal.SIGSTOP)
    try:
        # Until then some of its threads may go on.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def wait_until(
    is_done: Callable[[], bool],
    what: str,
    seconds: float,
    alive: Mapping[Path, subprocess.Popen[bytes]],
) -> None:
    """Wait until `is_done`; give up when the time is over or a process of `alive` has ended.

    Raises:
        ServerError: with the last lines of the log of the process that is to blame.
    """
    end = time.monotonic() + seconds
    while not is_done():
        for log, child in alive.items():
            if child.poll() is not None:
                raise ServerError(f"{what}: a process ended. The end of {log}:\n{_tail(log, 15)}")
        if time.monotonic() > end:
            logs = "\n".join(f"{log} ends with: {_tail(log, 1)}" for log in alive)
            raise ServerError(f"{what}: not ready after {seconds:g} s.\n{logs}")
        time.sleep(_POLL_SECONDS)


def free_port(wanted: int | None = None) -> int:
    """Return a port of 127.0.0.1 on which nothing listens: the wanted one, if it is free."""
    first = [] if wanted is None else [wanted]
    for port in first + random.sample(_PORTS, k=100):
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("None of 100 ports tried on 127.0.0.1 is free. End what listens on them.")


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
