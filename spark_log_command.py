"""The command `spark-log` as a shell starts it: ready for Ctrl-C before anything slow is loaded.

Not in the package `broker`, whose import takes most of the time of a short command.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process."""
    # Where a shell's background job ignores the signal, it stays ignored.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _stop)
    from broker.cli.app import leave, run

    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
        if is_interruptible:
            signal.signal(signal.SIGINT, _stop)
    except KeyboardInterrupt:
        _stop()
    leave(code)


def _stop(*_signal: object) -> NoReturn:
    """End at once: nothing has been begun yet, or all of it is done."""
    os.write(2, b"spark-log: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
