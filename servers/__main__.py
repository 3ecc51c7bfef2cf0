"""A small HDFS to play with, until Ctrl-C. Run by `make hdfs`."""

from __future__ import annotations

import signal
import sys
import tempfile

from servers import HdfsCluster, ServerError

# Hadoop's own, and that of the examples in the README.
PORT = 8020


def main() -> int:
    """Run a cluster until Ctrl-C, and say how to use it."""
    # Started in the background by a shell, this process would ignore Ctrl-C's signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="spark-log-hdfs-") as directory:
        print("Starting HDFS: a name node and 3 datanodes …", flush=True)
        try:
            with HdfsCluster.start(directory, port=PORT) as cluster:
                print(_welcome(cluster, directory), flush=True)
                signal.pause()
        except KeyboardInterrupt:
            print("\nHDFS has ended; what it stored is gone.")
        except ServerError as error:
            print(f"hdfs: {error}", file=sys.stderr)
            return 1
    return 0


def _welcome(cluster: HdfsCluster, directory: str) -> str:
    processes = ", ".join(f"{id} ({name})" for name, id in cluster.process_ids().items())
    moved = "" if cluster.port == PORT else f"Port {PORT} is taken, so this is another one.\n"
    return f"""\
{moved}HDFS is ready at {cluster.address}; its data and logs are in {directory}.
In another terminal:

  export LOG_ROOT={cluster.address}/log SPARK_LOG_ROOT={cluster.address}/log
  make demo
  .venv/bin/hdfsn ls {cluster.address}/

kill -9 one of these to see what happens: {processes}
Ctrl-C ends it and removes the data."""


if __name__ == "__main__":
    sys.exit(main())
