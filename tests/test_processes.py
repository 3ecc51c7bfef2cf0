"""Several processes on one log: racing, forked, stopped, killed, out of disk, not allowed to write.

Every other process here is a real one. They tell each other how far they are through pipes, so
nothing depends on how fast they run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import TopicPartition
from broker.storage import LocalStorage
from broker.topic import Topic

NAME = "orders"
PATIENCE_SECONDS = 60
_processes = multiprocessing.get_context("spawn")


class Peer:
    """Another process, running `function(pipe, *args)`. Killed at the end if it is still there."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(target=function, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.id = self.process.pid or 0

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_SECONDS), "the other process says nothing"
        return self.pipe.recv()

    def say(self, word: str) -> None:
        self.pipe.send(word)

    def kill(self) -> None:
        os.kill(self.id, signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)

    def end(self) -> None:
        self.process.join(PATIENCE_SECONDS)
        assert self.process.exitcode == 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.process.close()


def read_all(root: Path, topic: str = NAME) -> dict[int, list[bytes]]:
    """Return the values of each partition from offset 0 on, checking that offsets are dense."""
    log = broker.open(root, create=False)
    values: dict[int, list[bytes]] = {}
    with log.consumer() as consumer:
        count = len(log.describe_topic(topic).partitions)
        places = [TopicPartition(topic, partition) for partition in range(count)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        for place, end in consumer.end_offsets(places).items():
            values[place.partition] = []
            consumer.assign([place])
            consumer.seek(place, 0)
            while len(values[place.partition]) < end:
                for record in consumer.poll(1000).get(place, []):
                    assert record.offset == len(values[place.partition])
                    values[place.partition].append(record.value)
    return values


# Writers side by side.


def send_numbers(pipe: Connection, root: Path, writer: int, count: int) -> None:
    """Send `count` records one by one; tell at which offset each was acknowledged."""
    pipe.send("ready")
    pipe.recv()
    acknowledged = []
    with broker.open(root).producer() as producer:
        for number in range(count):
            value = b"%d:%d" % (writer, number)
            place = producer.send(NAME, value, partition=number % 2).result(PATIENCE_SECONDS)
            acknowledged.append((place.partition, place.offset, value))
    pipe.send(acknowledged)


@pytest.mark.parametrize(
    ("writers", "count", "config"),
    [(2, 400, {}), (4, 60, {"segment.bytes": 1, "checkpoint.commits": 3})],
    ids=["two writers", "four writers that roll at every commit"],
)
def test_writers_at_once_keep_their_order_and_lose_nothing(
    root: Path, writers: int, count: int, config: dict[str, int]
) -> None:
    log = broker.open(root)
    log.create_topic(NAME, 2, config)
    peers = [Peer(send_numbers, root, writer, count) for writer in range(writers)]
    for peer in peers:
        assert peer.hear() == "ready"
    for peer in peers:
        peer.say("go")
    acknowledged = [peer.hear() for peer in peers]
    for peer in peers:
        peer.end()
        peer.__exit__()
    values = read_all(root)
    assert sum(map(len, values.values())) == writers * count
    for placed in acknowledged:
        assert [values[partition][offset] for partition, offset, _ in placed] == [
            value for _, _, value in placed
        ]
        offsets = [[offset for p, offset, _ in placed if p == partition] for partition in (0, 1)]
        assert offsets == [sorted(one) for one in offsets]
    if config:
        files = list((root / "topics" / NAME / "1" / "journal").iterdir())
        assert len(files) == writers * count + 1


# A fork.


def fork_while_sending(pipe: Connection, root: Path, forks: int) -> None:
    """Send from one thread and fork from another; tell what was acknowledged and who failed."""
    log = broker.open(root)
    producer = log.producer()
    consumer = log.consumer(NAME, auto_offset_reset="earliest")
    acknowledged: list[tuple[int, bytes]] = []
    is_over = threading.Event()

    def send() -> None:
        number = 0
        while not is_over.is_set():
            value = b"parent %d" % number
            acknowledged.append((producer.send(NAME, value).result(PATIENCE_SECONDS).offset, value))
            number += 1

    thread = threading.Thread(target=send)
    thread.start()
    statuses = []
    for child in range(forks):
        sent = len(acknowledged)
        while len(acknowledged) < sent + 5:
            time.sleep(0.001)
        process_id = os.fork()
        if process_id == 0:
            os._exit(use_in_child(root, child, producer, consumer))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]))
    is_over.set()
    thread.join()
    producer.close()
    consumer.close()
    pipe.send((statuses, acknowledged))


