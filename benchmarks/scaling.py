"""`python -m benchmarks simulate`: how one topic grows with its writers and the store's latency.

Prints tables, keeps all points in `results/scaling.json` and draws `docs/scaling.png`. Nothing here
is measured: it is `simulation` at work, and the same on every machine.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.simulation import RECORD_BYTES, Load, Simulation, Store

WRITERS = (1, 3, 10, 30, 100, 300, 1000)
LATENCIES_MS = (1, 5, 20, 100, 500)
RECORD_RATE = 10.0
SEED = 1

# Medians and rates of HDFS as measured on three datanodes; those of S3 are assumed.
HDFS = Store(
    "HDFS-like",
    put_seconds=0.035,
    get_seconds=0.0025,
    loser_requests=2,
    write_bytes_per_second=110e6,
    read_bytes_per_second=168e6,
)
# One put in a hundred takes over 500 ms, as was measured on two busy cores.
HDFS_BUSY = Store(
    "HDFS-like, slow tail",
    put_seconds=0.035,
    get_seconds=0.0025,
    sigma=1.14,
    loser_requests=2,
    write_bytes_per_second=110e6,
    read_bytes_per_second=168e6,
)
S3 = Store("S3-like", put_seconds=0.030, get_seconds=0.015)
PRESET_WRITERS = (1, 8, 50, 200, 1000)

RESULTS = Path(__file__).parent / "results" / "scaling.json"
PLOT = Path(__file__).parent.parent / "docs" / "scaling.png"


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated topic. Latencies go from a commit's oldest record to its answer."""

    store: str
    put_ms: float
    get_ms: float
    sigma: float
    writers: int
    record_rate: float | None  # Of each writer; None: as many as it can.
    is_grouped: bool
    commits_per_second: float
    records_per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    conflicts_per_commit: float
    puts_per_commit: float
    gets_per_commit: float
    failed_share: float
    slowest_writer_share: float


def simulate(store: Store, load: Load, *, seed: int = SEED) -> Point:
    """Return the figures of one topic."""
    outcome = Simulation(store, load, seed=seed).run(2000 + 3 * load.writer_count)
    commits = outcome.commit_count
    failed = outcome.failed_count
    return Point(
        store=store.name,
        put_ms=store.put_seconds * 1000,
        get_ms=store.get_seconds * 1000,
        sigma=store.sigma,
        writers=load.writer_count,
        record_rate=None if math.isinf(load.record_rate) else load.record_rate,
        is_grouped=load.is_grouped,
        commits_per_second=round(commits / outcome.seconds, 2),
        records_per_second=round(outcome.record_count / outcome.seconds, 2),
        p50_ms=round(outcome.latency(0.5) * 1000, 1),
        p99_ms=round(outcome.latency(0.99) * 1000, 1),
        max_ms=round(outcome.latency(1) * 1000, 1),
        conflicts_per_commit=round(outcome.conflict_count / commits, 3),
        puts_per_commit=round(outcome.put_count / commits, 3),
        gets_per_commit=round(outcome.get_count / commits, 2),
        failed_share=round(failed / (commits + failed), 4),
        slowest_writer_share=round(min(outcome.commits_by_writer) * load.writer_count / commits, 3),
    )


def main() -> int:
    grid = [
        _tell(_plain_store(latency), Load(writers, RECORD_RATE, is_grouped))
        for latency in LATENCIES_MS
        for writers in WRITERS
        for is_grouped in (True, False)
    ]
    presets = [
        _tell(store, Load(writers, math.inf))
        for store in (HDFS, HDFS_BUSY, S3)
        for writers in PRESET_WRITERS
    ]
    _show(f"Writers of {RECORD_RATE:.0f} records a second each; a get takes half a put", grid)
    _show("Writers that always have a full commit ready", presets)
    found = {
        "record_bytes": RECORD_BYTES,
        "seed": SEED,
        "points": [asdict(point) for point in (*grid, *presets)],
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    draw(grid, PLOT)
    print(f"kept in {RESULTS}, drawn in {PLOT}")
    return 0


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw the grid: colours are latencies; broken lines are without group commit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, layout="constrained")
    panels = (
        ("records_per_second", "records / s, whole topic", (True, False)),
        ("commits_per_second", "commits / s, whole topic", (True, False)),
        ("conflicts_per_commit", "lost attempts per commit", (True, False)),
    )
    colours = dict(zip(LATENCIES_MS, pyplot.get_cmap("viridis_r")(_spread()), strict=True))
    for axis, (figure_name, label, kinds) in zip(axes.flat, panels, strict=False):
        for latency, colour in colours.items():
            for is_grouped in kinds:
                chosen = _line(points, latency, is_grouped)
                style = "-o" if is_grouped else "--x"
                values = [getattr(point, figure_name) or math.nan for point in chosen]
                axis.plot(WRITERS, values, style, color=colour, markersize=4)
        axis.set_ylabel(label)
    axis = axes.flat[3]
    for latency, colour in colours.items():
        chosen = _line(points, latency, True)
        axis.plot(WRITERS, [p.p99_ms / 1000 for p in chosen], "-o", color=colour, markersize=4)
        axis.plot(WRITERS, [p.p50_ms / 1000 for p in chosen], ":", color=colour)
    axis.set_ylabel("seconds from send to answer,\nwith group commit: p99 (line), p50 (dots)")
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.set_xlabel("writers on one topic")
        axis.tick_params(labelbottom=True)
    lines = [pyplot.Line2D([], [], color=colour, lw=3) for colour in colours.values()]
    names = [f"{latency} ms a put" for latency in LATENCIES_MS]
    lines += [pyplot.Line2D([], [], color="black", marker="o", markersize=4)]
    lines += [pyplot.Line2D([], [], color="black", linestyle="--", marker="x", markersize=4)]
    names += ["group commit", "one record a commit"]
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"Simulated: one topic on a remote store, writers of {RECORD_RATE:.0f} records/s each"
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _plain_store(latency_ms: float) -> Store:
    return Store(f"{latency_ms} ms", latency_ms / 1000, latency_ms / 2000)


def _tell(store: Store, load: Load) -> Point:
    kind = "grouped" if load.is_grouped else "single records"
    print(f"{store.name}, {load.writer_count} writers, {kind} …", file=sys.stderr, flush=True)
    return simulate(store, load)


def _line(points: Sequence[Point], latency: float, is_grouped: bool) -> list[Point]:
    return [p for p in points if p.put_ms == latency and p.is_grouped == is_grouped]


def _spread() -> list[float]:
    return [0.1 + 0.85 * number / (len(LATENCIES_MS) - 1) for number in range(len(LATENCIES_MS))]


def _show(title: str, points: Sequence[Point]) -> None:
    table = Table(title=f"Simulated. {title}")
    names = ("store", "writers", "group commit", "commits/s", "records/s", "p50 s", "p99 s",
             "max s", "lost/commit", "gets/commit", "failed", "slowest writer")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            point.store,
            str(point.writers),
            "on" if point.is_grouped else "off",
            f"{point.commits_per_second:,.1f}",
            f"{point.records_per_second:,.0f}",
            f"{point.p50_ms / 1000:.3f}",
            f"{point.p99_ms / 1000:.3f}",
            f"{point.max_ms / 1000:.1f}",
            f"{point.conflicts_per_commit:.2f}",
            f"{point.gets_per_commit:.0f}",
            f"{point.failed_share:.1%}",
            f"{point.slowest_writer_share:.2f}",
        )
    Console(width=150).print(table)
