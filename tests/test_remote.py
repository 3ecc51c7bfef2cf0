"""The log on a store of whole objects: no lock, no append, answers that get lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from cutting_proxy import CuttingProxy
from faulty_storage import Died, Fuse
from faulty_store import CrumblingStore, LossyStore, fresh_store

import broker
from broker import batch
from broker.boot import boot_seconds
from broker.commit import Author
from broker.errors import AlreadyExists, StorageError, StoreUnavailable
from broker.ledger import new_token
from broker.log import Log
from broker.maintenance import units
from broker.storage import open as open_module
from broker.storage import pieces, remote
from broker.storage.hdfs import HdfsStore
from broker.storage.remote import RemoteStorage
from broker.storage.s3 import S3Store
from broker.storage.store import Entry, ObjectStore
from broker.topic import Topic
from servers import HdfsCluster, S3Server

SMALL = {"segment.bytes": 900, "checkpoint.commits": 4}
LARGE = [bytes([number]) * 600_000 for number in (1, 2)]


@pytest.fixture(params=["memory", "hdfs", "s3"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """An empty place on a store: in memory, on a real HDFS, on a real S3 server."""
    name = uuid.uuid4().hex
    if request.param == "hdfs":
        cluster: HdfsCluster = request.getfixturevalue("hdfs_cluster")
        return HdfsStore(f"{cluster.address}/{name}", cluster.client_options)
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return S3Store(f"{server.address}/{name}", {**server.client_options, "poll.ms": "100"})
    return fresh_store(name)


def open_on(store: ObjectStore, **options: float) -> Log:
    return Log(RemoteStorage(store, patience_seconds=10, **options))  # type: ignore[arg-type]


def values(log: Log, topic: str = "t") -> dict[int, list[bytes | None]]:
    """Return all records by partition, read by a consumer from the beginning."""
    found: dict[int, list[bytes | None]] = {}
    with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([broker.TopicPartition(topic, p) for p in range(partitions(log, topic))])
        ends = consumer.end_offsets(consumer.assignment())
        found = {place.partition: [] for place in ends}
        for place, end in ends.items():
            while consumer.position(place) < end:
                for records in consumer.poll(timeout_ms=1000).values():
                    for record in records:
                        found[record.partition].append(record.value)
    return found


def partitions(log: Log, topic: str) -> int:
    return len(log.describe_topic(topic).partitions)


def workload(log: Log) -> dict[int, list[bytes | None]]:
    """Do one of everything; return what must be there."""
    log.create_topic("t", partitions=2, config=SMALL)
    with log.producer() as producer:
        for number in range(8):
            producer.send("t", f"{number}".encode(), partition=number % 2).get(20)
    with log.producer(transactional_id="x") as producer:
        producer.begin_transaction()
        producer.send("t", b"both", partition=0)
        producer.send("t", b"both", partition=1)
        producer.commit_transaction()
    with log.producer() as producer:
        # So large that it goes to a file of its own, which the commit names.
        table = pa.table({"value": LARGE, "partition": [1, 1]})
        producer.send_batch("t", table).result(20)
    log.alter_topic("t", {"retention.ms": -1})
    log.delete_records({broker.TopicPartition("t", 0): 1})
    with log.producer() as producer:
        producer.send("t", b"last", partition=0).get(20)
    return {
        0: [b"2", b"4", b"6", b"both", b"last"],
        1: [b"1", b"3", b"5", b"7", b"both", *LARGE],
    }


def upkeep(log: Log) -> dict[int, list[bytes | None]]:
    """Do one of everything that others do for a topic; return what must be there."""
    log.create_topic("gone", partitions=1)
    log.delete_topic("gone")
    log.create_topic("t", partitions=1, config={"cleanup.policy": "compact", "seal.bytes": 1})
    stage = log.stage("t")
    stage.write(pa.table({"key": ["a", "b", "a"], "value": ["a1", "b1", "a2"]}))
    log.commit_staged("t", [stage.finish()], ("job", 1))
    stage.close()
    log.maintain("t", seal=True)
    log.publish_positions("g", {broker.TopicPartition("t", 0): 2})
    assert log.group_positions("g") == {broker.TopicPartition("t", 0): 2}
    assert log.topics() == ["t"]
    described = log.describe_topic("t")
    assert (described.sealed_ends, described.record_count) == ((3,), 2), "not compacted"
    return {0: [b"b1", b"a2"]}


def read_all_ways(log: Log) -> dict[int, list[bytes | None]]:
    assert not log.verify().damage
    return values(log)


def test_a_log_on_a_store_is_read_as_it_was_written(store: ObjectStore) -> None:
    expected = workload(open_on(store))
    log = open_on(store)
    assert values(log) == expected
    assert not log.verify().damage


def paths_below(store: ObjectStore, folder: str) -> list[str]:
    found = []
    for entry in store.entries(folder):
        path = f"{folder}/{entry.name}"
        found += paths_below(store, path) if entry.is_folder else [path]
    return sorted(found)


@pytest.mark.parametrize("what", ["piece", "merged", "data", "sealed"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_damage_is_named_and_never_skipped(store: ObjectStore, what: str, how: str) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=1, config={"maintenance.enabled": False})
    with log.producer() as producer:
        for number in range(4):
            producer.send("t", b"%d" % number * 50).get(20)
        producer.send_batch("t", pa.table({"value": LARGE})).result(20)
        producer.send("t", b"last").get(20)
    if what == "merged":
        merge_and_remove(store)
    if what == "sealed":
        log.maintain("t", seal=True)
    sign = {"piece": ".log+/", "merged": ".log", "data": "/data/", "sealed": "/sealed/"}[what]
    paths = [path for path in paths_below(store, "topics/t/1") if sign in f"/{path}"]
    path = paths[2 if what == "piece" else 0]
    data = store.get(path)
    assert data is not None
    store.delete(path)
    if how != "gone":
        middle = len(data) // 2
        changed = bytes([data[middle] ^ 1])
        store.put_new(
            path, data[:middle] if how == "cut" else data[:middle] + changed + data[middle + 1 :]
        )
    with pytest.raises((broker.CorruptLog, broker.MissingFile)) as found:
        values(open_on(store))
    is_end = what == "merged"  # Of the journal: the next file, which is empty, is no object yet.
    file = path.rpartition(".log+/")[0] or path
    assert file in str(found.value) or (is_end and how == "gone"), (path, str(found.value))
    damage = open_on(store).verify().damage
    assert damage and (is_end or any(file in one.path for one in damage)), (path, damage)


def test_a_reader_far_behind_asks_for_many_commits_at_once() -> None:
    store = fresh_store(uuid.uuid4().hex)
    open_on(store).create_topic("t", partitions=1)
    with open_on(store).producer() as producer:
        for number in range(100):
            producer.send("t", b"%d" % number).get(20)
    crowded = LossyStore(store)
    crowded.delay_seconds = 0.02
    assert len(values(open_on(crowded))[0]) == 100
    assert crowded.most_at_once >= 16


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("work", [workload, upkeep])
def test_an_answer_that_is_lost_at_any_request_neither_loses_nor_doubles(
    work: Callable[[Log], dict[int, list[bytes | None]]], after: bool
) -> None:
    counting = LossyStore(fresh_store(uuid.uuid4().hex))
    work(open_on(counting))
    total = counting.count
    assert total > 60
    assert "put_file" in {name for name, _ in counting.requests}

    def lose(number: int) -> None:
        lossy = LossyStore(fresh_store(uuid.uuid4().hex), at=number, after=after)
        expected = work(open_on(lossy))
        log = open_on(lossy)
        assert values(log) == expected, f"answer {number} of {total} lost"
        assert not log.verify().damage

    # Most of the time they wait before they ask again.
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lose, range(total)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("work", [workload, upkeep])
def test_an_answer_to_a_reader_that_is_lost_at_any_request_hides_nothing(
    work: Callable[[Log], dict[int, list[bytes | None]]], after: bool
) -> None:
    store = fresh_store(uuid.uuid4().hex)
    expected = work(open_on(store))
    counting = LossyStore(store)
    assert read_all_ways(open_on(counting)) == expected
    assert counting.count > 20

    def lose(number: int) -> None:
        lossy = LossyStore(store, at=number, after=after)
        assert read_all_ways(open_on(lossy)) == expected, f"answer {number} lost"

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lose, range(counting.count)))


def open_through(proxy: CuttingProxy, server: HdfsCluster | S3Server, name: str) -> Log:
    """Open a log whose name node, or whose S3 server, is behind the proxy."""
    if isinstance(server, HdfsCluster):
        return open_on(HdfsStore(f"hdfs://127.0.0.1:{proxy.port}/{name}", server.client_options))
    options = {**server.client_options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    return open_on(S3Store(f"{server.address}/{name}", {**options, "poll.ms": "100"}))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["hdfs_cluster", "s3_server"])
@pytest.mark.parametrize(
    ("work", "cuts"),
    [
        (workload, 4),
        pytest.param(workload, None, marks=(pytest.mark.torture, pytest.mark.timeout(1200))),
        pytest.param(upkeep, None, marks=(pytest.mark.torture, pytest.mark.timeout(1200))),
    ],
)
def test_a_connection_that_is_cut_at_a_request_neither_loses_nor_doubles(
    request: pytest.FixtureRequest,
    work: Callable[[Log], dict[int, list[bytes | None]]],
    cuts: int | None,
    kind: str,
    after: bool,
) -> None:
    """The real drivers, which may ask again by themselves, and meet what they did.

    Connections to datanodes are not cut here: those are killed, in `test_hdfs_faults`.
    """
    server: HdfsCluster | S3Server = request.getfixturevalue(kind)

    def write(at: int) -> tuple[str, int]:
        name = uuid.uuid4().hex
        with CuttingProxy("127.0.0.1", server.port, at=at, after=after) as proxy:
            expected = work(open_through(proxy, server, name))
        # Threads in the background ask a little more, or less, each time.
        assert proxy.is_cut == (at >= 0) or at > write_count * 9 // 10
        assert read(name, -1)[0] == expected, f"cut {'after' if after else 'before'} {at}"
        return name, proxy.request_count

    def read(name: str, at: int) -> tuple[dict[int, list[bytes | None]], int]:
        with CuttingProxy("127.0.0.1", server.port, at=at, after=after) as proxy:
            found = read_all_ways(open_through(proxy, server, name))
        assert proxy.is_cut == (at >= 0) or at > read_count * 9 // 10
        return found, proxy.request_count

    def chosen(count: int) -> range:
        return range(int(after), count, count // cuts if cuts else 1)

    write_count = read_count = 0
    name, write_count = write(-1)
    expected, read_count = read(name, -1)
    assert write_count > 60 and read_count > 10
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, chosen(write_count)))
        for found, _ in threads.map(lambda at: read(name, at), chosen(read_count)):
            assert found == expected


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_hdfs_was_asked_for_twice_is_an_unknown_outcome(
    hdfs_cluster: HdfsCluster, overwrite: bool
) -> None:
    """The driver repeats a request whose answer got lost; then the temporary file is gone."""
    store = HdfsStore(f"{hdfs_cluster.address}/{uuid.uuid4().hex}", {})
    temporary = store._write_data("a", b"12")
    store._rename(temporary, "a", overwrite=overwrite)
    with pytest.raises(StoreUnavailable, match="asked for twice"):
        store._rename(temporary, "b", overwrite=overwrite)
    assert store.get("a") == b"12"


def test_a_file_that_is_written_piece_by_piece_appears_when_it_is_whole(
    store: ObjectStore,
) -> None:
    storage = RemoteStorage(LossyStore(store), patience_seconds=5)
    with storage.create_stream("d/a") as file:
        file.write(b"1")
        assert storage.list("d") == []
        file.write(b"2")
    assert storage.read("d/a") == b"12"
    with pytest.raises(ValueError), storage.create_stream("d/b") as file:
        file.write(b"1")
        raise ValueError
    assert storage.list("d") == ["a"]


def run_all(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_many_writers_without_a_lock_and_with_lost_answers_make_dense_offsets(
    store: ObjectStore,
) -> None:
    open_on(store).create_topic("t", partitions=2, config=SMALL)
    sent: dict[tuple[int, int], bytes] = {}

    def writer(name: int) -> None:
        lossy = LossyStore(store, share=0.05)
        with open_on(lossy).producer() as producer:
            for number in range(10):
                value = f"{name}-{number}".encode()
                meta = producer.send("t", value, partition=number % 2).get(60)
                assert (meta.partition, meta.offset) not in sent
                sent[meta.partition, meta.offset] = value

    run_all([lambda name=name: writer(name) for name in range(8)])  # type: ignore[misc]
    log = open_on(store)
    found = values(log)
    assert {p: len(records) for p, records in found.items()} == {0: 40, 1: 40}
    for (partition, offset), value in sent.items():
        assert found[partition][offset] == value
    assert not log.verify().damage


def merge_and_remove(store: ObjectStore, topic: str = "t") -> None:
    """End the present file, merge all that have ended, and remove their pieces."""
    storage = RemoteStorage(store, grace_ms=0)
    with contextlib.closing(Topic(storage, topic, 1, write=True)) as opened:
        opened.end_file()
        for file in opened.refresh().files:
            path = opened.journal.file_path(file.first_number)
            storage.merge(path, file.byte_length)
            storage.remove_pieces(path)
            assert storage.exists(path)


@pytest.mark.parametrize("manner", ["before", "after"])
def test_a_death_while_pieces_are_removed_loses_nothing_and_is_made_good(manner: str) -> None:
    at, is_dead = 0, True
    while is_dead:
        at += 1
        store = fresh_store(uuid.uuid4().hex)
        log = open_on(store)
        log.create_topic("t", partitions=1, config={"segment.bytes": 400})
        sent: list[bytes | None] = [b"%d" % number for number in range(12)]
        with log.producer() as producer:
            for value in sent:
                producer.send("t", value).get(20)
        fuse = Fuse(at, manner)
        dying = RemoteStorage(CrumblingStore(store, fuse), grace_ms=0)  # type: ignore[arg-type]
        files = open_on(store).reader("t").refresh().files
        assert len(files) > 2
        with contextlib.suppress(Died):
            for file in files:
                path = f"topics/t/1/journal/{file.first_number:020d}.log"
                assert dying.remove_pieces(path)
        is_dead = fuse.is_dead
        assert values(open_on(store)) == {0: sent}
        assert not open_on(store).verify().damage
        with open_on(store).producer() as producer:
            assert producer.send("t", b"next").get(20).offset == len(sent)
        merge_and_remove(store)
        assert values(open_on(store)) == {0: [*sent, b"next"]}
        left = [one.name for one in store.entries("topics/t/1/journal") if one.is_folder]
        assert left == []
    assert at > 12


def test_a_writer_that_slept_while_its_place_was_removed_commits_behind_the_others(
    store: ObjectStore,
) -> None:
    log = open_on(store, grace_ms=0)
    log.create_topic("t", partitions=1)
    with log.producer() as sleeper:
        sleeper.send("t", b"a").get(20)
        with open_on(store).producer() as other:
            for value in (b"b", b"c"):
                other.send("t", value).get(20)
        merge_and_remove(store)
        # The name at which the sleeper goes on is free again.
        assert sleeper.send("t", b"d").get(20).offset == 3
    assert values(open_on(store)) == {0: [b"a", b"b", b"c", b"d"]}
    assert not open_on(store).verify().damage


def test_a_reader_that_slept_while_its_place_was_removed_goes_on(store: ObjectStore) -> None:
    log = open_on(store, grace_ms=0)
    log.create_topic("t", partitions=1)
    with open_on(store, grace_ms=0).producer() as other:
        other.send("t", b"a").get(20)
        with log.consumer(auto_offset_reset="earliest") as sleeper:
            place = broker.TopicPartition("t", 0)
            sleeper.assign([place])
            assert [r.value for r in sleeper.poll(timeout_ms=5000)[place]] == [b"a"]
            other.send("t", b"b").get(20)
            merge_and_remove(store)
            other.send("t", b"c").get(20)
            seen: list[bytes | None] = []
            while len(seen) < 2:
                seen += [r.value for r in sleeper.poll(timeout_ms=5000)[place]]
            assert seen == [b"b", b"c"]


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass by the clock that nobody sets, as if this process had slept."""
    slept = [0.0]

    def later() -> float:
        return boot_seconds() + slept[0]

    monkeypatch.setattr(remote, "boot_seconds", later)
    monkeypatch.setattr(pieces, "boot_seconds", later)
    return lambda seconds: slept.__setitem__(0, slept[0] + seconds)


