"""What went wrong in a job, as one line: Spark's errors are pages, and the reason is inside."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from broker import LogError

# How Python, in the traceback of a task or of a data source, names one of our errors.
_OURS = re.compile(r"^(?:[\w.]*\.)?(?:broker|pipelines)\.[\w.]+: (.+)$", re.MULTILINE)
# What `raise_error` says.
_RAISED = re.compile(r"\[USER_RAISED_EXCEPTION\] (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
_CAUSED = re.compile(r"^Caused by: (?:[\w.$]+: )?(.+)$", re.MULTILINE)
_LENGTH_MAX = 500


class JobFailed(LogError):
    """A job of Spark ended by an error; the text is the reason."""


@contextlib.contextmanager
def explain(what: str) -> Iterator[None]:
    """Turn Spark's errors into one of ours.

    Raises:
        JobFailed: whatever Spark raised, as one line.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise JobFailed(f"{what}: {reason(str(error))}") from error


def reason(text: str) -> str:
    """Find in Spark's text the words that say what to do."""
    for pattern in (_RAISED, _OURS, _CAUSED):
        found = pattern.findall(text)
        if found:
            return _shorten(str(found[-1]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _shorten(lines[0] if lines else "Spark says no more")


def _shorten(text: str) -> str:
    text = re.sub(r" SQLSTATE: \w+$", "", text)
    return text if len(text) <= _LENGTH_MAX else f"{text[:_LENGTH_MAX]} …"
