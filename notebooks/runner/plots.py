"""The backend of matplotlib in notebooks: a figure that is shown becomes an output of its cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

# The name that matplotlib looks for in the module of a backend.
FigureCanvas = FigureCanvasAgg

_shower: Callable[[Any], None] | None = None


def use(shower: Callable[[Any], None]) -> None:
    """Hand the figures of this process to a function."""
    global _shower
    import matplotlib

    _shower = shower
    matplotlib.use(f"module://{__name__}")


def show(*args: object, **kwargs: object) -> None:
    """Show all figures that are open and close them; called by `plt.show` and after each cell."""
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        figure = plt.figure(number)
        if _shower is not None and figure.axes:
            _shower(figure)
        plt.close(figure)


def forget(value: Any) -> None:
    """Close a figure that was shown, so that the end of the cell does not show it again."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    if isinstance(value, Figure):
        plt.close(value)
