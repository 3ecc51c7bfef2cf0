"""What a benchmark gives: rows of a table, shown to a person and kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is ours to the baseline's; `is_met` compares it with the target."""

    work: str
    measured: str
    baseline: str
    ratio: float | None
    target: str
    is_met: bool
    runs: tuple[float, ...] = ()


def best_of_pairs(
    ours: Callable[[], float], baseline: Callable[[], float], repeats: int
) -> tuple[float, float, tuple[float, ...]]:
    """Run both by turns, so that a busy moment of the machine meets both.

    Returns:
        The medians of ours and of the baseline, and the ratio of each turn.
    """
    pairs = [(ours(), baseline()) for _ in range(repeats)]
    ratios = tuple(round(mine / other, 4) for mine, other in pairs)
    return (
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
        ratios,
    )


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in ("work", "measured", "baseline", "ratio", "at least", "met"):
        table.add_column(name, justify="left" if name == "work" else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        met = "yes" if row.is_met else "no"
        table.add_row(row.work, row.measured, row.baseline, ratio, row.target, met)
    Console(width=150).print(table)


def keep(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")
