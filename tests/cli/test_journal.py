"""``messaging journal``: what it shows, verifies, exports and deletes."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messaging.journal import Journal, State, encode_record
from messaging.journal.folders import LocalFolder
from messaging.journal.identity import key_of, seed_with
from messaging.journal.log import LogWriter
from messaging.model import Message, MessageContext
from messaging.testing.tables import table
from tests.cli.conftest import Run, refused
from tests.cli.program import Program


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "outbox")


@pytest.fixture
def filled(path: str) -> str:
    """A journal of eight records in several segments, with two cursors and a dead letter."""
    with Journal.open(path, segment_bytes=1) as journal:
        for n in range(6):
            journal.append(f"a/{n % 2}", b"text %d" % n, timestamp=n)
        journal.append("b", b"\xff\x1b", timestamp=6)
        context = MessageContext("c", "key", "text/plain", None, "corr", "reply", {"qos": 1, "headers": {"k": "v"}})
        journal.append_message(Message("é\x1b[31m\n".encode(), context), message_id="m1")
        journal.cursor("slow", 3)
        journal.cursor("fast", "latest")
    state = State(Path(path))
    state.add_dead_letter("UnroutableError: nobody", 2, encode_record("a/0", b"dead", timestamp=2), most=10)
    state.close()
    return path


def lines(run: Run, *arguments: str) -> list[Any]:
    """Run a command that writes lines of JSON."""
    code, out, err = run("journal", *arguments)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def spark_journal(path: str) -> list[Path]:
    """What a Spark query of two partitions writes, as far as frames are concerned."""
    folder = LocalFolder(path)
    folder.make()
    Path(path, "journal.json").write_text('{"format": 1, "id": "s1", "source": {}}')
    for partition in (0, 1):
        log = LogWriter(folder, partition, head=b"a schema", segment_bytes=1, seed=seed_with(key_of("s1"), partition))
        for n in range(3):
            log.append_frame(5, [b"body %d" % n])
        log.close()
    return sorted(Path(path).glob("*/*.segment"))


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# --- info


def test_info_shows_offsets_cursors_and_drops(run: Run, filled: str) -> None:
    (found,) = lines(run, "info", filled, "--json")
    assert found["kind"] == "records"
    assert found["partitions"] == [{"partition": 0, "begin": 0, "end": 8}]
    assert found["cursors"] == {"slow": 3, "fast": 8}
    assert (found["dead_letters"], found["dropped"], found["damage"]) == (1, 0, [])
    code, out, err = run("journal", "info", filled)
    assert (code, err) == (0, "")
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    shown = {key.strip(): value.strip() for key, value in rows.items()}
    assert (shown["offsets"], shown["cursor slow"], shown["cursor fast"]) == ("0 to 8", "3, 5 behind", "8, 0 behind")
    assert (shown["dead letters"], shown["dropped"]) == ("1", "0")


def test_info_and_verify_know_the_journal_of_a_spark_query_and_the_others_refuse_it(run: Run, path: str) -> None:
    files = spark_journal(path)
    (found,) = lines(run, "info", path, "--json")
    assert found["kind"] == "a Spark query"
    assert [(each["begin"], each["end"]) for each in found["partitions"]] == [(0, 15), (0, 15)]
    assert "partition 1" in run("journal", "info", path)[1]
    assert run("journal", "verify", path)[::2] == (0, "")
    for arguments in (("read",), ("export",), ("trim", "--before", "1")):
        name, *more = arguments
        text = refused(run, "journal", name, path, *more, code=1)
        assert "it is the journal of a Spark query, and not one of messages" in text
    damage(files[4], -1)
    code, out, _ = run("journal", "verify", path, "--json")
    (place,) = json.loads(out)["damage"]
    assert (code, place["partition"], place["segment"]) == (1, 1, f"1/{files[4].name}")
    assert (place["first"], place["until"]) == (5, 10)


def test_info_and_verify_pass_no_partition_behind_an_empty_one(run: Run, path: str) -> None:
    files = spark_journal(path)
    for file in files:
        if file.parent.name == "0":
            file.unlink()
    (found,) = lines(run, "info", path, "--json")
    assert [(each["begin"], each["end"]) for each in found["partitions"]] == [(0, 0), (0, 15)]
    damage(files[4], -1)
    code, out, _ = run("journal", "verify", path, "--json")
    (place,) = json.loads(out)["damage"]
    assert (code, place["partition"]) == (1, 1)


@table("command", [["info"], ["read"], ["verify"], ["export"], ["trim", "--before", "1"]], ids=str)
def test_a_folder_without_a_journal_is_refused_and_nothing_is_created(run: Run, path: str, command: list[str]) -> None:
    name, *more = command
    assert "there is no journal: no file journal.json" in refused(run, "journal", name, path, *more, code=1)
    assert not Path(path).exists()


# --- read


def test_read_writes_one_plain_line_for_each_record(run: Run, filled: str) -> None:
    code, out, err = run("journal", "read", filled)
    assert (code, err) == (0, "")
    found = out.splitlines()
    assert found[1] == "1  1970-01-01T00:00:01.000+00:00  a/1  text 1"
    assert found[6].endswith("b  (2 bytes)")
    assert found[7].endswith("c  é\\x1b[31m\\n")
    assert len(found) == 8


def test_read_selects_records(run: Run, filled: str) -> None:
    def offsets(*arguments: str) -> list[int]:
        return [each["offset"] for each in lines(run, "read", filled, "--json", *arguments)]

    assert offsets() == list(range(8))
    assert offsets("--from", "5") == [5, 6, 7]
    assert offsets("--from", "8") == []
    assert offsets("--limit", "2") == [0, 1]
    assert offsets("--cursor", "slow", "--limit", "2") == [3, 4]
    assert offsets("-t", "a/1") == [1, 3, 5]
    assert offsets("-t", "a/+", "-n", "4") == [0, 1, 2, 3]
    assert "cursor slow" in run("journal", "info", filled)[1]
    with Journal.view(filled) as view:
        assert view.cursors()["slow"] == 3  # reading moves no cursor


def test_read_and_export_write_the_whole_context(run: Run, filled: str) -> None:
    for command in (("read", "--json"), ("export",)):
        *_, binary, last = lines(run, *command, filled)
        assert base64.b64decode(binary["payload_base64"]) == b"\xff\x1b"
        assert last == {
            "offset": 7, "timestamp": last["timestamp"], "channel": "c", "message_id": "m1",
            "channel_extension": "key", "content_type": "text/plain", "correlation_id": "corr", "reply_to": "reply",
            "extensions": {"qos": 1, "headers": {"k": "v"}}, "payload": "é\x1b[31m\n",
        }  # fmt: skip


def test_read_writes_dead_letters_with_their_reason(run: Run, filled: str) -> None:
    (letter,) = lines(run, "read", filled, "--dead-letters", "--json")
    assert (letter["reason"], letter["offset"], letter["payload"]) == ("UnroutableError: nobody", 2, "dead")
    assert "a/0  dead  (UnroutableError: nobody)" in run("journal", "read", filled, "--dead-letters")[1]
    assert lines(run, "read", filled, "--dead-letters", "--json", "-t", "x") == []


@table(
    "arguments, expected",
    [
        (("--from", "1", "--cursor", "slow"), "give one of them"),
        (("--dead-letters", "--follow"), "--dead-letters does not go with"),
        (("--cursor", "nope"), "there is no cursor 'nope'; there are: fast, slow"),
        (("-t", "a/#/b"), "#"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_read_refuses_what_makes_no_sense(run: Run, filled: str, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(run, "journal", "read", filled, *arguments)


def test_read_from_an_offset_that_was_deleted_says_what_is_there(run: Run, filled: str) -> None:
    assert run("journal", "trim", filled, "--before", "3")[0] == 0
    assert "offset 0 is asked for, and 3 to 8 are there" in refused(
        run, "journal", "read", filled, "--from", "0", code=1
    )


def test_follow_goes_on_with_the_records_of_a_writer(path: str) -> None:
    with Journal.open(path, segment_bytes=200) as journal:
        journal.append("a", b"before")
        with Program("journal", "read", path, "--follow") as program:
            program.out.until(lambda line: line.endswith(b"before\n"))
            for n in range(10):
                journal.append("a", b"new %d" % n)
                program.out.until(lambda line, n=n: line.endswith(b"new %d\n" % n))  # type: ignore[misc]
            program.signal(signal.SIGINT)
            assert program.ended() == 130


# --- verify


def test_verify_reports_each_place_with_its_range_and_fails(run: Run, filled: str) -> None:
    assert run("journal", "verify", filled)[::2] == (0, "")
    files = sorted(Path(filled).glob("0/*.segment"))
    assert len(files) > 2
    damage(files[0], -1)
    damage(files[1], -1)
    code, out, err = run("journal", "verify", filled)
    assert (code, err.count("\n")) == (1, 1)
    assert "2 places are damaged; the rest is readable" in err
    found = out.splitlines()[1:]
    assert [line.split(":")[0] for line in found] == [f"0/{file.name}" for file in files[:2]]
    assert all("1 records are lost, offsets" in line for line in found)
    code, out, _ = run("journal", "verify", filled, "--json")
    assert (code, len(json.loads(out)["damage"]), json.loads(out)["records"]) == (1, 2, 6)


def test_verify_and_read_of_a_journal_with_a_damaged_database(run: Run, filled: str) -> None:
    Path(filled, "state.db").write_bytes(b"no database" * 1000)
    code, out, err = run("journal", "verify", filled)
    assert (code, out.startswith("8 intact records")) == (1, True)
    assert "cannot open state.db" in err
    code, out, err = run("journal", "read", filled)
    assert (code, len(out.splitlines())) == (0, 8)
    assert "cursors and dead letters are not known" in err


def test_verify_of_a_write_in_progress_finds_no_damage(run: Run, filled: str) -> None:
    with max(Path(filled).glob("0/*.segment")).open("ab") as file:
        file.write(b"RXJ1 half a header")
    code, out, err = run("journal", "verify", filled)
    assert (code, err) == (0, "")
    assert "18 bytes of an unfinished write at the end: no stored record is lost" in out


def test_verify_and_read_work_beside_a_writer(run: Run, path: str) -> None:
    with Journal.open(path) as journal:
        journal.append("a", b"x")
        assert run("journal", "verify", path)[0] == 0
        assert len(lines(run, "read", path, "--json")) == 1
        assert "another writer has this journal open" in refused(run, "journal", "trim", path, "--before", "1", code=1)
        assert journal.append("a", b"y") == 1


# --- export


def test_exported_payloads_are_the_input_of_pub(run: Run, filled: str) -> None:
    code, out, err = run("journal", "export", filled, "--payloads", "-t", "a/1")
    assert (code, out, err) == (0, "text 1\ntext 3\ntext 5\n", "")
    with Program("pub", "memory://export", "-t", "a/1", "-l") as pub:
        pub.send(out.encode())
        pub.end_input()
        assert (pub.ended(), b"published 3 messages" in pub.err.rest()) == (0, True)
    code, out, err = run("journal", "export", filled, "--payloads", "-t", "c")
    assert (code, out) == (2, "")
    assert "the payload at offset 7 has a newline; export JSON" in err


# --- trim


def test_trim_deletes_whole_segments_and_cursors_keep_theirs(run: Run, filled: str) -> None:
    code, out, err = run("journal", "trim", filled, "--before", "2")
    assert (code, out) == (0, "")
    assert "deleted 2 records; 2 to 8 are there" in err
    code, _, err = run("journal", "trim", filled, "--before", "99")
    assert code == 0
    assert "cursor 'slow' keeps the records from 3 on" in err
    (found,) = lines(run, "info", filled, "--json")
    assert found["partitions"][0]["begin"] == 3


def test_trim_behind_a_cursor(run: Run, filled: str) -> None:
    assert lines(run, "trim", filled, "--cursor", "slow", "--json") == [{"deleted": 3, "begin": 3, "end": 8}]
    assert "there is no cursor" in refused(run, "journal", "trim", filled, "--cursor", "nope")
    for arguments in ((), ("--before", "1", "--cursor", "slow")):
        assert "exactly one of --before and --cursor" in refused(run, "journal", "trim", filled, *arguments)


@pytest.fixture(autouse=True)
def _no_journal_left_open(path: str) -> Iterator[None]:
    """Each command releases the lock."""
    yield
    if Path(path, "journal.json").exists() and not Path(path, "1").exists():
        Journal.open(path).close()


def test_purge_deletes_all_records_and_moves_cursors(run: Run, filled: str) -> None:
    (before,) = lines(run, "info", filled, "--json")
    (begin, end), count = (before["partitions"][0][each] for each in ("begin", "end")), len(before["cursors"])
    assert lines(run, "purge", filled, "--json") == [{"deleted": end - begin, "begin": end, "end": end}]
    (after,) = lines(run, "info", filled, "--json")
    assert [*after["cursors"].values()] == [end] * count
    assert lines(run, "read", filled, "--json") == []


def test_repair_restores_a_changed_identity(run: Run, filled: str) -> None:
    meta = Path(filled, "journal.json")
    intact = meta.read_bytes()
    damage(meta, intact.index(b'"id"') + 8)
    assert "messaging journal repair" in refused(run, "journal", "info", filled, code=1)
    code, _, err = run("journal", "repair", filled)
    assert (code, meta.read_bytes()) == (0, intact), err
    assert len(lines(run, "read", filled, "--json")) > 0


def test_verify_and_trim_are_content_with_damage_that_is_in_quarantine(run: Run, filled: str) -> None:
    files = sorted(Path(filled).glob("0/*.segment"))
    damage(files[0], -1)
    damage(files[1], -1)
    assert run("journal", "verify", filled)[0] == 1
    with Journal.open(filled) as journal:
        assert len([*journal.read()]) == 6
    code, out, err = run("journal", "verify", filled)
    assert (code, err, out.count("copied to quarantine")) == (0, "", 2)
    code, _, err = run("journal", "trim", filled, "--before", "1")
    assert (code, "damage" in err) == (0, False)
    damage(sorted(Path(filled).glob("0/*.segment"))[0], -1)
    assert run("journal", "verify", filled)[0] == 1
