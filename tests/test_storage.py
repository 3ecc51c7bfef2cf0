"""Local files: put-if-absent, appends that are whole or nothing, locks and watches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import broker
from broker.errors import AlreadyExists, Conflict, CorruptLog, DiskFull, LockTimeout, StorageError
from broker.storage import LocalStorage, RemoteStorage, Storage, hdfs
from broker.storage.hdfs import HdfsStore
from broker.storage.open import _remote, open_storage


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in another process; it has said a line when this begins."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


# Put-if-absent.


RACE = """
import sys
from broker.errors import AlreadyExists
from broker.storage import LocalStorage
storage, name = LocalStorage(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(200):
    try:
        storage.create(f"race/{number}", (name * 5000).encode(), sync=False)
        won.append(str(number))
    except AlreadyExists:
        pass
print(" ".join(won))
"""


def test_of_many_processes_that_create_a_name_exactly_one_wins(root: Path) -> None:
    names = "abcd"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = {
        name: process.communicate(timeout=60)[0].split()
        for name, process in zip(names, processes, strict=True)
    }
    assert sorted(number for some in won.values() for number in some) == sorted(
        map(str, range(200))
    )
    for name, some in won.items():
        for number in some:
            assert (root / "race" / number).read_text() == name * 5000
    assert len(list((root / "race").iterdir())) == 200


@pytest.mark.every_store
def test_of_many_threads_that_create_a_name_exactly_one_wins(root: Path | str) -> None:
    """Each has a storage of its own, as processes and machines have."""
    names = "abcd"
    won: dict[str, list[str]] = {str(number): [] for number in range(10)}
    begin = threading.Barrier(len(names))

    def create(name: str) -> None:
        storage = open_apart(root)
        begin.wait(60)
        for number, winners in won.items():
            with contextlib.suppress(AlreadyExists):
                storage.create(f"race/{number}", (name * 5000).encode(), sync=False)
                winners.append(name)

    threads = [threading.Thread(target=create, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage = open_apart(root)
    for number, winners in won.items():
        (winner,) = winners
        assert storage.read(f"race/{number}") == (winner * 5000).encode()
    assert storage.list("race") == sorted(won)


def open_apart(root: Path | str) -> Storage:
    """Open a storage that shares nothing with others of this process."""
    shared = open_storage(root)
    if not isinstance(shared, RemoteStorage):
        return shared
    _remote.clear()
    try:
        return open_storage(root)
    finally:
        _remote.clear()


@pytest.mark.parametrize("root", ["store", "hdfs", "s3"], indirect=True)
def test_of_two_who_append_at_the_same_place_without_a_lock_one_succeeds(root: str) -> None:
    name = f"{0:020d}.log"
    first, second = open_apart(root), open_apart(root)
    assert isinstance(first, RemoteStorage)
    first.create_appended(name, b"0")
    opened = [
        storage.open_appended(name, write=True, create=False, position=0, count=0)
        for storage in (first, second)
    ]
    assert [file.size() for file in opened] == [1, 1]
    opened[0].append([b"on", b"e"], 3, 1)
    with pytest.raises(Conflict):
        opened[1].append([b"two"], 3, 1)
    assert opened[1].size() == 4
    opened[1].append([b"two"], 3, 4)
    assert opened[0].size() == 7
    assert [file.read(0, 10) for file in opened] == [b"0onetwo"] * 2
    first.merge(name, 7)
    merged = open_apart(root).open_whole(name)
    assert merged is not None and merged.map(7) == b"0onetwo"
    assert second.list("") == [name]


@pytest.mark.every_store
def test_a_file_written_piece_by_piece_appears_whole_or_not_at_all(storage: Storage) -> None:
    with storage.create_stream("d/a") as file:
        file.write(b"1" * 300_000)
        assert storage.list("d") == []
        file.write(b"2")
    assert storage.read("d/a") == b"1" * 300_000 + b"2"
    with pytest.raises(ZeroDivisionError), storage.create_stream("d/b") as file:
        file.write(b"1")
        raise ZeroDivisionError
    assert storage.list("d") == ["a"] and not storage.unfinished("d")


@pytest.mark.every_store
def test_what_is_removed_is_gone_and_what_is_beside_it_stays(storage: Storage) -> None:
    for path in ("d/a", "d/e/b", "d/e/f/c", "d2/a"):
        storage.create(path, path.encode())
    storage.overwrite("d2/a", b"newer")
    storage.remove("d/a")
    assert storage.list("d") == ["e"]
    assert storage.exists("d/e/b") and storage.exists("d/e") and not storage.exists("d/a")
    storage.remove_tree("d")
    assert storage.list("d") == [] and storage.read("d/e/f/c") is None
    assert (storage.read("d2/a") or b"").startswith(b"newer")
    ((name, size, changed_ns),) = storage.stamps("d2")
    assert (name, size) == ("a", 5) and changed_ns > 0


@pytest.mark.every_store
def test_a_taken_name_keeps_its_bytes(storage: Storage) -> None:
    storage.create("a/b/c", b"first")
    with pytest.raises(AlreadyExists, match="a/b/c exists already"):
        storage.create("a/b/c", b"second")
    assert storage.read("a/b/c") == b"first"
    assert storage.list("a/b") == ["c"]


def test_what_is_half_written_is_not_listed(storage: LocalStorage, root: Path) -> None:
    storage.create("a/c", b"")
    (root / "a/.tmp-123").write_bytes(b"half")
    assert storage.list("a") == ["c"]


@pytest.mark.every_store
def test_absent_files_and_directories_are_no_errors(storage: Storage) -> None:
    assert storage.read("none") is None
    assert storage.list("none") == []
    assert storage.open_file("none") is None
    assert not storage.exists("none")
    storage.remove("none")
    storage.remove_tree("none")


def test_a_file_where_a_directory_should_be_is_a_storage_error(
    storage: LocalStorage, root: Path
) -> None:
    root.mkdir()
    (root / "a").write_bytes(b"")
    with pytest.raises(StorageError, match="a/b"):
        storage.create("a/b", b"")
    with pytest.raises(StorageError):
        storage.read("a/b")


def test_overwriting_replaces_bytes_in_place(storage: LocalStorage) -> None:
    storage.create("a", b"12345")
    storage.overwrite("a", b"ab")
    assert storage.read("a") == b"ab345"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "empty"),
        ("gs://bucket/x", "Google Cloud Storage was not shown to be safe for a log; use a local"),
        ("gcs://bucket/x", "Google Cloud Storage was not shown to be safe for a log"),
        ("az://box/x", "Azure was not shown to be safe for a log"),
        ("abfs://box/x", "Azure was not shown to be safe for a log"),
        ("abfss://box/x", "Azure was not shown to be safe for a log"),
        ("webhdfs://host/x", "WebHDFS .* was not shown to be safe for a log"),
        ("s3:///x", "names no bucket; write s3://bucket/prefix"),
        ("hdfs:///x", "names no name node; write hdfs://host:port/folder"),
        ("ftp://host/x", "ftp:// is not known; use a local path, hdfs:// or s3://"),
        ("file://host/x", "file:// is not known"),
        ("s3://bucket/x#1", "'#' cannot be in the address of a log; choose another"),
        ("hdfs://host/x?y=1", "'[?]' cannot be in the address of a log; choose another"),
        ("file:///tmp/x#1", "'#' cannot be in the address of a log; choose another"),
        (
            "hdfs:/host:8020/x",
            "write hdfs://host:8020/x, as text, or ./hdfs:/host:8020/x for a loc",
        ),
        ("s3:bucket/x", "write s3://bucket/x, as text, or ./s3:bucket/x for a local directory"),
        ("hdfs://ann@host/x", "names a user; give it by the option storage.user"),
        ("hdfs://host/f\u00fcr uns", "on HDFS only letters a to z, digits and"),
    ],
)
def test_an_address_that_is_not_understood_is_refused(address: str, message: str) -> None:
    with pytest.raises(broker.InvalidOption, match=message):
        open_storage(address)


def test_a_path_that_has_swallowed_a_slash_of_an_address_is_refused() -> None:
    with pytest.raises(broker.InvalidOption, match="write hdfs://host:8020/x, as text"):
        open_storage(Path("hdfs://host:8020/x"))


def test_options_without_names_are_refused() -> None:
    with pytest.raises(broker.InvalidOption, match="storage is 'user=x'; give options by name"):
        open_storage("hdfs://host:8020/x", "user=x")  # type: ignore[arg-type]


def test_storage_options_are_refused_where_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(broker.InvalidOption, match="'region' is for hdfs:// and s3://, not for"):
        broker.open(tmp_path / "log", storage={"region": "x"})
    assert not (tmp_path / "log").exists()


def test_variables_give_a_store_its_own_options_and_not_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_LOG_STORAGE_POLL__MS", "7000")
    monkeypatch.setenv("SPARK_LOG_STORAGE_REGION", "here")
    for root, options in (
        ("s3://bucket/log", {"poll.ms": "7000", "region": "here"}),
        ("hdfs://host:9000/log", {"poll.ms": "7000"}),
    ):
        storage = open_storage(root)
        assert isinstance(storage, RemoteStorage)
        assert storage.options == options
        assert storage._store.poll_seconds == 7
    monkeypatch.setenv("SPARK_LOG_STORAGE_REGIN", "there")
    with pytest.raises(broker.InvalidOption, match="'regin'; did you mean 'region'"):
        open_storage("s3://bucket/log")


def test_a_number_given_as_a_storage_option_is_handed_on_as_text() -> None:
    storage = open_storage("s3://bucket/log", {"poll.ms": 5, "anon": True, "profile": None})  # type: ignore[dict-item]
    assert storage.options == {"poll.ms": "5", "anon": "true"}  # type: ignore[union-attr]


def test_a_process_is_one_user_on_hdfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    monkeypatch.setattr(hdfs, "_user_given", None)
    for _ in range(2):
        HdfsStore("hdfs://host:9000/log", {"user": "ann"})
    assert os.environ["HADOOP_USER_NAME"] == "ann"
    with pytest.raises(broker.InvalidOption, match="is 'ann' on HDFS already; use another process"):
        HdfsStore("hdfs://host:9000/other", {"user": "ben"})


def test_a_file_address_may_hold_escaped_characters(tmp_path: Path) -> None:
    for slashes in ("//", ""):  # Java writes it without.
        assert open_storage(f"file:{slashes}{tmp_path}/a%20b").root == f"{tmp_path}/a b"


# Appending and reading.


def test_an_append_is_at_the_end_and_whole(storage: LocalStorage) -> None:
    file = storage.open_file("a", write=True, create=True)
    assert file is not None
    file.append([b"one", b"", b"two"], 6, 0)
    large = [b"x" * 100_000] * 20
    file.append(large, 2_000_000, 6)
    assert file.size() == 2_000_006
    assert file.read(0, 8) == b"onetwoxx"
    assert file.read(2_000_000, 100) == b"x" * 6
    file.truncate(3)
    assert (file.size(), file.read(0, 10)) == (3, b"one")
    file.close()


FULL = """
import resource, sys
from broker.errors import DiskFull
from broker.storage import LocalStorage
size = int(sys.argv[2])
file = LocalStorage(sys.argv[1]).open_file("a", write=True, create=True)
file.append([b"first"], 5, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
print("ready", flush=True)
for parts in ([b"x" * size], [b"x" * (size // 2)] * 2):
    try:
        file.append(parts, size, 5)
    except DiskFull as error:
        print("full", file.size())
file.append([b"last"], 4, 5)
print(file.read(0, 100).decode())
"""


@pytest.mark.parametrize("size", [21_000, 400_000])
def test_an_append_that_does_not_fit_leaves_nothing(root: Path, size: int) -> None:
    with python(FULL, str(root), str(size)) as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["full", "5", "full", "5", "firstlast"]


def test_a_mapping_never_goes_past_the_end(storage: LocalStorage) -> None:
    storage.create("a", b"12345")
    file = storage.open_file("a")
    assert file is not None
    assert file.map(5)[:5] == b"12345"
    assert file.mapped == 5
    with pytest.raises(CorruptLog, match="shorter than what it held"):
        file.map(6)
    file.close()


# Locks.


HOLD = """
import sys
from broker.storage import LocalStorage
lock = LocalStorage(sys.argv[1]).lock("t")
lock.acquire(1000)
print("ready", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""


def test_a_lock_excludes_other_processes_and_names_its_holder(
    storage: LocalStorage, root: Path
) -> None:
    lock = storage.lock("t")
    with python(HOLD, str(root)) as holder:
        begun = time.monotonic()
        with pytest.raises(LockTimeout, match=f"held by process {holder.pid} ") as caught:
            lock.acquire(200)
        assert 0.2 <= time.monotonic() - begun < 5
        assert caught.value.retriable
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        lock.acquire(10_000)
        lock.release()
    lock.close()


def test_a_stopped_holder_is_said_to_be_stopped(storage: LocalStorage, root: Path) -> None:
    lock = storage.lock("t")
    with python(HOLD, str(root)) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        with pytest.raises(LockTimeout, match=f"process {holder.pid}, stopped"):
            lock.acquire(50)
    lock.close()


def test_a_lock_goes_away_with_its_process(storage: LocalStorage, root: Path) -> None:
    lock = storage.lock("t")
    with python(HOLD, str(root)) as holder:
        holder.kill()
        holder.wait()
        lock.acquire(0)
    lock.close()
    assert (root / "locks/t").exists()


def test_two_handles_of_one_process_exclude_each_other(storage: LocalStorage) -> None:
    first, second = storage.lock("t"), storage.lock("t")
    first.acquire(0)
    with pytest.raises(LockTimeout):
        second.acquire(10)
    first.release()
    second.acquire(0)
    first.close()
    second.close()


def test_locks_of_different_names_do_not_meet(storage: LocalStorage) -> None:
    first, second = storage.lock("a"), storage.lock("b")
    first.acquire(0)
    second.acquire(0)
    first.close()
    second.close()


# Watches.


def test_a_watch_wakes_when_a_file_grows_or_appears(storage: LocalStorage, root: Path) -> None:
    storage.create("d/a", b"")
    watch = storage.watch()
    watch.keep({"d"})
    for change in (
        lambda: (root / "d/a").open("ab").close() or os.truncate(root / "d/a", 5),
        lambda: storage.create("d/b", b"new"),
    ):
        delays = []
        for _ in range(5):
            watch.clear()
            timer = threading.Timer(0.05, change)
            timer.start()
            begun = time.monotonic()
            watch.wait(10)
            delays.append(time.monotonic() - begun)
            timer.join()
            storage.remove("d/b")
            os.truncate(root / "d/a", 0)
        assert 0.04 < min(delays) < 0.2
    watch.close()


def test_what_happened_before_the_wait_is_not_missed(storage: LocalStorage, root: Path) -> None:
    storage.create("d/a", b"")
    watch = storage.watch()
    watch.keep({"d"})
    watch.clear()
    storage.create("d/b", b"")
    begun = time.monotonic()
    watch.wait(10)
    assert time.monotonic() - begun < 0.2
    watch.close()


def test_a_watch_of_a_directory_that_is_let_go_stays_asleep(storage: LocalStorage) -> None:
    storage.create("d/a", b"")
    storage.create("e/a", b"")
    watch = storage.watch()
    watch.keep({"d", "e"})
    watch.keep({"e"})
    watch.clear()
    storage.create("d/b", b"")
    begun = time.monotonic()
    watch.wait(0.1)
    assert time.monotonic() - begun >= 0.09
    watch.close()


def test_a_wait_ends_by_itself_for_writers_on_other_machines(storage: LocalStorage) -> None:
    storage.create("d/a", b"")
    watch = storage.watch()
    watch.keep({"d"})
    watch.clear()
    begun = time.monotonic()
    watch.wait(60)
    assert 0.2 < time.monotonic() - begun < 5
    watch.close()


def test_a_full_disk_is_an_error_of_its_own(storage: LocalStorage) -> None:
    assert issubclass(DiskFull, StorageError)
    with pytest.raises(DiskFull, match="no room to write"):
        LocalStorage("/dev").overwrite("full", b"x")


def test_a_directory_is_removed_though_others_still_change_it(
    storage: LocalStorage, root: Path
) -> None:
    def work() -> None:
        for number in range(500):
            try:
                (root / f"d/{number % 50}").touch()
                (root / f"d/{(number + 20) % 50}").unlink(missing_ok=True)
            except FileNotFoundError:
                return  # The directory is gone.

    for _ in range(30):
        storage.create("d/some", b"", sync=False)
        thread = threading.Thread(target=work)
        thread.start()
        storage.remove_tree("d")
        thread.join()
        assert not (root / "d").exists()