def seal_and_trim(store: ObjectStore, *values: bytes) -> None:
    """Commit values, each in a file of its own that is sealed, merged and removed."""
    log = open_on(store, grace_ms=0)
    for value in values:
        with log.producer() as producer:
            producer.send("t", value).get(20)
        for _ in range(2):
            time.sleep(0.01)  # So that what was retired is older than no time at all.
            log.maintain("t", seal=True)


TRIMMED = {"file.delete.delay.ms": 0}


def test_an_idle_producer_whose_empty_file_was_removed_commits_behind_the_others(
    store: ObjectStore, sleep: Callable[[float], None]
) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=1, config=TRIMMED | {"segment.bytes": 600})
    with log.producer() as sleeper:
        sleeper.send("t", b"a" * 600).get(20)  # Its file ends with it; the next has no piece yet.
        seal_and_trim(store, b"b", b"c", b"d")
        sleep(7200)
        for number in range(3):
            assert sleeper.send("t", b"%d" % number).get(20).offset == 4 + number
            sleep(3600)
    assert values(open_on(store)) == {0: [b"a" * 600, b"b", b"c", b"d", b"0", b"1", b"2"]}
    assert not open_on(store).verify().damage


@pytest.mark.parametrize("is_rolled", [False, True], ids=["in_a_file", "at_its_beginning"])
def test_a_writer_that_slept_right_after_opening_is_told_that_its_place_is_gone(
    sleep: Callable[[float], None], is_rolled: bool
) -> None:
    store = fresh_store(uuid.uuid4().hex)
    log = open_on(store)
    log.create_topic("t", partitions=1, config=TRIMMED)
    with log.producer() as producer:
        producer.send("t", b"a").get(20)
    with contextlib.closing(Topic(RemoteStorage(store), "t", 1, write=True)) as topic:
        topic.write_checkpoint()
    with contextlib.closing(Topic(RemoteStorage(store), "t", 1, write=True)) as sleeper:
        sleeper.refresh()
        if is_rolled:
            sleeper.end_file()
            sleeper.refresh()
        seal_and_trim(store, b"b", b"c", b"d")
        sleep(7200)
        frame = batch.encode_records([None], [b"e"], None, [1])
        author = Author(new_token(), 99, 0)
        with pytest.raises(broker.OutcomeUnknown, match="removed while this writer was away"):
            sleeper.append([(0, frame)], author)
        assert sleeper.append([(0, frame)], author).number > 0
    assert values(open_on(store)) == {0: [b"a", b"b", b"c", b"d", b"e"]}
    assert not open_on(store).verify().damage


