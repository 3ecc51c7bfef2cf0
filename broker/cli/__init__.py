"""The command `spark-log`."""

from broker.cli.app import main

__all__ = ["main"]
