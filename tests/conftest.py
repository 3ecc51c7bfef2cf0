"""Fixtures that many tests share: a fresh log, and the storage below it."""

from __future__ import annotations

from pathlib import Path

import pytest

import broker
from broker.storage import LocalStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(root: Path) -> broker.Log:
    return broker.open(root)


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    return LocalStorage(str(root))