def test_a_writer_that_slept_before_the_only_commit_of_a_file_is_not_acknowledged_in_its_place(
    sleep: Callable[[float], None],
) -> None:
    """All pieces that the file ever had are there then: the one that the sleeper has put."""
    store = fresh_store(uuid.uuid4().hex)
    log = open_on(store, grace_ms=0)
    log.create_topic("t", partitions=1, config=TRIMMED)
    seal_and_trim(store, b"a")

    def end_file() -> None:
        with contextlib.closing(Topic(RemoteStorage(store), "t", 1, write=True)) as topic:
            topic._attempt(lambda state: topic._roll())  # Also if it is empty.

    def journal() -> list[str]:
        return RemoteStorage(store).list("topics/t/1/journal")

    end_file()
    with contextlib.closing(Topic(RemoteStorage(store), "t", 1, write=True)) as sleeper:
        place = sleeper.refresh().file_number
        end_file()
        for value in (b"b", b"c"):
            with open_on(store).producer() as producer:
                producer.send("t", value).get(20)
            end_file()
        while journal()[0] < f"{place + 1:020d}":
            time.sleep(0.01)  # So that what was retired is older than no time at all.
            log.maintain("t")
        assert journal()[0] == f"{place + 1:020d}.log", "the sleeper's file had one commit"
        sleep(7200)
        frame = batch.encode_records([None], [b"d"], None, [1])
        author = Author(new_token(), 99, 0)
        with pytest.raises(broker.OutcomeUnknown, match="removed while this writer was away"):
            sleeper.append([(0, frame)], author)
        assert sleeper.append([(0, frame)], author).number > 0
    assert values(open_on(store)) == {0: [b"a", b"b", b"c", b"d"]}
    log.maintain("t")  # Until then the piece stays: it might be one that all others rest on.
    assert journal()[0] > f"{place:020d}.log"
    assert not open_on(store).verify().damage