def use_in_child(
    root: Path, child: int, producer: broker.log.Producer, consumer: broker.log.Consumer
) -> int:
    """Return 0 if all that was inherited refuses to work and what is new works."""
    signal.alarm(PATIENCE_SECONDS // 3)
    inherited: list[Callable[[], object]] = [
        lambda: producer.send(NAME, b"inherited"),
        lambda: producer.flush(),
        lambda: producer.begin_transaction(),
        lambda: consumer.poll(),
        lambda: consumer.position(TopicPartition(NAME, 0)),
    ]
    for code, use in enumerate(inherited, start=1):
        try:
            use()
        except broker.ForkedHandle:
            continue
        return code
    producer.close()
    with broker.open(root).producer() as own:
        own.send(NAME, b"child %d" % child).result(PATIENCE_SECONDS)
    return 0


def test_a_forked_child_cannot_use_what_it_inherited_and_the_parent_goes_on(root: Path) -> None:
    broker.open(root).create_topic(NAME, config={"segment.bytes": 2000})
    with Peer(fork_while_sending, root, 8) as peer:
        statuses, acknowledged = peer.hear()
        peer.end()
    assert statuses == [0] * 8
    values = read_all(root)[0]
    assert [values[offset] for offset, _ in acknowledged] == [value for _, value in acknowledged]
    expected = [value for _, value in acknowledged] + [b"child %d" % child for child in range(8)]
    assert sorted(values) == sorted(expected)


def test_nothing_is_imported_any_more_once_background_threads_run(root: Path) -> None:
    """A child forked in the middle of another thread's import would wait for it for ever."""
    script = (
        "import sys, broker, pyarrow\n"
        "before = set(sys.modules)\n"
        "log = broker.open(sys.argv[1])\n"
        "log.create_topic('orders', 2, {'segment.bytes': 300, 'checkpoint.commits': 2})\n"
        "with log.producer(compression_type='zstd') as producer:\n"
        "    for number in range(10):\n"
        "        producer.send('orders', b'v' * 50, key=b'%d' % number).result()\n"
        "    table = pyarrow.table({'value': [b'1', b'2'], 'partition': [0, 1]})\n"
        "    producer.send_batch('orders', table).result()\n"
        "    with producer.transaction():\n"
        "        producer.send('orders', b'v', headers=[('a', b'b')])\n"
        "with log.consumer('orders', auto_offset_reset='earliest') as consumer:\n"
        "    place = broker.TopicPartition('orders', 0)\n"
        "    assert consumer.poll(100) and consumer.offsets_for_times({place: 0})\n"
        "    consumer.seek_to_beginning()\n"
        "    assert consumer.poll_batches(100)\n"
        "sys.exit(str(sorted(set(sys.modules) - before)) if set(sys.modules) - before else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, b"")


# A stopped holder of the lock.


def hold_the_lock(pipe: Connection, root: Path) -> None:
    topic = Topic(LocalStorage(str(root)), NAME, 1, write=True)
    topic._lock(timeout_ms=1000)
    pipe.send("locked")
    pipe.recv()
    topic._unlock()
    topic.close()
    with broker.open(root).producer() as producer:
        pipe.send(producer.send(NAME, b"from the holder").result(PATIENCE_SECONDS).offset)


def test_a_stopped_lock_holder_is_named_in_bounded_time_and_all_goes_on_after(root: Path) -> None:
    log = broker.open(root)
    log.create_topic(NAME)
    with Peer(hold_the_lock, root) as peer, log.producer() as patient:
        assert peer.hear() == "locked"
        os.kill(peer.id, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(peer.id, os.WUNTRACED)[1])
        waiting = patient.send(NAME, b"patient")
        begun = time.monotonic()
        with log.producer(request_timeout_ms=300, delivery_timeout_ms=700) as hasty:
            error = hasty.send(NAME, b"hasty").exception(PATIENCE_SECONDS)
        assert time.monotonic() - begun < 10
        assert isinstance(error, broker.LockTimeout)
        assert f"process {peer.id}, stopped" in str(error)
        assert not waiting.done()
        os.kill(peer.id, signal.SIGCONT)
        peer.say("go on")
        waiting.result(PATIENCE_SECONDS)
        peer.hear()
        peer.end()
    assert sorted(read_all(root)[0]) == [b"from the holder", b"patient"]


# A killed writer.

LARGE = 48 << 20


def send_large(pipe: Connection, root: Path, topic: str) -> None:
    with broker.open(root).producer(buffer_memory=1 << 30) as producer:
        while True:
            value = os.urandom(1 << 10) * (LARGE >> 10)
            pipe.send("sending")
            pipe.send(producer.send(topic, value).result(PATIENCE_SECONDS).offset)


def kill_in_mid_append(root: Path, topic: str) -> int:
    """Kill a writer as soon as its file grows; return how many records were acknowledged."""
    path = journal_of(root, topic)
    before = path.stat().st_size
    with Peer(send_large, root, topic) as peer:
        assert peer.hear() == "sending"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while path.stat().st_size == before and time.monotonic() < deadline:
            pass
        peer.kill()
        acknowledged = 0
        try:
            while peer.pipe.poll(0):
                acknowledged += peer.pipe.recv() != "sending"
        except EOFError:
            return acknowledged
    return acknowledged


def journal_of(root: Path, topic: str) -> Path:
    return root / "topics" / topic / "1" / "journal" / f"{0:020d}.log"


def test_what_a_writer_killed_in_mid_append_leaves_is_cut_and_kept_aside(root: Path) -> None:
    log = broker.open(root)
    config = {"max.message.bytes": 1 << 30, "segment.bytes": 1 << 30}
    for attempt in range(10):
        topic = f"{NAME}-{attempt}"
        log.create_topic(topic, config=config)
        acknowledged = kill_in_mid_append(root, topic)
        left = log.describe_topic(topic)
        assert left.record_count >= acknowledged, "acknowledged and gone"
        torn = journal_of(root, topic).stat().st_size - left.byte_count
        if torn:
            break
    assert torn > 0, "no kill came in the middle of an append"
    with log.producer() as producer:
        place = producer.send(topic, b"after").result(PATIENCE_SECONDS)
    assert place.offset == left.record_count
    assert read_all(root, topic)[0][-1] == b"after"
    (aside,) = (root / "topics" / topic / "1" / "aside").iterdir()
    assert aside.stat().st_size == torn
    assert journal_of(root, topic).stat().st_size == log.describe_topic(topic).byte_count


# A topic that goes and comes back.


def send_until_told(pipe: Connection, root: Path) -> None:
    """Send for ever; "mark" is answered and forgets what was acknowledged, "stop" ends it."""
    acknowledged: list[tuple[int, bytes]] = []
    number = 0
    with broker.open(root).producer() as producer:
        while True:
            number += 1
            value = b"%d" % number
            try:
                acknowledged.append(
                    (producer.send(NAME, value).result(PATIENCE_SECONDS).offset, value)
                )
            except broker.UnknownTopic:
                pass
            if pipe.poll(0):
                word = pipe.recv()
                if word == "stop":
                    pipe.send(acknowledged)
                    return
                acknowledged = []
                pipe.send("marked")


def test_a_topic_made_again_under_a_running_producer_and_consumer_begins_anew(root: Path) -> None:
    log = broker.open(root)
    config = {"segment.bytes": 3000}
    log.create_topic(NAME, config=config)
    by_name = log.consumer(NAME, auto_offset_reset="earliest")
    by_pattern = log.consumer(auto_offset_reset="earliest", metadata_max_age_ms=0)
    by_pattern.subscribe(pattern="ord.*")
    place = TopicPartition(NAME, 0)
    with Peer(send_until_told, root) as peer:
        for _ in range(6):
            while not by_pattern.poll(1000):
                assert peer.process.is_alive()
            log.delete_topic(NAME)
            log.create_topic(NAME, config=config)
        peer.say("mark")
        assert peer.hear() == "marked"
        while by_pattern.poll(1000).get(place, [None])[-1] is None:
            assert peer.process.is_alive()
        peer.say("stop")
        acknowledged = peer.hear()
        peer.end()
    values = read_all(root)[0]
    assert acknowledged and [values[offset] for offset, _ in acknowledged] == [
        value for _, value in acknowledged
    ]
    assert values == sorted(set(values), key=int)
    assert log.describe_topic(NAME).incarnation == 7
    with pytest.raises(broker.UnknownTopic, match="was deleted"):
        by_name.poll(0)
    seen = [record.value for record in by_pattern.poll(0).get(place, [])]
    while by_pattern.position(place) < len(values):
        seen += [record.value for record in by_pattern.poll(1000).get(place, [])]
    assert seen == values[len(values) - len(seen) :]
    assert by_pattern.position(place) == len(values)
    by_name.close()
    by_pattern.close()


# A full disk.


class SmallDisk:
    """A tmpfs of 2 MiB, half of it taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=2m", "tmpfs")
        self._ballast = directory / "ballast"
        self._ballast.write_bytes(bytes(1 << 20))

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.directory)], check=True)

    def free(self) -> None:
        self._ballast.unlink()

    def forbid_writing(self) -> None:
        self._mount("-o", "remount,ro")

    def close(self) -> None:
        subprocess.run(["umount", str(self.directory)], check=True)


class SmallFiles:
    """Files of at most 1 MiB, for users who may not mount anything."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, self._before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)

    def forbid_writing(self) -> None:
        self.free()
        for path in [self.directory, *self.directory.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)

    def close(self) -> None:
        self.free()
        for path in [self.directory, *self.directory.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk | SmallFiles]:
    """Root is bound by no permission and can mount; others cannot mount but are bound."""
    is_root = os.geteuid() == 0
    disk = SmallDisk(tmp_path / "disk") if is_root else SmallFiles(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture
def small_files(tmp_path: Path) -> Iterator[SmallFiles]:
    disk = SmallFiles(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.mark.parametrize("segment_bytes", [100_000, 1 << 30])
def test_a_full_disk_fails_the_send_with_nothing_visible_and_goes_on_when_there_is_room(
    small_disk: SmallDisk | SmallFiles, segment_bytes: int
) -> None:
    if segment_bytes == 100_000 and isinstance(small_disk, SmallFiles):
        segment_bytes = 1 << 29  # Files are the limit, so there must be a large one.
    check_full_disk(small_disk, segment_bytes)


def test_a_file_that_may_not_grow_fails_the_send_with_nothing_visible(
    small_files: SmallFiles,
) -> None:
    check_full_disk(small_files, 1 << 30)


def check_full_disk(disk: SmallDisk | SmallFiles, segment_bytes: int) -> None:
    root = disk.directory / "log"
    log = broker.open(root)
    log.create_topic(NAME, config={"segment.bytes": segment_bytes, "checkpoint.commits": 4})
    with log.producer() as producer:
        acknowledged = []
        error: BaseException | None = None
        for number in range(60):
            value = b"%04d" % number + os.urandom(30_000)
            future = producer.send(NAME, value)
            error = future.exception(PATIENCE_SECONDS)
            if error is not None:
                break
            assert future.result().offset == len(acknowledged)
            acknowledged.append(value)
        assert isinstance(error, broker.DiskFull), error
        assert "Free some" in str(error)
        assert len(acknowledged) > 10
        assert read_all(root)[0] == acknowledged
        again = producer.send(NAME, os.urandom(30_000)).exception(PATIENCE_SECONDS)
        assert isinstance(again, broker.DiskFull)
        assert read_all(root)[0] == acknowledged
        disk.free()
        assert producer.send(NAME, value).result(PATIENCE_SECONDS).offset == len(acknowledged)
    assert read_all(root)[0] == [*acknowledged, value]
    with log.producer() as producer:
        producer.send(NAME, b"last").result(PATIENCE_SECONDS)
    assert read_all(root)[0] == [*acknowledged, value, b"last"]


def test_a_log_that_may_not_be_written_can_be_read_and_says_why_it_cannot_be_written(
    small_disk: SmallDisk | SmallFiles,
) -> None:
    root = small_disk.directory / "log"
    log = broker.open(root)
    log.create_topic(NAME, config={"segment.bytes": 1000})
    with log.producer() as producer:
        for number in range(30):
            producer.send(NAME, b"%d" % number).result(PATIENCE_SECONDS)
    small_disk.forbid_writing()
    assert read_all(root)[0] == [b"%d" % number for number in range(30)]
    writes: list[Callable[[], object]] = [
        lambda: send_one(log),
        lambda: log.alter_topic(NAME, {"retention.ms": 1}),
        lambda: log.create_topic("more"),
        lambda: log.delete_topic(NAME),
        lambda: log.delete_records({TopicPartition(NAME, 0): 3}),
    ]
    for write in writes:
        with pytest.raises(broker.StorageError, match="not allowed to write"):
            write()
    assert log.topics() == [NAME]
    assert log.describe_topic(NAME).record_count == 30


def test_a_full_disk_is_freed_by_deleting_a_topic(small_disk: SmallDisk | SmallFiles) -> None:
    if isinstance(small_disk, SmallFiles):
        pytest.skip("where only files may not grow, there is nothing to free")
    log = broker.open(small_disk.directory / "log")
    log.create_topic(NAME, config={"checkpoint.commits": 4})
    for size in (30_000, 3_000, 300, 1):
        fill_disk(log, size)
    with contextlib.closing(Topic(LocalStorage(log.root), NAME, 1, write=True)) as topic:
        with pytest.raises(broker.DiskFull):
            while True:
                topic.fence(1)  # As short as any commit.
    log.delete_topic(NAME)
    log.create_topic("other")
    with log.producer() as producer:
        producer.send("other", os.urandom(30_000)).result(PATIENCE_SECONDS)
    assert log.topics() == ["other"]


def test_a_topic_is_deleted_where_not_one_block_is_free(small_disk: SmallDisk | SmallFiles) -> None:
    if isinstance(small_disk, SmallFiles):
        pytest.skip("where only files may not grow, there is nothing to free")
    log = broker.open(small_disk.directory / "log")
    log.create_topic("small")
    log.create_topic(NAME)
    for size in (30_000, 3_000, 1):
        fill_disk(log, size)
    log.delete_topic("small")
    assert log.topics() == [NAME]
    assert not list((small_disk.directory / "log/topics/small").glob("*/*"))


def fill_disk(log: broker.Log, size: int) -> None:
    with log.producer() as producer:
        while (error := producer.send(NAME, os.urandom(size)).exception()) is None:
            pass
    assert isinstance(error, broker.DiskFull)
    assert "Free some, outside of the log or by deleting a topic" in str(error)


def send_one(log: broker.Log) -> None:
    with log.producer() as producer:
        producer.send(NAME, b"no").result(PATIENCE_SECONDS)


def test_a_process_that_exits_has_sent_what_it_took(root: Path) -> None:
    broker.open(root).create_topic(NAME)
    script = (
        "import sys, broker\n"
        "producer = broker.open(sys.argv[1]).producer(linger_ms=60_000)\n"
        "for number in range(100):\n"
        "    producer.send('orders', b'%d' % number)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(root)], check=True, timeout=PATIENCE_SECONDS)
    assert read_all(root)[0] == [b"%d" % number for number in range(100)]
