"""`dbutils` as far as the notebooks use it: widgets, and leaving a notebook early."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class WidgetError(Exception):
    """A widget that is not there, or a value that it does not take."""


class NotebookExit(BaseException):
    """Ends a notebook before its last cell, as `dbutils.notebook.exit` does."""


class Widgets:
    """The parameters of a notebook: each has a default, which whoever runs it may replace.

    A widget that is made again keeps its value, as on Databricks.
    """

    def __init__(self, given: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Let widgets have the given values; `defaults` are for those that happen to be there."""
        self._given = dict(given)
        self._defaults = dict(defaults)
        self._values: dict[str, str] = {}
        self._known: set[str] = set()

    def text(self, name: str, defaultValue: str, label: str | None = None) -> None:
        self._make(name, defaultValue, None)

    def dropdown(
        self, name: str, defaultValue: str, choices: Iterable[str], label: str | None = None
    ) -> None:
        self._make(name, defaultValue, list(choices))

    def combobox(
        self, name: str, defaultValue: str, choices: Iterable[str], label: str | None = None
    ) -> None:
        self._make(name, defaultValue, None)

    def multiselect(
        self, name: str, defaultValue: str, choices: Iterable[str], label: str | None = None
    ) -> None:
        self._make(name, defaultValue, list(choices), is_list=True)

    def get(self, name: str) -> str:
        if name not in self._values:
            raise WidgetError(f"there is no widget {name!r}{_suggestion(name, self._values)}")
        return self._values[name]

    def getArgument(self, name: str, defaultValue: str | None = None) -> str:
        if name not in self._values and defaultValue is not None:
            return defaultValue
        return self.get(name)

    def getAll(self) -> dict[str, str]:
        return dict(self._values)

    def remove(self, name: str) -> None:
        self.get(name)
        del self._values[name]

    def removeAll(self) -> None:
        self._values.clear()

    def check_given(self) -> None:
        """Make sure that no value was given for a widget that never was."""
        for name in self._given:
            if name not in self._known:
                raise WidgetError(
                    f"the notebook has no widget {name!r}{_suggestion(name, self._known)}"
                )

    def _make(
        self, name: str, default: str, choices: list[str] | None, *, is_list: bool = False
    ) -> None:
        first = self._given.get(name, self._defaults.get(name, default))
        value = self._values.get(name, first)
        for one in value.split(",") if is_list else [value]:
            if choices is not None and one not in choices:
                raise WidgetError(f"widget {name!r} does not take {one!r}; it takes {choices}")
        self._values[name] = value
        self._known.add(name)


class NotebookUtils:
    def exit(self, value: str = "") -> None:
        raise NotebookExit(value)


class DbUtils:
    def __init__(self, widgets: Widgets) -> None:
        self.widgets = widgets
        self.notebook = NotebookUtils()

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"dbutils.{name} is not there: this runner knows dbutils.widgets and "
            "dbutils.notebook.exit"
        )


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else "; there are none"