def test_of_two_that_end_a_file_at_once_one_leaves_the_next_file_to_others() -> None:
    """It would have one commit only: see the test above."""
    inner = fresh_store(uuid.uuid4().hex)
    stalls: list[Callable[[], None]] = []

    class Stalling(LossyStore):
        def put_new(self, path: str, data: bytes) -> None:
            if ".log+" in path and stalls:
                stalls.pop()()
            self._store.put_new(path, data)

    log = open_on(Stalling(inner))
    log.create_topic("t", partitions=1, config={"segment.bytes": 3000})

    def send(value: bytes) -> None:
        with open_on(inner).producer() as producer:
            producer.send("t", value).get(20)

    send(b"a")
    stalls.append(lambda: send(b"b" * 3000))  # It fills the file, and its producer ends it.
    log.maintain("t", seal=True)
    with contextlib.closing(open_on(inner).reader("t")) as reader:
        assert [file.first_number for file in reader.refresh().files] == [0]
    assert values(open_on(inner)) == {0: [b"a", b"b" * 3000]}


class RefusingStore(LossyStore):
    """Carries out the next commit, once told so, and refuses to say what is in the journal."""

    is_refusing = is_next = False

    def put_new(self, path: str, data: bytes) -> None:
        self._store.put_new(path, data)
        self.is_next |= self.is_refusing and ".log+/" in path

    def entries(self, path: str) -> list[Entry]:
        if self.is_next and path.endswith("/journal"):
            self.is_refusing = self.is_next = False
            raise StorageError(f"{path}: 403 ExpiredToken")
        return self._store.entries(path)


