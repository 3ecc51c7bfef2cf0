"""Objects that go to executors, with a readable error where this package is not installed.

Spark pickles them by reference to their class, so that an executor without the package fails before
any of our code runs. Here a small function goes along by value: it looks for the package first.
"""

from __future__ import annotations

import pickle
from typing import Any


class Shipped:
    """A base for what Spark sends to executors: its attributes travel, and are set there."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = pickle.dumps(self.__dict__)
        return _unpack, (type(self).__module__, type(self).__qualname__, state)


def _unpack(module: str, name: str, state: bytes) -> Any:
    import importlib
    import pickle
    import sys

    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the Python of this executor ({sys.executable}) has no module {error.name!r}: run "
            "`pip install spark-log` in that environment on every machine, or choose another one "
            "by spark.pyspark.python"
        ) from error
    shipped = object.__new__(kind)
    shipped.__dict__.update(pickle.loads(state))
    return shipped


# A function of the main module is pickled by value, with its code.
_unpack.__module__ = "__main__"
