"""`make bench`: run all benchmarks, or those whose name contains one of the arguments."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import log_bench
from benchmarks.table import Row, keep, show

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    wanted = sys.argv[1:]
    rows: list[Row] = []
    for benchmark in log_bench.BENCHMARKS:
        name = benchmark.__name__
        if wanted and not any(part in name for part in wanted):
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="spark-log-bench-") as directory:
            rows += benchmark(Path(directory))
    show("The log on local disk: 100-byte values, 4 partitions", rows)
    if not wanted:
        keep(RESULTS / "log.json", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