def test_the_files_of_a_seal_stay_when_its_commit_cannot_be_looked_for(
    sleep: Callable[[float], None],
) -> None:
    inner = fresh_store(uuid.uuid4().hex)
    refusing = RefusingStore(inner)
    log = open_on(refusing)
    log.create_topic("t", partitions=1, config=TRIMMED)
    with log.producer() as producer:
        producer.send("t", b"a").get(20)

    def write_slowly(*arguments: Any) -> Iterator[tuple[units.AnyUnit, units.Written]]:
        for written in units.write_here(*arguments):
            sleep(3600)
            refusing.is_refusing = True
            yield written

    with pytest.raises(broker.LogError, match="ExpiredToken") as failed:
        log.maintain("t", seal=True, write=write_slowly)
    assert values(open_on(inner)) == {0: [b"a"]}
    assert open_on(inner).describe_topic("t").sealed_ends == (1,)
    assert not open_on(inner).verify().damage
    assert isinstance(failed.value, broker.OutcomeUnknown)


def test_a_send_whose_commit_cannot_be_looked_for_is_not_told_as_failed_and_is_there_once(
    sleep: Callable[[float], None],
) -> None:
    inner = fresh_store(uuid.uuid4().hex)
    refusing = RefusingStore(inner)
    log = open_on(refusing)
    log.create_topic("t", partitions=1)
    with log.producer(linger_ms=0) as producer:
        producer.send("t", b"a").get(20)
        sleep(3600)
        refusing.is_refusing = True
        assert producer.send("t", b"b").get(20).offset == 1
        assert not refusing.is_refusing
    assert values(open_on(inner)) == {0: [b"a", b"b"]}


def test_what_another_thread_has_seen_does_not_vouch_for_a_put_that_slept(
    sleep: Callable[[float], None],
) -> None:
    inner = fresh_store(uuid.uuid4().hex)
    stalls: list[Callable[[], None]] = []

    class Stalling(LossyStore):
        def put_new(self, path: str, data: bytes) -> None:
            if ".log+" in path and stalls:
                stalls.pop()()
            self._store.put_new(path, data)

    log = open_on(Stalling(inner))
    log.create_topic("t", partitions=1)
    place = broker.TopicPartition("t", 0)
    with log.producer() as writer, log.consumer(auto_offset_reset="earliest") as reader:
        writer.send("t", b"a").get(20)
        reader.assign([place])
        assert [record.value for record in reader.poll(timeout_ms=5000)[place]] == [b"a"]

        def stall() -> None:
            with open_on(inner).producer() as other:
                other.send("t", b"b").get(20)
            merge_and_remove(inner)
            sleep(7200)
            assert [record.value for record in reader.poll(timeout_ms=5000)[place]] == [b"b"]

        stalls.append(stall)
        assert writer.send("t", b"c").get(20).offset == 2
    assert values(open_on(inner)) == {0: [b"a", b"b", b"c"]}


def test_a_writer_one_file_behind_finds_that_its_topic_was_deleted(store: ObjectStore) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=1)
    with log.producer() as writer:
        writer.send("t", b"a").get(20)
        with contextlib.closing(Topic(RemoteStorage(store), "t", 1, write=True)) as topic:
            topic.end_file()
        other = open_on(store)
        with other.producer() as producer:
            producer.send("t", b"b").get(20)
        other.delete_topic("t")
        other.create_topic("t", partitions=1)
        with pytest.raises(broker.UnknownTopic, match="deleted"):
            writer.send("t", b"c").get(20)
        assert writer.send("t", b"d").get(20).offset == 0
    assert values(open_on(store)) == {0: [b"d"]}


def test_a_writer_that_slept_until_its_deleted_topic_was_removed_writes_nothing(
    store: ObjectStore, sleep: Callable[[float], None]
) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=1)
    with log.producer() as writer:
        writer.send("t", b"a").get(20)
        other = open_on(store, grace_ms=0)
        other.delete_topic("t")
        other.maintain()
        assert not store.entries("topics/t/1")
        sleep(7200)
        with pytest.raises(broker.LogError):
            writer.send("t", b"b").get(20)
    assert open_on(store).topics() == []
    other.create_topic("t", partitions=1)
    assert values(open_on(store)) == {0: []}
    assert log.describe_topic("t").incarnation == 2


def test_a_piece_of_a_writer_that_died_on_waking_up_deceives_nobody_and_goes(
    sleep: Callable[[float], None],
) -> None:
    store = fresh_store(uuid.uuid4().hex)
    log = open_on(store)
    log.create_topic("t", partitions=1, config=TRIMMED)
    with log.producer() as producer, log.consumer(auto_offset_reset="earliest") as reader:
        producer.send("t", b"a").get(20)
        reader.assign([broker.TopicPartition("t", 0)])
        reader.poll(timeout_ms=5000)
        stray = store.get(f"topics/t/1/journal/{0:020d}.log+/{1:010d}")
        assert stray is not None
        seal_and_trim(store, b"b", b"c", b"d")
        for number in (1, 2):
            store.put(f"topics/t/1/journal/{0:020d}.log+/{number:010d}", stray)
        sleep(7200)
        assert not open_on(store).verify().damage
        seen: list[bytes | None] = []
        while len(seen) < 3:
            for records in reader.poll(timeout_ms=5000).values():
                seen += [record.value for record in records]
        assert seen == [b"b", b"c", b"d"]
        assert producer.send("t", b"e").get(20).offset == 4
        seal_and_trim(store, b"f", b"g", b"h")
    assert not store.entries(f"topics/t/1/journal/{0:020d}.log+")
    assert len(open_on(store).verify().damage) == 0
    # The last two files stay: they show others that the last is still there.
    assert len(RemoteStorage(store).list("topics/t/1/journal")) == 2


