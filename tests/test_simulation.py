"""The simulation of many writers: it gives the answers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.simulation import UNIT_RECORDS_MAX, Load, Outcome, Simulation, Store
from broker.ledger import pause_seconds

STEADY = Store("steady", put_seconds=0.035, get_seconds=0.0025, sigma=0.0)
HDFS = Store("HDFS-like", put_seconds=0.035, get_seconds=0.0025, loser_requests=2)


def rate(outcome: Outcome) -> float:
    return outcome.commit_count / outcome.seconds


def test_one_writer_commits_once_in_each_put_latency() -> None:
    outcome = Simulation(STEADY, Load(1, math.inf)).run(500)
    assert rate(outcome) == pytest.approx(1 / 0.035)
    assert outcome.record_count == 500 * UNIT_RECORDS_MAX
    assert outcome.latency(0.99) == pytest.approx(0.035)
    assert (outcome.put_count, outcome.get_count, outcome.conflict_count) == (500, 0, 0)


def test_one_writer_is_as_fast_as_the_mean_of_the_puts() -> None:
    outcome = Simulation(HDFS, Load(1, math.inf)).run(20_000)
    assert rate(outcome) == pytest.approx(1 / HDFS.mean_put_seconds, rel=0.02)


def test_a_commit_takes_what_gathered_during_the_one_before() -> None:
    store = Store("slow", put_seconds=0.1, get_seconds=0.05, sigma=0.0)
    grouped = Simulation(store, Load(1, 1000.0)).run(200)
    single = Simulation(store, Load(1, 1000.0, is_grouped=False)).run(200)
    assert grouped.record_count / grouped.seconds == pytest.approx(1000, rel=0.01)
    assert rate(grouped) == pytest.approx(rate(single)) == pytest.approx(10)
    assert single.record_count == single.commit_count


def test_a_writer_with_little_to_send_waits_for_its_records() -> None:
    outcome = Simulation(STEADY, Load(1, 2.0)).run(100)
    assert rate(outcome) == pytest.approx(2, rel=0.02)
    assert outcome.latency(0.5) == pytest.approx(0.035)


@pytest.mark.parametrize("store", [HDFS, Store("S3-like", 0.030, 0.015)], ids=lambda one: one.name)
def test_every_writer_makes_progress(store: Store) -> None:
    outcome = Simulation(store, Load(50, math.inf)).run(1500)
    assert outcome.failed_count == 0
    assert min(outcome.commits_by_writer) > 0
    assert sum(outcome.commits_by_writer) == outcome.commit_count
    assert outcome.conflict_count > 0


@pytest.mark.parametrize("is_grouped", [True, False])
def test_offsets_are_dense(is_grouped: bool) -> None:
    simulation = Simulation(HDFS, Load(30, 40.0, is_grouped))
    simulation.run(800)
    end = 0
    for start, next_start in simulation.placed:
        assert start == end < next_start
        end = next_start
    assert end == simulation.ends[-1]
    assert len(simulation.placed) >= 800


def test_the_same_seed_gives_the_same_figures() -> None:
    load = Load(20, 10.0)
    first, second, other = (Simulation(HDFS, load, seed=seed).run(300) for seed in (1, 1, 2))
    assert first == second != other


def test_waiting_grows_and_then_shrinks_for_who_has_lost_often() -> None:
    longest = [pause_seconds(tries, 1.0) for tries in range(1, 101)]
    assert longest[0] == 0.0
    peak = longest.index(max(longest))
    assert longest[: peak + 1] == sorted(longest[: peak + 1])
    assert longest[peak:] == sorted(longest[peak:], reverse=True)
    assert max(longest) <= 2.0 and longest[-1] < 0.1
    assert pause_seconds(10_000, 1.0) < 0.001
