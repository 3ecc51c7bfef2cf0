"""A real HDFS on this machine: a name node and datanodes, each a process that can be killed.

All settings are in the `conf` directory of each process, the data and the logs beside it. Nothing
outlives the process that started the cluster. `make hdfs` runs one by hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from servers.children import Children, ServerError, free_port, stopped, wait_until
from servers.hadoop_jars import class_path, java

HOST = "127.0.0.1"
# A start costs some 20 s of processor time, of which a busy machine gives little.
PATIENCE_SECONDS = 240

_SETTINGS = {
    "dfs.replication": "3",
    # A write is done when one datanode has it, as in any HDFS that goes on with one node left.
    "dfs.namenode.replication.min": "1",
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "1000",
    # A copy asked of a datanode that died meanwhile is soon asked of another, not in 5 minutes.
    "dfs.namenode.reconstruction.pending.timeout-sec": "5",
    # Blocks of a few bytes, so that small tests cross the border between two.
    "dfs.namenode.fs-limits.min-block-size": "1",
    # Half a minute of safe mode after every block is there serves only large clusters.
    "dfs.namenode.safemode.extension": "0",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.datanode.hostname": HOST,
    "dfs.datanode.address": f"{HOST}:0",
    "dfs.datanode.ipc.address": f"{HOST}:0",
    "dfs.datanode.http.address": f"{HOST}:0",
}
_CORE_SETTINGS = {
    # A datanode that gives up on a name node sleeps; it asks more often instead.
    "ipc.client.connect.retry.interval": "200",
    "ipc.client.connect.max.retries": "1000",
}
_CLIENT_OPTIONS = {
    # Three nodes hold no fourth that could replace a dead one in the middle of a write.
    "dfs.client.block.write.replace-datanode-on-failure.enable": "false",
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
}
_LOGGING = """\
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
# A thousand lines at every start of a datanode.
logger.volumes.name = org.apache.hadoop.hdfs.server.datanode.fsdataset
logger.volumes.level = warn
# A line for each time the name node is asked how it is.
logger.requests.name = http.requests
logger.requests.level = warn
"""
_JAVA_OPTIONS = (
    # Small and short-lived: quick to start rather than fast in the end.
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss512k"),
    *("-Djava.net.preferIPv4Stack=true", "-XX:+ExitOnOutOfMemoryError"),
)
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_NAME_NODE_HEAP, _DATANODE_HEAP = "-Xmx192m", "-Xmx160m"


class HdfsCluster:
    """A running HDFS. Made by `start`; a `with` statement stops it."""

    def __init__(
        self,
        directory: Path,
        datanodes: int,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        """Use `start`: this only writes the settings down."""
        self.port = free_port(port)
        self._http_port = free_port()
        self._directory = directory
        self._settings = {**_SETTINGS, **(settings or {})}
        self._class_path = class_path()
        self._children = Children()
        self._name_node: subprocess.Popen[bytes] | None = None
        self._datanodes: list[subprocess.Popen[bytes] | None] = [None] * datanodes
        self._configure("namenode", {"dfs.namenode.name.dir": "name"})
        for number in range(datanodes):
            self._configure(f"datanode{number}", {"dfs.datanode.data.dir": "data"})

    @classmethod
    def start(
        cls,
        directory: str | Path,
        datanodes: int = 3,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> HdfsCluster:
        """Start a new, empty HDFS in a directory and wait until all of it is ready.

        Args:
            port: of the name node, if it is free; else any.

        Raises:
            ServerError: the jars cannot be had, or a process did not start.
        """
        cluster = cls(Path(directory).resolve(), datanodes, settings, port)
        try:
            cluster._format()
            cluster.start_all()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def address(self) -> str:
        """The cluster's URL, as `hdfs://host:port`."""
        return f"hdfs://{HOST}:{self.port}"

    @property
    def client_options(self) -> dict[str, str]:
        """Settings for a client, `hdfs_native.Client(address, client_options)`.

        With them, writes go on as long as one datanode is left.
        """
        return dict(_CLIENT_OPTIONS)

    def kill_datanode(self, number: int) -> None:
        """Kill a datanode. The name node still believes in it for about 12 s."""
        self._kill(self._datanodes[number], f"datanode {number}")
        self._datanodes[number] = None

    def start_datanode(self, number: int) -> None:
        """Start a killed datanode, with the data it had, and wait until the name node knows it."""
        self._start_datanode(number)
        self.wait_until_ready()

    def kill_name_node(self) -> None:
        """Kill the name node: until it is started again, nothing can be opened or listed."""
        self._kill(self._name_node, "name node")
        self._name_node = None

    def start_name_node(self) -> None:
        """Start the killed name node, with what it knew, and wait until all is ready."""
        self._start_name_node()
        self.wait_until_ready()

    def silent(self) -> AbstractContextManager[None]:
        """Let the name node take connections and answer nothing, while inside."""
        assert self._name_node is not None, "the name node does not run"
        return stopped(self._name_node)

    def start_all(self) -> None:
        """Start whatever was killed, and wait until all is ready."""
        if self._name_node is None:
            self._start_name_node()
        for number, node in enumerate(self._datanodes):
            if node is None:
                self._start_datanode(number)
        self.wait_until_ready()

    def wait_until_ready(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the name node takes writes and counts exactly the datanodes that run.

        After a kill this takes as long as the name node needs to call the datanode dead.
        """
        running = sum(node is not None for node in self._datanodes)
        what = f"HDFS at {self.address} with {running} datanodes"
        wait_until(lambda: self._live_datanodes() == running, what, seconds, self._running())

    def wait_until_copied(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a dead datanode is known to be dead, and what was on one node only is on two.

        Before that, killing another one may take the only copy of what was just written.
        """
        self.wait_until_ready(seconds)
        lonely: set[bytes] | None = None

        def is_done() -> bool:
            nonlocal lonely
            report = self._get("fsck?ugi=root&path=/&files=1&blocks=1")
            if report is not None:
                found = set(re.findall(rb"(blk_\d+)_\d+ len=\d+ Live_repl=1\b", report))
                lonely = found if lonely is None else lonely & found
            return lonely is not None and not lonely

        wait_until(is_done, f"HDFS at {self.address} with copies", seconds, self._running())

    def process_ids(self) -> dict[str, int]:
        """Return the ids of the running processes, for those who kill by hand."""
        return {log.stem: node.pid for log, node in self._running().items()}

    def stop(self) -> None:
        """Kill all of it. What it stored stays in its directory."""
        self._children.end()

    def __enter__(self) -> HdfsCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _configure(self, name: str, own: Mapping[str, str]) -> None:
        conf = self._directory / name / "conf"
        conf.mkdir(parents=True)
        paths = {key: (self._directory / name / value).as_uri() for key, value in own.items()}
        site = self._settings | paths | {"dfs.namenode.http-address": f"{HOST}:{self._http_port}"}
        core = {"fs.defaultFS": self.address} | _CORE_SETTINGS
        (conf / "core-site.xml").write_text(_xml(core))
        (conf / "hdfs-site.xml").write_text(_xml(site))
        (conf / "log4j2.properties").write_text(_LOGGING)
        # Found before the pages in the jar, for which the web server would unpack all of it first.
        for pages in ("hdfs", "datanode", "static"):
            (conf / "webapps" / pages).mkdir(parents=True)

    def _command(self, name: str, heap: str, main: str, *arguments: str) -> list[str]:
        home = self._directory / name
        scratch = home / "tmp"
        scratch.mkdir(exist_ok=True)
        options = [heap, *_JAVA_OPTIONS, f"-Djava.io.tmpdir={scratch}"]
        class_path = f"{home / 'conf'}{os.pathsep}{self._class_path}"
        return [java(), *options, "-cp", class_path, main, *arguments]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _format(self) -> None:
        command = self._command(
            "namenode", _NAME_NODE_HEAP, _NAME_NODE, "-format", "-nonInteractive"
        )
        log = self._log("format")
        child = self._children.start(command, log)
        if child.wait(PATIENCE_SECONDS) != 0:
            raise ServerError(
                f"The name node could not be formatted. See {log}:\n{log.read_text()}"
            )

    def _start_name_node(self) -> None:
        assert self._name_node is None, "the name node runs"
        command = self._command("namenode", _NAME_NODE_HEAP, _NAME_NODE)
        self._name_node = self._children.start(command, self._log("namenode"))

    def _start_datanode(self, number: int) -> None:
        assert self._datanodes[number] is None, f"datanode {number} runs"
        name = f"datanode{number}"
        command = self._command(name, _DATANODE_HEAP, _DATANODE)
        self._datanodes[number] = self._children.start(command, self._log(name))

    def _kill(self, child: subprocess.Popen[bytes] | None, what: str) -> None:
        assert child is not None, f"the {what} does not run"
        self._children.kill(child)

    def _running(self) -> dict[Path, subprocess.Popen[bytes]]:
        nodes = {self._log("namenode"): self._name_node}
        for number, node in enumerate(self._datanodes):
            nodes[self._log(f"datanode{number}")] = node
        return {log: node for log, node in nodes.items() if node is not None}

    def _live_datanodes(self) -> int | None:
        """Return how many datanodes the name node counts; None while it does not take writes."""
        state = self._ask("FSNamesystemState")
        if state is None or state["FSState"] != "Operational":
            return None
        return int(state["NumLiveDataNodes"])

    def _ask(self, bean: str) -> dict[str, Any] | None:
        answer = self._get(f"jmx?qry=Hadoop:service=NameNode,name={bean}")
        beans = [] if answer is None else json.loads(answer)["beans"]
        return beans[0] if beans else None

    def _get(self, query: str) -> bytes | None:
        """Return what the name node's web server answers; None if it does not."""
        # A proxy of the environment knows nothing of this machine's own ports.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{HOST}:{self._http_port}/{query}", timeout=10) as answer:
                return bytes(answer.read())
        except OSError:
            return None


def _xml(settings: Mapping[str, str]) -> str:
    lines = (
        f"<property><name>{escape(key)}</name><value>{escape(value)}</value></property>"
        for key, value in settings.items()
    )
    return "\n".join(["<configuration>", *lines, "</configuration>", ""])
