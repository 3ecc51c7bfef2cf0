"""The command `spark-log`, run as a person or a script runs it: a process of its own."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import broker
from broker.cli import app, json_record

COMMAND = [sys.executable, "-m", "broker.cli"]
ROOT = Path(__file__).parent.parent

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "SPARK_LOG_ROOT"}
    # Terminals of the tests are wide, so that no line is folded.
    return {**kept, "SPARK_LOG_ROOT": str(root), "COLUMNS": "120", "TERM": "xterm"}


@pytest.fixture
def run(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Run a command in this process: for what does not depend on the process around it."""
    monkeypatch.setenv("SPARK_LOG_ROOT", environment["SPARK_LOG_ROOT"])

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        texts = [str(argument) for argument in arguments]
        code = app.run(texts)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(texts, code, out, err)

    return call


@pytest.fixture
def spawn(environment: dict[str, str]) -> Run:
    """Run a command in a process of its own."""

    def call(*arguments: object, stdin: str | bytes = b"") -> subprocess.CompletedProcess[str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)], input=data, capture_output=True, timeout=60,
            env=environment,
        )  # fmt: skip
        out, err = done.stdout.decode(errors="surrogateescape"), done.stderr.decode()
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return call


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that a refused command prints."""
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("spark-log: ")
    return line.removeprefix("spark-log: ")


def values(log: broker.Log, topic: str = "orders") -> list[bytes | None]:
    with log.consumer(topic, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        return [record.value for record in consumer]


def wait_for_values(log: broker.Log, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(values(log)) < count and time.monotonic() < deadline:
        time.sleep(0.05)


class Terminal:
    """A command on a pseudo terminal; some of its streams may be elsewhere."""

    def __init__(self, environment: dict[str, str], *arguments: str, **streams: object) -> None:
        self.main, other = pty.openpty()
        chosen = {"stdin": other, "stdout": other, "stderr": other, **streams}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], env=environment, start_new_session=True, **chosen
        )
        os.close(other)
        self.output = ""

    def read_until(self, text: str | None = None, seconds: float = 30) -> str:
        """Read until `text` has been shown, or to the end."""
        deadline = time.monotonic() + seconds
        while text is None or text not in self.output:
            if not select.select([self.main], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} in {self.output!r}")
            try:
                data = os.read(self.main, 65536)
            except OSError:
                break  # Its last user has closed it.
            if not data:
                break
            self.output += data.decode(errors="replace")
        return self.output

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def finish(self) -> int:
        self.read_until(None)
        code = self.process.wait(timeout=30)
        os.close(self.main)
        return code


# Topics.


def test_topics_are_made_listed_described_and_deleted(run: Run) -> None:
    made = run("topic", "create", "orders", "-p", 3, "--config", "retention.ms=5000")
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    listed = run("topic", "list").stdout.splitlines()
    assert listed[0].split() == ["TOPIC", "PARTITIONS", "RECORDS", "SIZE"]
    assert listed[1].split()[:3] == ["orders", "3", "0"]
    assert json.loads(run("topic", "list", "--json").stdout)[0]["partitions"] == 3
    described = json.loads(run("topic", "describe", "orders", "--json").stdout)
    assert described["config"]["retention.ms"] == 5000
    assert described["given_config"] == {"retention.ms": 5000}
    assert [one["end"] for one in described["offsets"]] == [0, 0, 0]
    assert run("topic", "delete", "orders").returncode == 0
    assert json.loads(run("topic", "list", "--json").stdout) == []


def test_a_description_is_aligned_text_when_it_is_not_for_a_terminal(run: Run) -> None:
    run("topic", "create", "orders", "-p", 2, "-c", "retention.ms=5")
    text = run("topic", "describe", "orders").stdout
    assert "\x1b" not in text
    assert "PARTITION  START  END  RECORDS" in text
    assert "retention.ms               5\n" in text
    assert "cleanup.policy             delete      default" in text


def test_settings_and_partitions_are_altered(run: Run, root: Path) -> None:
    run("topic", "create", "orders", "-c", "retention.ms=5000")
    done = run("topic", "alter", "orders", "-c", "retention.ms=", "-c", "retention.bytes=7", "-p4")
    assert done.returncode == 0
    described = broker.open(root).describe_topic("orders")
    assert described.given_config == {"retention.bytes": 7}
    assert len(described.partitions) == 4


def test_the_oldest_records_are_removed(run: Run, spawn: Run, root: Path) -> None:
    run("topic", "create", "orders")
    spawn("produce", "orders", stdin="1\n2\n3\n4\n")
    assert run("topic", "truncate", "orders", "--before", 2, "-p", 0).returncode == 0
    assert run("consume", "orders").stdout == "3\n4\n"
    assert run("topic", "truncate", "orders", "--all").returncode == 0
    assert run("consume", "orders").stdout == ""
    assert "past the end" in refusal(run("topic", "truncate", "orders", "--before", 9))


def test_a_topic_that_exists_is_refused_unless_that_is_fine(run: Run) -> None:
    run("topic", "create", "orders")
    assert "'orders' exists already" in refusal(run("topic", "create", "orders"))
    assert run("topic", "create", "orders", "--if-not-exists").returncode == 0


def test_the_log_is_given_before_or_after_the_command_or_by_the_environment(
    run: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    assert run("--log", other, "topic", "create", "there").returncode == 0
    assert "there" in run("topic", "list", "--log", other).stdout
    assert "there" in run("topic", "--log", other, "list").stdout
    assert "no log at" in refusal(run("topic", "list"))


# Wrong input.


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["topik"], "Did you mean 'topic'?"),
        (["topic", "creat", "a"], "Did you mean 'create'?"),
        (["consume", "orders", "--from-begining"], "--from-beginning"),
        (["produce"], "Missing argument 'TOPIC'"),
        (["produce", "orders", "--compression", "rar"], "'rar' is not one of 'none', 'gzip'"),
        (["produce", "orders", "--batch-size", "big"], "'big' is not a valid integer"),
        (["produce", "orders", "--key-separator", ""], "empty"),
        (["produce", "orders", "--format", "json", "--partition", "1"], "--format lines"),
        (["consume", "orders", "--offset", "-1"], "-1 is not in the range"),
        (["consume", "orders", "--offset", "1", "--from-beginning"], "either"),
        (["consume", "orders", "--timeout-ms", "1"], "--follow"),
        (["topic", "create", "orders", "--config", "retention.ms"], "NAME=VALUE"),
        (["topic", "alter", "orders"], "nothing to change"),
        (["topic", "truncate", "orders"], "--before OFFSET or --all"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_hint(
    run: Run, log: broker.Log, arguments: list[str], hint: str
) -> None:
    log.create_topic("orders")
    done = run(*arguments)
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Usage: spark-log" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_log_given_is_wrong_usage(environment: dict[str, str]) -> None:
    del environment["SPARK_LOG_ROOT"]
    done = subprocess.run(
        [*COMMAND, "topic", "list"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "--log ROOT" in done.stderr and "SPARK_LOG_ROOT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["consume", "order"], "topic 'order' does not exist; see `spark-log topic list`"),
        (["verify", "order"], "'order' does not exist"),
        (["topic", "describe", "order"], "'order' does not exist"),
        (["topic", "delete", "order"], "'order' does not exist"),
        (["topic", "create", "a/b"], "has the character '/'"),
        (["topic", "create", "new", "-p", "0"], "partitions=0"),
        (["topic", "create", "new", "-c", "retention.msec=1"], "did you mean 'retention.ms'?"),
        (["topic", "alter", "orders", "-c", "cleanup.policy=shred"], "cleanup.policy='shred'"),
        (["topic", "alter", "orders", "-p", "1"], "can only grow"),
        (["consume", "orders", "-p", "7"], "has no partition 7"),
        (["consume", "orders", "--offset", "7"], "has no offset 7"),
        (["--log", "gopher://x", "topic", "list"], "is not known; use a local path"),
        (["--log", "/proc/none", "topic", "create", "x"], "/proc/none"),
    ],
)
def test_what_the_log_refuses_is_one_line_on_stderr(
    run: Run, log: broker.Log, arguments: list[str], words: str
) -> None:
    log.create_topic("orders")
    done = run(*arguments)
    assert words in refusal(done)
    assert done.stdout == ""


def test_exit_codes_are_those_of_the_process(spawn: Run, log: broker.Log) -> None:
    assert "'order' does not exist" in refusal(spawn("produce", "order"))
    wrong = spawn("consume", "orders", "--from-begining")
    assert wrong.returncode == 2
    assert "--from-beginning" in wrong.stderr
    assert spawn("topic", "list").returncode == 0


def test_the_installed_command_is_the_same(environment: dict[str, str]) -> None:
    path = Path(sys.executable).parent / "spark-log"
    done = subprocess.run([path, "--version"], capture_output=True, env=environment)
    assert done.stdout.startswith(b"spark-log, version ")


def test_a_directory_of_other_files_is_refused(run: Run, root: Path) -> None:
    root.mkdir()
    (root / "holiday.jpg").touch()
    assert "holiday.jpg" in refusal(run("topic", "create", "orders"))


def test_a_log_that_would_be_gone_with_the_command_is_refused(run: Run) -> None:
    done = run("--log", "memory://x", "topic", "create", "orders")
    assert done.returncode == 2
    assert "memory://x would be gone with this command; give a directory" in done.stderr


# Producing.


def test_each_line_becomes_a_record(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders")
    done = spawn("produce", "orders", stdin=b"one\n\n\xff\xfe\r\nlast without newline")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert values(log) == [b"one", b"", b"\xff\xfe\r", b"last without newline"]


def test_no_input_is_no_record(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders")
    assert spawn("produce", "orders", stdin="").returncode == 0
    assert values(log) == []


def test_many_lines_arrive_whole_and_in_order(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders")
    lines = [b"%d" % number * (number % 50) for number in range(30_000)]
    spawn("produce", "orders", "--batch-size", 10_000, stdin=b"\n".join(lines) + b"\n")
    assert values(log) == lines
    assert log.describe_topic("orders").commit_count > 20


@pytest.mark.parametrize(("separator", "typed"), [(":", ":"), ("=>", "=>"), ("\t", r"\t")])
def test_a_separator_splits_key_and_value(
    spawn: Run, log: broker.Log, separator: str, typed: str
) -> None:
    log.create_topic("orders")
    lines = f"a{separator}1{separator}2\n{separator}no key\nc{separator}\n"
    assert spawn("produce", "orders", "--key-separator", typed, stdin=lines).returncode == 0
    with log.consumer("orders", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        found = [(record.key, record.value) for record in consumer]
    assert found == [(b"a", f"1{separator}2".encode()), (b"", b"no key"), (b"c", b"")]


def test_a_line_without_the_separator_is_named_and_ends_the_sending(
    spawn: Run, log: broker.Log
) -> None:
    log.create_topic("orders")
    done = spawn("produce", "orders", "--key-separator", ":", stdin="a:1\nb:2\nwrong\nc:3\n")
    assert refusal(done) == "line 3 has no key separator ':' (2 records written before)"
    assert values(log) == [b"1", b"2"]


def test_all_go_to_the_partition_that_was_asked_for(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders", 3)
    spawn("produce", "orders", "-p", 2, "--compression", "zstd", stdin="1\n2\n")
    assert [one.record_count for one in log.describe_topic("orders").partitions] == [0, 0, 2]
    assert "no partition 3" in refusal(spawn("produce", "orders", "-p", 3, stdin="1\n"))


def test_a_line_that_is_too_long_is_refused(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders", config={"max.message.bytes": 100})
    message = refusal(spawn("produce", "orders", stdin="a\n" + "x" * 101 + "\n"))
    assert "over max.message.bytes=100" in message
    endless = refusal(spawn("produce", "orders", stdin="x" * 1_000_000))
    assert "more than max.message.bytes lets" in endless
    assert values(log) == []


def test_json_lines_carry_whole_records(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders", 2)
    lines = [
        {"value": "ü", "key": "k", "headers": {"h": "1"}, "partition": 1, "timestamp": 5},
        {"value_base64": base64.b64encode(b"\xff").decode(), "partition": 1, "offset": 9},
        {"value": None, "headers": [{"key": "n", "value": None}], "partition": 1},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    assert spawn("produce", "orders", "--format", "json", stdin=text).returncode == 0
    with log.consumer("orders", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        first, second, third = consumer
    assert (first.value, first.key, first.partition, first.timestamp) == ("ü".encode(), b"k", 1, 5)
    assert first.headers == [("h", b"1")]
    assert (second.value, second.key) == (b"\xff", None)
    assert (third.value, third.headers) == (None, [("n", None)])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("{}", 'no field "value"'),
        ('{"valu": "a"}', "did you mean 'value'?"),
        ('{"value": 5}', '"value" is not text'),
        ('{"value": "a", "value_base64": "YQ=="}', "give one"),
        ('{"value_base64": "*"}', "not base64"),
        ('{"value_base64": "é"}', "not base64"),
        ("[" * 200_000, "too deep to read"),
        ('{"value": "a", "partition": "x"}', '"partition" is not a whole number'),
        ('{"value": "a", "headers": ["x"]}', '"headers" must be'),
        ('{"value": "a", "headers": [{"value": "x"}]}', 'no "key"'),
    ],
)
def test_a_wrong_json_line_says_what_is_wrong(line: str, words: str) -> None:
    with pytest.raises(broker.InvalidRecord, match=re.escape(words)):
        json_record.parse_record(line.encode())


@pytest.mark.parametrize(
    ("line", "words"), [("{", "not JSON"), ('{"value": "a", "partition": 5}', "no partition 5")]
)
def test_a_wrong_json_line_is_named(spawn: Run, log: broker.Log, line: str, words: str) -> None:
    log.create_topic("orders")
    text = '{"value": "a"}\n' + line
    message = refusal(spawn("produce", "orders", "--format", "json", stdin=text))
    assert message.startswith("line 2: ")
    assert words in message
    assert message.endswith("(1 record written before)")
    assert values(log) == [b"a"]


def test_records_are_committed_while_the_input_stays_open(
    environment: dict[str, str], log: broker.Log
) -> None:
    log.create_topic("orders")
    command = [*COMMAND, "produce", "orders"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"first\nsecond\nthi")
    process.stdin.flush()
    wait_for_values(log, 2)
    assert values(log) == [b"first", b"second"]
    process.communicate(b"rd\n", timeout=30)
    assert values(log) == [b"first", b"second", b"third"]


def test_an_interrupted_producer_keeps_what_it_read(
    environment: dict[str, str], log: broker.Log
) -> None:
    log.create_topic("orders")
    # So long a linger that only the interruption can have sent the second line.
    command = [*COMMAND, "produce", "orders", "--linger-ms", "60000", "--batch-size", "8"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(b"long enough\n")
    process.stdin.flush()
    wait_for_values(log, 1)
    process.stdin.write(b"short\nha")
    process.stdin.flush()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert process.stderr.read() == b"spark-log: interrupted; 2 records written\n"
    assert values(log) == [b"long enough", b"short"]
    process.stdin.close()
    process.stderr.close()


# Consuming.


@pytest.fixture
def filled(log: broker.Log) -> broker.Log:
    log.create_topic("orders", 2)
    with log.producer() as producer:
        for number in range(6):
            key = b"k%d" % number
            producer.send("orders", b"%d" % number, key, partition=number % 2, timestamp_ms=number)
    return log


def test_values_are_printed_one_a_line(run: Run, filled: broker.Log) -> None:
    assert run("consume", "orders").stdout == "0\n2\n4\n1\n3\n5\n"
    assert run("consume", "orders", "-p", 1, "--from-beginning").stdout == "1\n3\n5\n"
    assert run("consume", "orders", "-p", 1, "--offset", 1).stdout == "3\n5\n"
    assert run("consume", "orders", "-p", 0, "-p", 1, "-n", 4).stdout == "0\n2\n4\n1\n"
    assert run("consume", "orders", "-n", 0).stdout == ""


def test_values_that_are_no_text_and_nulls_are_printed(spawn: Run, log: broker.Log) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        producer.send("orders", b"\xff\n")
        producer.send("orders", None, b"k")
    assert spawn("consume", "orders").stdout.encode(errors="surrogateescape") == b"\xff\n\n\n"


def test_json_output_is_what_produce_takes(run: Run, spawn: Run, filled: broker.Log) -> None:
    with filled.producer() as producer:
        producer.send("orders", b'\xff"', b"\x00", [("h", b"\xfe"), ("t", b"text")], 0, 7)
    text = run("consume", "orders", "--format", "json").stdout
    first = json.loads(text.splitlines()[0])
    assert first == {
        "topic": "orders", "partition": 0, "offset": 0, "timestamp": 0, "key": "k0", "value": "0",
        "headers": [],
    }  # fmt: skip
    filled.create_topic("copies", 2)
    assert spawn("produce", "copies", "--format", "json", stdin=text).returncode == 0
    copied = run("consume", "copies", "--format", "json").stdout
    assert copied == text.replace('"topic": "orders"', '"topic": "copies"')


def test_a_table_shows_what_cannot_be_printed_as_escapes(run: Run, log: broker.Log) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        producer.send("orders", b"bell \x07 \xff " + b"x" * 500, None, timestamp_ms=0)
    head, row = run("consume", "orders", "--format", "table").stdout.splitlines()
    assert head.split() == ["PARTITION", "OFFSET", "TIME", "(UTC)", "KEY", "VALUE"]
    assert row.split()[:4] == ["0", "0", "1970-01-01", "00:00:00.000"]
    assert r"bell \x07 \xff xxx" in row
    assert row.endswith("x…")


def test_without_follow_it_ends_at_the_end_that_was_there(
    environment: dict[str, str], filled: broker.Log
) -> None:
    with filled.producer() as producer:
        for _ in range(20):
            producer.send("orders", b"x" * 100_000)
        producer.flush()
        process = subprocess.Popen(
            [*COMMAND, "consume", "orders"], env=environment, stdout=subprocess.PIPE, bufsize=0
        )
        assert process.stdout is not None
        assert process.stdout.read(2) == b"0\n"
        for _ in range(20):
            producer.send("orders", b"late")
        producer.flush()
        rest = process.communicate(timeout=30)[0]
    assert rest.count(b"\n") == 25
    assert b"late" not in rest


def test_follow_prints_what_comes_and_ends_after_the_timeout(
    environment: dict[str, str], filled: broker.Log
) -> None:
    command = [*COMMAND, "consume", "orders", "--follow", "--timeout-ms", "1500"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with filled.producer() as producer:
        deadline = time.monotonic() + 20
        while not select.select([process.stdout], [], [], 0.1)[0]:
            assert time.monotonic() < deadline
            producer.send("orders", b"new").result()
    out, _ = process.communicate(timeout=30)
    assert set(out.split()) == {b"new"}
    assert process.returncode == 0


def test_follow_from_the_beginning_stops_after_the_records_asked_for(
    run: Run, filled: broker.Log
) -> None:
    done = run("consume", "orders", "-f", "--from-beginning", "-n", 6)
    assert done.stdout == "0\n2\n4\n1\n3\n5\n"


def test_an_interrupted_consumer_says_one_line(
    environment: dict[str, str], filled: broker.Log
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "consume", "orders", "-f", "--from-beginning"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"spark-log: interrupted\n")


def test_a_reader_that_has_enough_is_no_error(
    environment: dict[str, str], filled: broker.Log
) -> None:
    with filled.producer() as producer:
        for _ in range(20):
            producer.send("orders", b"x" * 100_000)
    process = subprocess.Popen(
        [*COMMAND, "consume", "orders"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def member(
    environment: dict[str, str], log: broker.Log, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[bytes]]:
    """A member of group `g` in the middle of printing more than a pipe holds."""
    log.create_topic("orders")
    with log.producer() as producer:
        values = [str(number) for number in range(200_000)]
        producer.send_batch("orders", pa.table({"value": values})).result(timeout=30)
    process = subprocess.Popen(
        [*COMMAND, "consume", "orders", "--from-beginning", "--group", "g"],
        env={**environment, "PYTHONUNBUFFERED": request.param},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def first_of_the_next(run: Run) -> int:
    return int(run("consume", "orders", "--group", "g", "--max-records", 1).stdout)


def test_a_group_goes_on_before_what_its_reader_did_not_take(
    member: subprocess.Popen[bytes], run: Run
) -> None:
    assert member.stdout is not None and member.stderr is not None
    assert member.stdout.readline() == b"0\n"
    member.stdout.close()
    assert (member.wait(timeout=30), member.stderr.read()) == (0, b"")
    assert first_of_the_next(run) <= 1


def test_a_group_goes_on_before_what_was_not_printed_when_it_was_interrupted(
    member: subprocess.Popen[bytes], run: Run
) -> None:
    assert member.stdout is not None
    printed = member.stdout.readline()
    member.send_signal(signal.SIGINT)
    rest, err = member.communicate(timeout=30)
    assert (member.returncode, err) == (130, b"spark-log: interrupted\n")
    whole = (printed + rest).rpartition(b"\n")[0]
    assert first_of_the_next(run) <= int(whole.rpartition(b"\n")[2]) + 1 < 200_000


def test_a_member_that_was_evicted_while_it_printed_prints_it_again(
    member: subprocess.Popen[bytes], log: broker.Log
) -> None:
    assert member.stdout is not None
    printed = member.stdout.readline()
    group = log._groups.open("g", write=True)
    group.evict(list(group.state.members), by=None, is_dead=lambda _member: True)
    group.close()
    rest, err = member.communicate(timeout=60)
    assert (member.returncode, err.count(b"\n")) == (0, 1)
    assert b"refused the positions" in err
    assert sorted(set(map(int, (printed + rest).split()))) == list(range(200_000))
    assert list(log.group_positions("g").values()) == [200_000]


def test_a_group_that_follows_begins_where_it_first_stood(
    environment: dict[str, str], run: Run, spawn: Run, filled: broker.Log
) -> None:
    follow = ("consume", "orders", "--follow", "--group", "g", "--timeout-ms", "2000")
    assert run(*follow).stdout == ""
    spawn("produce", "orders", stdin="new\n")
    assert run(*follow).stdout == "new\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(
    environment: dict[str, str], filled: broker.Log
) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "consume", "orders"], env=environment, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr == b"spark-log: cannot write the output: No space left on device\n"


def test_an_error_of_something_else_is_not_said_to_be_one_of_the_output(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = shlex.join([*COMMAND, "--log", "here", "topic", "list"])
    script = f"mkdir gone && cd gone && rmdir ../gone && {command}"
    done = subprocess.run(
        script, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "spark-log: No such file or directory"


# The log as a whole.


def test_verify_prints_a_sound_log(run: Run, filled: broker.Log) -> None:
    done = run("verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[-1] == "sound"
    report = json.loads(run("verify", "orders", "--json").stdout)
    assert report["is_sound"] is True
    assert report["topics"][0]["records"] == 6


def test_verify_lists_damage_and_exits_with_1(run: Run, filled: broker.Log, root: Path) -> None:
    path = root / "topics/orders/1/journal" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    done = run("verify")
    assert refusal(done) == f"1 damaged place in {root}"
    assert f"damage: {path} at byte" in done.stdout
    report = json.loads(run("verify", "--json").stdout)
    assert report["is_sound"] is False
    assert report["damage"][0]["path"] == str(path)


def test_a_damaged_topic_does_not_hide_the_others(run: Run, filled: broker.Log, root: Path) -> None:
    filled.create_topic("whole")
    path = root / "topics/orders/1/journal" / f"{0:020d}.log"
    path.write_bytes(b"\0" * path.stat().st_size)
    done = run("topic", "list")
    assert "is damaged at byte 0" in refusal(done)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TOPIC", "orders", "whole"]


def test_info_shows_what_the_log_holds(run: Run, filled: broker.Log, root: Path) -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["root"] == str(root)
    assert facts["cluster_id"] == filled.cluster_id
    assert (facts["topics"], facts["partitions"], facts["records"]) == (1, 2, 6)
    assert "records     6\n" in run("info").stdout


@pytest.mark.parametrize("root", ["hdfs", "s3"], indirect=True)
def test_the_commands_work_on_a_store_too(run: Run, spawn: Run) -> None:
    assert run("topic", "create", "clicks", "--partitions", 2).returncode == 0
    lines = "".join(f"k{number}\tv{number}\n" for number in range(100))
    sent = spawn("produce", "clicks", "--key-separator", "\t", stdin=lines)
    assert sent.returncode == 0, sent.stderr
    read = run("consume", "clicks", "--from-beginning", "--group", "night")
    assert sorted(read.stdout.split()) == sorted(f"v{number}" for number in range(100))
    group = json.loads(run("group", "describe", "night", "--json").stdout)
    assert group["lag"] == 0
    assert run("maintain", "clicks", "--seal").returncode == 0
    assert run("topic", "truncate", "clicks", "--partition", 0, "--before", 1).returncode == 0
    described = json.loads(run("topic", "describe", "clicks", "--json").stdout)
    assert described["records"] == 99
    verified = run("verify")
    assert verified.returncode == 0, verified.stdout
    assert run("group", "delete", "night").returncode == 0
    assert run("topic", "delete", "clicks").returncode == 0
    assert run("topic", "list", "--json").stdout.strip() == "[]"


def test_the_version_and_the_help_are_printed(run: Run) -> None:
    assert run("--version").stdout.startswith("spark-log, version ")
    text = run("-h").stdout
    for command in ("topic", "produce", "consume", "verify", "info"):
        assert f"\n  {command} " in text


# On a terminal.


def test_a_listing_on_a_terminal_is_a_table(
    environment: dict[str, str], filled: broker.Log
) -> None:
    terminal = Terminal(environment, "topic", "list")
    assert terminal.finish() == 0
    assert "─" in terminal.output
    assert "orders" in terminal.output


def test_progress_is_shown_on_a_terminal_only(
    environment: dict[str, str], log: broker.Log, tmp_path: Path
) -> None:
    log.create_topic("orders")
    path = tmp_path / "lines"
    path.write_bytes(b"a line\n" * 5000)
    with path.open("rb") as lines:
        terminal = Terminal(environment, "produce", "orders", stdin=lines)
        assert terminal.finish() == 0
    assert "5,000 records" in terminal.output
    assert "34.2 KiB" in terminal.output
    assert len(values(log)) == 5000


def test_lines_are_typed_and_ended_with_control_d(
    environment: dict[str, str], log: broker.Log
) -> None:
    log.create_topic("orders")
    terminal = Terminal(environment, "produce", "orders")
    terminal.read_until("Ctrl-D ends")
    terminal.type("typed\n")
    wait_for_values(log, 1)
    terminal.type("\x04")
    assert terminal.finish() == 0
    assert values(log) == [b"typed"]


@pytest.mark.parametrize(("answer", "code", "is_there"), [("y\n", 0, False), ("n\n", 1, True)])
def test_a_delete_on_a_terminal_is_asked_about(
    environment: dict[str, str], filled: broker.Log, answer: str, code: int, is_there: bool
) -> None:
    terminal = Terminal(environment, "topic", "delete", "orders")
    terminal.read_until("Delete topic orders with 6 records? [y/N]")
    terminal.type(answer)
    assert terminal.finish() == code
    assert ("orders" in filled.topics()) == is_there


def test_a_delete_that_was_confirmed_is_not_asked_about(
    environment: dict[str, str], filled: broker.Log
) -> None:
    terminal = Terminal(environment, "topic", "delete", "orders", "--yes")
    assert terminal.finish() == 0
    assert filled.topics() == []


@pytest.mark.parametrize("timestamp", [4_000_000_000_000_000, (1 << 52) - 1])
def test_a_time_that_no_calendar_has_is_shown_as_a_number(
    run: Run, log: broker.Log, timestamp: int
) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        producer.send("orders", b"v", timestamp_ms=timestamp)
    done = run("consume", "orders", "--format", "table")
    assert done.returncode == 0
    assert f"{timestamp} ms" in done.stdout


def test_settings_of_a_group_are_described_as_such(run: Run, log: broker.Log) -> None:
    text = run("group", "alter", "--help").stdout
    assert "A group setting, as offsets.retention.minutes=1440." in " ".join(text.split())
    assert "A topic setting, as retention.ms=60000." in run("topic", "alter", "--help").stdout


def test_a_refusal_that_nobody_reads_is_one_all_the_same(
    environment: dict[str, str], log: broker.Log
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, "topic", "describe", "nope"], env=environment, stdout=write_end,
        stderr=write_end, timeout=60,
    )  # fmt: skip
    os.close(write_end)
    assert done.returncode == 1


def test_an_interrupt_while_the_command_is_loaded_ends_it_in_one_line(
    environment: dict[str, str],
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "spark_log_command", "topic", "list"]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stderr is not None
        # The library has begun to be imported, and most of it is still to come.
        while b"broker.errors" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read().decode()
    said = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, said) == (130, ["spark-log: interrupted"])
