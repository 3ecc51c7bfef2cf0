"""Runs Databricks-style notebooks on this machine and renders each to one page.

`python -m notebooks.runner` runs all of them; `make notebooks` does that and writes docs/notebooks.
"""

from notebooks.runner.dbutils import WidgetError
from notebooks.runner.execution import CellFailed, Done, Place, run
from notebooks.runner.page import render, render_index
from notebooks.runner.source import Cell, Notebook, NotebookError, read

__all__ = [
    "Cell",
    "CellFailed",
    "Done",
    "Notebook",
    "NotebookError",
    "Place",
    "WidgetError",
    "read",
    "render",
    "render_index",
    "run",
]