def test_history_is_sealed_merged_compacted_and_read_as_before(store: ObjectStore) -> None:
    log = open_on(store, grace_ms=0)
    log.create_topic("t", partitions=2, config={"cleanup.policy": "compact", "seal.bytes": 1})
    last: dict[bytes, bytes] = {}
    for turn in range(3):
        with log.producer() as producer:
            for number in range(60):
                key, value = b"%d" % (number % 20), b"%d-%d" % (turn, number)
                producer.send("t", value, key=key)
                last[key] = value
        log.maintain("t", seal=True)
    assert sum(log.describe_topic("t").sealed_ends) == 180
    log.maintain("t")
    with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([broker.TopicPartition("t", p) for p in range(2)])
        ends = consumer.end_offsets(consumer.assignment())
        found: dict[bytes | None, bytes | None] = {}
        while any(consumer.position(place) < end for place, end in ends.items()):
            for records in consumer.poll(timeout_ms=1000).values():
                found.update({record.key: record.value for record in records})
    assert found == last
    assert log.describe_topic("t").record_count < 180
    assert not log.verify().damage


@pytest.mark.parametrize("store", ["hdfs", "s3"], indirect=True)
def test_the_table_of_a_log_on_a_store_is_read_by_deltalake(store: ObjectStore) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=2)
    for turn in range(2):
        with log.producer() as producer:
            for number in range(50):
                producer.send("t", b"%d" % number, partition=turn)
        log.maintain("t", seal=True)
    options = store.delta_options()
    table = deltalake.DeltaTable(log.table_path("t"), storage_options=options)
    counted = (
        deltalake.QueryBuilder()
        .register("t", table)
        .execute("select count(*) as n, sum(offset) as s from t")
    )
    assert pa.table(counted.read_all()).to_pylist() == [{"n": 100, "s": 2 * sum(range(50))}]


def test_on_a_slow_store_commits_grow_instead_of_the_wait() -> None:
    class Slow(LossyStore):
        def put_new(self, path: str, data: bytes) -> None:
            time.sleep(0.1)
            self._store.put_new(path, data)

    log = open_on(Slow(fresh_store(uuid.uuid4().hex)))
    log.create_topic("t", partitions=1, config={"checkpoint.commits": 1000})
    begun = time.monotonic()
    with log.producer(batch_size=1000) as producer:
        for number in range(5000):
            producer.send("t", b"%d" % number)
    seconds = time.monotonic() - begun
    assert values(log)[0] == [b"%d" % number for number in range(5000)]
    # Of commits of batch_size there would be more than 100, which would take 10 seconds.
    assert log.describe_topic("t").commit_count < 20
    assert seconds < 5


def test_the_slower_a_store_is_the_more_goes_into_a_commit() -> None:
    """So that what goes through falls far less than the number of commits does."""
    count, per_commit, seconds = 1500, [], []
    for delay in (0.05, 0.2, 0.5):
        store = LossyStore(fresh_store(uuid.uuid4().hex))
        log = open_on(store)
        log.create_topic("t", partitions=1, config={"checkpoint.commits": 1000})
        with log.producer(batch_size=1000) as producer:
            producer.send("t", b"first").get(20)
            before = log.describe_topic("t").commit_count
            store.delay_seconds, begun = delay, time.monotonic()
            for number in range(count):
                producer.send("t", b"%d" % number)
                time.sleep(0.001)
            producer.flush()
            seconds.append(time.monotonic() - begun)
            store.delay_seconds = 0
        assert values(log)[0] == [b"first", *(b"%d" % number for number in range(count))]
        per_commit.append(count / (log.describe_topic("t").commit_count - before))
    assert 2 * per_commit[0] < per_commit[1] and 1.5 * per_commit[1] < per_commit[2], per_commit
    assert seconds[2] < 4 * seconds[0], seconds


def test_groups_share_partitions_and_keep_positions(store: ObjectStore) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=4)
    with log.producer() as producer:
        for number in range(40):
            producer.send("t", b"%d" % number, partition=number % 4)
    seen: list[bytes | None] = []
    mutex = threading.Lock()

    def member() -> None:
        with open_on(store).consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            deadline = time.monotonic() + 60
            while len(seen) < 40 and time.monotonic() < deadline:
                for records in consumer.poll(timeout_ms=200).values():
                    with mutex:
                        seen.extend(record.value for record in records)
            consumer.commit()

    run_all([member, member])
    assert sorted(int(value or b"") for value in seen) == list(range(40))
    assert sum(log.group_positions("g").values()) == 40


def test_an_idle_consumer_asks_for_the_next_commit_and_lists_nothing(store: ObjectStore) -> None:
    lossy = LossyStore(store)
    log = open_on(lossy)
    log.create_topic("t", partitions=1)
    with log.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([broker.TopicPartition("t", 0)])
        consumer.poll(timeout_ms=50)
        lossy.requests.clear()
        consumer.poll(timeout_ms=300)
    assert {name for name, _ in lossy.requests} == {"get"}
    assert len({path for _, path in lossy.requests}) == 1


def test_an_idle_consumer_asks_s3_for_one_object_once_in_its_time(s3_server: S3Server) -> None:
    """Counted by the server: one call of a driver may be several requests."""
    root = f"{s3_server.address}/{uuid.uuid4().hex}"
    log = broker.open(root, storage={**s3_server.client_options, "poll.ms": "500"})
    log.create_topic("t", partitions=3)
    with log.producer() as producer:
        producer.send("t", b"a").get(20)
    with log.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([broker.TopicPartition("t", number) for number in range(3)])
        while sum(map(consumer.position, consumer.assignment())) < 1:
            consumer.poll(timeout_ms=100)
        begun = time.monotonic()
        while time.monotonic() < begun + 1.5:  # At first it asks more often: more may follow.
            consumer.poll(timeout_ms=100)
        before, begun = len(s3_server.requests()), time.monotonic()
        while time.monotonic() < begun + 3:
            consumer.poll(timeout_ms=100)
        asked = s3_server.requests()[before:]
        waited = time.monotonic() - begun
    assert 3 <= len(asked) <= waited / 0.5 + 1, asked
    assert set(asked) == {asked[0]} and asked[0].startswith("GET "), asked
    assert asked[0].endswith(".log+/0000000002") and "list-type" not in asked[0]


