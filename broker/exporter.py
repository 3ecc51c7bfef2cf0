"""Metrics in Prometheus' text form, over HTTP, for as long as a client that asked is open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.errors import InvalidOption
from broker.metrics import Measured

_TOTAL = "-total"

_mutex = threading.Lock()
_servers: dict[int, Server] = {}


class Server(Collector):
    """One port of this process, shared by all clients that name it."""

    def __init__(self, port: int) -> None:
        self._clients: dict[str, Measured] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise InvalidOption(
                f"metrics port {port}: cannot listen there: {error.strerror}; choose another"
            ) from error
        self.port: int = self._server.server_port

    def add(self, label: str, client: Measured) -> str:
        """Export a client; return the name that it goes by here."""
        name = label or "client"
        count = 1
        while name in self._clients:
            count += 1
            name = f"{label or 'client'}-{count}"
        self._clients[name] = client
        return name

    def remove(self, name: str) -> bool:
        """Export a client no longer; return whether it was the last."""
        self._clients.pop(name, None)
        return not self._clients

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for client_id, client in list(self._clients.items()):
            for group, readings in client.metrics().items():
                for name, value in readings.items():
                    _add(families, group, name, client_id, value)
        yield from families.values()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Exported:
    """A client that is being exported, until `close`."""

    def __init__(self, server: Server, key: int, name: str) -> None:
        self._server, self._key, self._name = server, key, name
        self.port = server.port

    def close(self) -> None:
        with _mutex:
            if self._server.remove(self._name):
                _servers.pop(self._key, None)
                self._server.close()


def export(port: int, label: str, client: Measured) -> Exported:
    """Serve a client's metrics on a port of this machine; 0 takes any that is free."""
    with _mutex:
        server = _servers.get(port) if port else None
        if server is None:
            server = Server(port)
            _servers[server.port] = server
        return Exported(server, server.port, server.add(label, client))


def _add(families: dict[str, Any], group: str, name: str, client_id: str, value: float) -> None:
    is_total = name.endswith(_TOTAL)
    full = f"spark_log_{group}_{name}".replace("-", "_")
    if full not in families:
        kind = CounterMetricFamily if is_total else GaugeMetricFamily
        text = f"{name.replace('-', ' ')} of {group.replace('-', ' ')}"
        families[full] = kind(full, text, labels=["client_id"])
    families[full].add_metric([client_id], value)
