"""The command `spark-log`: which log, which sub-command, and what becomes of errors.

Exit codes: 0 done; 1 the log said no, in one line on stderr; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, TextIO, cast
from warnings import filterwarnings

import click

from broker.cli.consume import consume
from broker.cli.ending import EXIT_INTERRUPTED, EXIT_REFUSED, Ending
from broker.cli.groups import group
from broker.cli.inspection import info, verify
from broker.cli.jobs import etl, load
from broker.cli.maintain import maintain
from broker.cli.output import Output, OutputFailed, say
from broker.cli.produce import produce
from broker.cli.root import root_log_option
from broker.cli.topics import topic
from broker.cli.warnings import Warnings
from broker.errors import LogError, LogNotFound, UnknownTopic


def _version() -> str:
    try:
        return version("spark-log")
    except PackageNotFoundError:
        return "unknown"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@root_log_option
@click.version_option(_version(), prog_name="spark-log")
def app() -> None:
    """A partitioned, durable, replayable log stored as plain files."""


for command in (topic, produce, consume, group, maintain, verify, info, load, etl):
    app.add_command(command)


def main() -> None:
    """Run the command line of this process."""
    leave(run(sys.argv[1:]))


def leave(code: int) -> NoReturn:
    """End the process."""
    if code != 0:
        # Threads may still wait for a store that is silent, and the end of Python for them.
        with contextlib.suppress(OSError, OutputFailed):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    _replace_closed_streams()
    # Where Ctrl-C comes just before s3fs begins a request.
    filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    warnings = Warnings()
    logging.basicConfig(level=logging.WARNING, format="spark-log: %(message)s", handlers=[warnings])
    sys.stdout = cast(TextIO, Output(sys.stdout))
    with Ending() as ending:
        code = _run(arguments, ending)
    if ending.is_by_store or code == EXIT_INTERRUPTED:
        warnings.drop()
    warnings.let_out()
    return code


def _run(arguments: list[str], ending: Ending) -> int:
    try:
        return _guard(lambda: _invoke(arguments, ending), ending)
    except BrokenPipeError:
        _discard_output()  # Whoever read it has enough.
        return 0
    except OutputFailed as error:
        _discard_output()
        say(f"cannot write the output: {error}")
        return EXIT_REFUSED
    except OSError as error:
        what = error.strerror or str(error)
        say(what if error.filename is None else f"{error.filename}: {what}")
        return EXIT_REFUSED


def _replace_closed_streams() -> None:
    """Python has None where the caller closed a stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere: at exit, Python would fail to write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _invoke(arguments: list[str], ending: Ending) -> int:
    with app.make_context("spark-log", arguments) as context:
        ending.offer(context.meta)
        code = app.invoke(context)
    return code if isinstance(code, int) else 0


def _guard(call: Callable[[], int], ending: Ending) -> int:
    """Turn what a command raises into a line and an exit code."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as done:
        sys.stdout.flush()
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        ending.say(ending.tell())
        return EXIT_INTERRUPTED
    except LogError as error:
        line = _advice(error)
        ending.fail(error, lambda: line)
        ending.say(line)
        return EXIT_REFUSED


def _advice(error: LogError) -> Any:
    """Say what to do in terms of this command, where the error speaks of Python calls."""
    if isinstance(error, LogNotFound):
        root = error.args[0]
        return f"no log at {root}; check --log, or make one with `spark-log topic create`"
    if isinstance(error, UnknownTopic) and "create_topic" in error.args[2]:
        name = error.args[0]
        return f"topic {name!r} {error.args[1]}; see `spark-log topic list`"
    return error