def test_an_idle_member_of_a_group_asks_s3_for_its_topic_and_its_group(s3_server: S3Server) -> None:
    root = f"{s3_server.address}/{uuid.uuid4().hex}"
    log = broker.open(root, storage={**s3_server.client_options, "poll.ms": "500"})
    log.create_topic("t", partitions=3)
    with log.producer() as producer:
        producer.send("t", b"a").get(20)
    with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
        while not consumer.poll(timeout_ms=100):
            pass
        consumer.commit()
        begun = time.monotonic()
        while time.monotonic() < begun + 3:  # It settles.
            consumer.poll(timeout_ms=100)
        before, begun = len(s3_server.requests()), time.monotonic()
        while time.monotonic() < begun + 4:
            consumer.poll(timeout_ms=100)
        asked = s3_server.requests()[before:]
        waited = time.monotonic() - begun
    rounds = waited / 0.5 + 1
    assert len([one for one in asked if "/topics/t/1/journal/" in one]) <= rounds, asked
    # It may commit by itself meanwhile, once, and renews its lease.
    assert len([one for one in asked if "/groups/g/1/journal/" in one]) <= rounds + 2, asked
    assert len(asked) <= 2 * rounds + 4, asked
    assert not [one for one in asked if "list-type" in one]


def test_a_deleted_topic_is_gone_for_those_who_have_it_open(store: ObjectStore) -> None:
    log = open_on(store)
    log.create_topic("t", partitions=1)
    with log.producer() as producer, log.consumer(auto_offset_reset="earliest") as consumer:
        producer.send("t", b"a").get(20)
        consumer.assign([broker.TopicPartition("t", 0)])
        consumer.poll(timeout_ms=1000)
        other = open_on(store)
        other.delete_topic("t")
        other.create_topic("t", partitions=1)
        with pytest.raises(broker.UnknownTopic, match="deleted"):
            producer.send("t", b"b").get(20)
        with pytest.raises(broker.UnknownTopic, match="deleted"):
            consumer.poll(timeout_ms=1000)
        assert producer.send("t", b"c").get(20).offset == 0
    assert values(open_on(store)) == {0: [b"c"]}


def test_a_store_that_creates_an_object_twice_is_refused(store: ObjectStore) -> None:
    class Careless(LossyStore):
        def __init__(self) -> None:
            super().__init__(store)
            self.is_known = False

        def put_new(self, path: str, data: bytes) -> None:
            store.put(path, data)

    with pytest.raises(broker.InvalidOption, match="created twice"):
        open_on(Careless())


def test_a_store_that_falls_silent_makes_the_outcome_unknown_and_loses_nothing_later(
    store: ObjectStore,
) -> None:
    """The commit was carried out and not acknowledged: the next one must not be taken for it."""
    lossy = LossyStore(store)
    log = Log(RemoteStorage(lossy, patience_seconds=0.2))
    log.create_topic("t", partitions=1)
    with log.producer(delivery_timeout_ms=600, request_timeout_ms=300, linger_ms=0) as producer:
        producer.send("t", b"a").get(20)
        lossy.is_falling_silent = True
        with pytest.raises(broker.OutcomeUnknown):
            producer.send("t", b"b").get(30)
        lossy.speak()
        producer.send("t", b"c").get(30)
    assert values(open_on(store)) == {0: [b"a", b"b", b"c"]}


def test_a_name_that_is_taken_and_holds_nothing_after_a_lost_answer_is_an_unknown_outcome() -> None:
    """By our own first try, and it was removed since; or by another's, and reads lag behind."""
    store = fresh_store(uuid.uuid4().hex)

    class Forgetful(LossyStore):
        def get(self, path: str) -> bytes | None:
            return None

    storage = RemoteStorage(Forgetful(store, at=0, after=True), patience_seconds=5)
    with pytest.raises(broker.OutcomeUnknown, match="a was written: .* was there and is gone"):
        storage.create("a", b"mine")
    with pytest.raises(AlreadyExists):
        storage.create("a", b"another's")
    assert store.get("a") == b"mine"


def owner(log: Log, **options: Any) -> broker.Producer:
    return log.producer(
        transactional_id="x", request_timeout_ms=300, delivery_timeout_ms=20_000, **options
    )


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_was_fenced_after_a_commit_whose_answer_was_lost_is_not_told_that_it_failed() -> None:
    store = fresh_store(uuid.uuid4().hex)
    lossy = LossyStore(store)
    log = Log(RemoteStorage(lossy, patience_seconds=0.2))
    log.create_topic("t", partitions=1)
    with owner(log) as first, owner(open_on(store)) as second:
        for value in (b"a", b"b"):
            lossy.is_falling_silent = value == b"b"
            first.begin_transaction()
            future = first.send("t", value)
            if value == b"a":
                first.commit_transaction()
        commit = ThreadPoolExecutor(1).submit(first.commit_transaction)
        wait_until(lambda: first.metrics()["producer-metrics"]["record-retry-total"] >= 1)
        second.begin_transaction()
        second.send("t", b"c")
        second.commit_transaction()
        lossy.speak()
        with pytest.raises(broker.OutcomeUnknown, match="an earlier try may have been"):
            commit.result(30)
        assert isinstance(future.exception(0), broker.OutcomeUnknown)
        first.begin_transaction()
        first.send("t", b"d")
        with pytest.raises(broker.ProducerFenced, match="transactional_id 'x'"):
            first.commit_transaction()
    assert values(open_on(store)) == {0: [b"a", b"b", b"c"]}


