"""`make bench`: run all benchmarks, or those whose name contains one of the arguments."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import group_bench, log_bench, spark_bench, table_bench
from benchmarks.table import Row, keep, show

RESULTS = Path(__file__).parent / "results"
SUITES = {
    "log": ("The log on local disk: 100-byte values, 4 partitions", log_bench.BENCHMARKS),
    "groups": ("Consumer groups on local disk, 4 partitions", group_bench.BENCHMARKS),
    "spark": ("The log through Spark: 100-byte values, 4 partitions", spark_bench.BENCHMARKS),
    "table": ("History as a table: JSON-like records of about 200 bytes", table_bench.BENCHMARKS),
}


def main() -> int:
    wanted = sys.argv[1:]
    for suite, (title, benchmarks) in SUITES.items():
        chosen = [
            one
            for one in benchmarks
            if not wanted or any(part in f"{suite}.{one.__name__}" for part in wanted)
        ]
        rows: list[Row] = []
        for benchmark in chosen:
            print(f"{suite}.{benchmark.__name__} …", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="spark-log-bench-") as directory:
                rows += benchmark(Path(directory))
        if rows:
            show(title, rows)
        if len(chosen) == len(benchmarks):
            keep(RESULTS / f"{suite}.json", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
