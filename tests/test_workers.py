"""Threads that work for others, to the very end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from broker.workers import Workers


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_results_and_errors_reach_whoever_asked() -> None:
    workers = Workers(2, "test-results")
    assert workers.submit(divmod, 7, 2).result(10) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(10)
    assert workers.map(str, range(100)) == [str(number) for number in range(100)]
    workers.close()


def test_one_worker_does_one_thing_after_the_other() -> None:
    workers, seen = Workers(1, "test-order"), []
    for number in range(100):
        workers.submit(seen.append, number)
    workers.close()
    assert seen == list(range(100))


def test_as_many_threads_are_begun_as_work_needs() -> None:
    workers = Workers(3, "test-needed")
    for _ in range(5):
        workers.submit(time.time).result(10)
        # Who is done is idle a moment later.
        assert workers._idle.acquire(timeout=10)
        workers._idle.release()
    assert names().count("test-needed") == 1
    together = threading.Barrier(3)
    for number in [workers.submit(together.wait, 10) for _ in range(3)]:
        number.result(10)
    assert names().count("test-needed") == 3
    workers.close()
    assert "test-needed" not in names()


def test_closing_waits_for_the_work_and_takes_no_more() -> None:
    workers, done = Workers(1, "test-closing"), threading.Event()
    work = workers.submit(done.wait, 10)
    threading.Timer(0.1, done.set).start()
    workers.close()
    workers.close()
    assert work.result(0) is True
    with pytest.raises(RuntimeError, match="test-closing takes no more work"):
        workers.submit(time.time)


def test_workers_that_nobody_knows_any_more_end() -> None:
    workers = Workers(2, "test-forgotten")
    workers.submit(time.time).result(10)
    del workers
    gc.collect()
    deadline = time.monotonic() + 10
    while "test-forgotten" in names():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_the_process_waits_for_work_that_nobody_waits_for() -> None:
    code = (
        "import time\n"
        "from broker.workers import Workers\n"
        "Workers(1, 'w').submit(lambda: time.sleep(0.5) or print('done'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


def test_they_work_while_the_interpreter_shuts_down() -> None:
    code = (
        "import atexit\n"
        "from broker.workers import Workers\n"
        "workers = Workers(1, 'w')\n"
        # Who uses workers registers later, and so comes first.
        "atexit.register(lambda: print(workers.submit(sum, [1, 2]).result(10)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"3\n", b"")


def test_a_forked_child_ends_though_a_thread_of_its_parent_was_giving_work() -> None:
    code = (
        "import os, sys\n"
        "from broker.workers import Workers\n"
        "workers = Workers(1, 'w')\n"
        "workers.submit(int).result()\n"
        "workers._mutex.acquire()\n"  # As another thread may have, at the moment of the fork.
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "workers._mutex.release()\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"0\n", b"")


def test_where_no_thread_can_be_begun_the_others_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, hold = Workers(2, "test-limit"), threading.Event()
    first = workers.submit(hold.wait, 10)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # What Python says at the limit.

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = workers.submit(int)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Workers(1, "test-none").submit(int)
    hold.set()
    assert first.result(10) is True and second.result(10) == 0
    workers.close()