def test_a_store_that_is_silent_when_an_id_is_taken_over_is_asked_again() -> None:
    lossy = LossyStore(fresh_store(uuid.uuid4().hex))
    log = Log(RemoteStorage(lossy, patience_seconds=0.2))
    log.create_topic("t", partitions=1)
    lossy.is_falling_silent = True
    with owner(log) as producer:
        producer.begin_transaction()
        future = producer.send("t", b"a")
        commit = ThreadPoolExecutor(1).submit(producer.commit_transaction)
        wait_until(lambda: producer.metrics()["producer-metrics"]["record-retry-total"] >= 2)
        lossy.speak()
        commit.result(30)
        assert future.result(0).offset == 0
    assert values(log) == {0: [b"a"]}


def test_a_topic_deleted_while_an_outcome_is_unknown_is_let_go_of() -> None:
    store = fresh_store(uuid.uuid4().hex)
    lossy = LossyStore(store)
    log = Log(RemoteStorage(lossy, patience_seconds=0.2))
    log.create_topic("t", partitions=1)
    options = {"request_timeout_ms": 300, "delivery_timeout_ms": 20_000, "linger_ms": 0}
    with log.producer(**options) as producer:
        producer.send("t", b"a").get(20)
        lossy.is_falling_silent = True
        future = producer.send("t", b"b")
        wait_until(lambda: producer.metrics()["producer-metrics"]["record-retry-total"] >= 1)
        other = open_on(store)
        other.delete_topic("t")
        other.create_topic("t", partitions=1)
        lossy.speak()
        with pytest.raises(broker.OutcomeUnknown, match="was deleted"):
            future.get(30)
        assert producer.send("t", b"c").get(20).offset == 0
    assert values(open_on(store)) == {0: [b"c"]}


def test_a_forked_child_may_use_the_log_that_its_parent_reads(s3_server: S3Server) -> None:
    root = f"{s3_server.address}/{uuid.uuid4().hex}"
    log = broker.open(root, storage=s3_server.client_options)
    log.create_topic("t", partitions=1)
    is_asking, is_forked = threading.Event(), threading.Event()

    def read() -> None:
        storage = log._storage
        assert isinstance(storage, RemoteStorage)
        with contextlib.closing(log.reader("t")) as reader:
            reader.refresh()
            (file,) = storage._files.values()
            with file._mutex, storage._mutex:  # As while it waits for an answer.
                is_asking.set()
                is_forked.wait(60)

    def count(pipe: Any) -> None:
        with log.producer() as producer:
            producer.send("t", b"child").get(20)
        pipe.send([p.end_offset for p in log.describe_topic("t").partitions])

    reading = threading.Thread(target=read)
    reading.start()
    assert is_asking.wait(20)
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()
    child = forked.Process(target=count, args=(theirs,), daemon=True)
    child.start()
    is_forked.set()
    reading.join()
    assert ours.poll(60)
    assert ours.recv() == [1]
    child.join(30)
    assert child.exitcode == 0
    assert values(log) == {0: [b"child"]}


def test_a_child_forked_while_a_thread_connects_uses_the_store_itself(s3_server: S3Server) -> None:
    """That thread is not in the child, where nobody lets go of what it held."""
    store = S3Store(f"{s3_server.address}/{uuid.uuid4().hex}", s3_server.client_options)
    storage = RemoteStorage(store, patience_seconds=10)
    is_connecting, is_forked = threading.Event(), threading.Event()

    def connect() -> None:
        with store._lock, open_module._lock:  # As while it waits for the first answer.
            is_connecting.set()
            is_forked.wait(60)

    def use(pipe: Any) -> None:
        storage.overwrite("a", b"child")
        open_module.open_storage(f"memory://{uuid.uuid4().hex}").overwrite("a", b"child")
        pipe.send(storage.read("a"))

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert is_connecting.wait(20)
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()
    child = forked.Process(target=use, args=(theirs,), daemon=True)
    child.start()
    try:
        assert ours.poll(20), "the child hangs"
    finally:
        is_forked.set()
        connecting.join()
        child.kill()
        child.join()
    assert ours.recv() == storage.read("a") == b"child"


@pytest.mark.parametrize("name", ["l*g", "[logs]"])
def test_a_log_on_s3_whose_name_looks_like_a_pattern_removes_its_own_files_only(
    s3_server: S3Server, name: str
) -> None:
    place, options = f"{s3_server.address}/{uuid.uuid4().hex}", s3_server.client_options
    mine = S3Store(f"{place}/{name}", options)
    others = [S3Store(f"{place}/{other}", options) for other in ("long", "l", "log")]
    for store in (mine, *others):
        store.put("t/1/a", b"1")
        store.put("tt/a", b"2")
    mine.delete_tree("t")
    assert (mine.get("t/1/a"), mine.get("tt/a")) == (None, b"2")
    assert [(store.get("t/1/a"), store.get("tt/a")) for store in others] == [(b"1", b"2")] * 3


def test_maintenance_lets_go_of_parts_of_files_that_killed_processes_left_on_s3(
    s3_server: S3Server,
) -> None:
    store = S3Store(f"{s3_server.address}/{uuid.uuid4().hex}", s3_server.client_options)
    log = open_on(store)
    for topic in ("t", "other"):
        log.create_topic(topic, partitions=1)
    system = store._system()
    keys = [store._key(f"topics/{name}/1/data/7-x.frames") for name in ("t", "t", "other")]
    for key in keys:
        begun = system.call_s3("create_multipart_upload", Bucket="logs", Key=key)
        part = {"Bucket": "logs", "Key": key, "UploadId": begun["UploadId"], "PartNumber": 1}
        system.call_s3("upload_part", Body=b"x" * 100, **part)

    log.maintain("t")  # All that this server holds was begun years ago, it says.
    found = system.call_s3("list_multipart_uploads", Bucket="logs", Prefix=store._key("topics"))
    assert [one["Key"] for one in found["Uploads"]] == [keys[2]]
