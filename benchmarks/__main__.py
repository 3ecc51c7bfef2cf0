"""`make bench`: run all benchmarks, or those whose name contains one of the arguments.

`simulate` measures nothing, and so is not one of them: see `scaling`. `check-simulation` compares
it with the real code.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import (
    check_simulation,
    group_bench,
    load_bench,
    log_bench,
    remote_bench,
    scaling,
    spark_bench,
    table_bench,
)
from benchmarks.table import Row, keep, show

RESULTS = Path(__file__).parent / "results"
SUITES = {
    "log": ("The log on local disk: 100-byte values, 4 partitions", log_bench.BENCHMARKS),
    "groups": ("Consumer groups on local disk, 4 partitions", group_bench.BENCHMARKS),
    "spark": ("The log through Spark: 100-byte values, 4 partitions", spark_bench.BENCHMARKS),
    "remote": ("The log on HDFS and slow stores", remote_bench.BENCHMARKS),
    "table": ("History as a table: JSON-like records of about 200 bytes", table_bench.BENCHMARKS),
    "load": ("Files into a topic: 5 M rows of Parquet", load_bench.BENCHMARKS),
}


def main() -> int:
    wanted = sys.argv[1:]
    if wanted == ["simulate"]:
        return scaling.main()
    if wanted == ["check-simulation"]:
        return check_simulation.main()
    names = [f"{suite}.{one.__name__}" for suite, (_, all_) in SUITES.items() for one in all_]
    for part in wanted:
        if not any(part in name for name in names):
            print(f"no benchmark has {part!r} in its name; there are:", *names, file=sys.stderr)
            return 2
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
