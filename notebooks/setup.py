# Databricks notebook source
# MAGIC %md
# MAGIC # What all notebooks begin with
# MAGIC `%run ./setup` gives a notebook a log of its own, `log`, in a new directory, `workspace`, and two helpers. `spark` is there already; here it learns `format("log")`.

# COMMAND ----------

# MAGIC %pip install --quiet "..[table]"

# COMMAND ----------

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import broker
import spark_log

# COMMAND ----------

dbutils.widgets.text("workspace", "", "Directory to work in; empty: a new one")
dbutils.widgets.text("log", "", "A log that is there already; empty: a new one in the workspace")

workspace = Path(dbutils.widgets.get("workspace") or tempfile.mkdtemp(prefix="spark-log-"))
workspace.mkdir(parents=True, exist_ok=True)

if dbutils.widgets.get("log"):
    # A log that somebody names must be there: a wrong path must not become a new, empty log.
    log = broker.open(dbutils.widgets.get("log"), create=False)
else:
    log = broker.open(workspace / "log")
root = log.root

spark_log.register(spark)

# COMMAND ----------


def shell(command: str, stdin: str | None = None) -> None:
    """Run a command of this environment on the log and print it with what it says."""
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"SPARK_LOG_ROOT": root, "PATH": beside_python, "COLUMNS": "110"}
    done = subprocess.run(
        shlex.split(command), input=stdin, capture_output=True, text=True, env=environment
    )
    print(f"$ {command}")
    print(f"{done.stdout}{done.stderr}".rstrip("\n"))
    if done.returncode != 0:
        print(f"(exit code {done.returncode})")


def require_records(topic: str) -> int:
    """Return how many records a topic holds; none is an error, not an empty page."""
    count = log.describe_topic(topic).record_count
    if count == 0:
        raise ValueError(f"topic {topic!r} of {root} is empty: produce to it first")
    return count
