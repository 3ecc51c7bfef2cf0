"""The jars of a Hadoop server: PySpark's own, and one that is fetched once and kept.

PySpark ships Hadoop's client. The same version's `hadoop-client-minicluster` adds the servers. It
is fetched from Maven Central by the Ivy among PySpark's jars, or by Maven where that fails, and
kept in `spark-log/hadoop-<version>` below XDG_CACHE_HOME or ~/.cache (56 MB). From then on no
network is needed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from servers.children import ServerError

_GROUP, _ARTIFACT = "org.apache.hadoop", "hadoop-client-minicluster"
_FETCH_SECONDS = 280
# What the servers need of PySpark's jars. All of them would do, but cost a second at each start.
_OF_PYSPARK = (
    "hadoop-client-*.jar",
    "slf4j-api-*.jar",
    "log4j-*.jar",
    "jcl-over-slf4j-*.jar",
    "javax.servlet-api-*.jar",
    "leveldbjni-all-*.jar",
)


def class_path() -> str:
    """Return the class path of a name node or datanode; fetch what is missing."""
    jars = _pyspark_jars()
    own = [str(jar) for pattern in _OF_PYSPARK for jar in sorted(jars.glob(pattern))]
    return os.pathsep.join([str(_servers_jar(jars)), *own])


def java() -> str:
    """Return the Java to run: JAVA_HOME's, or the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if found is None:
        raise ServerError(
            f"No Java found {f'in JAVA_HOME={home}' if home else 'on the PATH'}. "
            "Install one, 17 or newer, or set JAVA_HOME."
        )
    return found


def _servers_jar(jars: Path) -> Path:
    version = _hadoop_version(jars)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "spark-log" / f"hadoop-{version}" / f"{_ARTIFACT}-{version}.jar"
    if not kept.exists():
        _fetch(jars, version, kept)
    return kept


def _fetch(jars: Path, version: str, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Beside the place where it is kept: moving it there is one step, so nobody sees half of it.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=kept.parent) as scratch:
        reasons = []
        for command in _fetch_commands(jars, version, scratch):
            reason = _run(command)
            fetched = Path(scratch, kept.name)
            if reason is None and fetched.exists():
                fetched.replace(kept)
                return
            reasons.append(f"{Path(command[0]).name}: {reason or 'it left no file'}")
    raise ServerError(
        f"Cannot fetch {_GROUP}:{_ARTIFACT}:{version} from Maven Central ({'; '.join(reasons)}). "
        f"Connect to the network, or put the jar there by hand: {kept}"
    )


def _fetch_commands(jars: Path, version: str, directory: str) -> list[list[str]]:
    ivy = [
        *(java(), "-cp", str(jars / "*"), "org.apache.ivy.Main"),
        *("-dependency", _GROUP, _ARTIFACT, version, "-notransitive", "-types", "jar"),
        *("-cache", os.path.join(directory, "ivy")),
        *("-retrieve", os.path.join(directory, "[artifact]-[revision].[ext]")),
    ]
    maven = shutil.which("mvn")
    if maven is None:
        return [ivy]
    artifact = f"-Dartifact={_GROUP}:{_ARTIFACT}:{version}"
    target = f"-DoutputDirectory={directory}"
    return [ivy, [maven, "--batch-mode", "--quiet", "dependency:copy", artifact, target]]


def _run(command: list[str]) -> str | None:
    """Run a command; return why it failed, in a line, or None."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_FETCH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_FETCH_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    blamed = [line for line in lines if "exception" in line.lower() or "[ERROR]" in line]
    return (blamed or lines or [f"exit code {done.returncode}"])[0][:300]


def _pyspark_jars() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ServerError("HDFS needs PySpark's jars, and PySpark is not installed: make install.")
    return Path(found.origin).parent / "jars"


def _hadoop_version(jars: Path) -> str:
    name = "hadoop-client-api-"
    found = [jar.stem.removeprefix(name) for jar in jars.glob(f"{name}*.jar")]
    if len(found) != 1:
        raise ServerError(f"Expected one {name}*.jar in {jars}, found {len(found)}.")
    return found[0]
