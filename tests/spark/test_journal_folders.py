"""Folders: paths and URLs, and files that are written as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

from messaging.journal.folders import Folder, LocalFolder
from messaging.testing.tables import table
from pyspark_messaging.errors import (
    DataLossError,
    JournalCorruptError,
    JournalError,
    JournalLockedError,
    JournalUnreadableError,
    redacted,
)
from pyspark_messaging.journal import RowJournal
from pyspark_messaging.journal.folders import RemoteFolder, open_folder
from tests.spark.journals import SOURCE, add, check

fsspec = pytest.importorskip("fsspec")
local_files = pytest.importorskip("fsspec.implementations.local")
memory_files = pytest.importorskip("fsspec.implementations.memory")


def local(path: Path) -> Folder:
    return LocalFolder(str(path))


def subtree(path: Path) -> Folder:
    return RemoteFolder("sub://tree", fs.SubTreeFileSystem(str(path), fs.LocalFileSystem()), "a/b")


def through_fsspec(path: Path) -> Folder:
    filesystem = local_files.LocalFileSystem()
    return RemoteFolder("x://y", fs.PyFileSystem(fs.FSSpecHandler(filesystem)), str(path))


def memory(path: Path) -> Folder:
    return open_folder(f"memory://{path}")


every_folder = table("kind", [local, subtree, through_fsspec, memory])
Kind = Callable[[Path], Folder]


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def made(kind: Kind, path: Path) -> Folder:
    folder = kind(path)
    folder.make()
    return folder


# --- every folder


@every_folder
def test_files_are_written_listed_read_and_deleted(kind: Kind, tmp_path: Path) -> None:
    folder = made(kind, tmp_path)
    folder.make("0")
    folder.make("0")
    assert folder.write("0/x", [b"ab", memoryview(b"cd"), pa.py_buffer(b"ef")]) == 6
    assert folder.list("0") == {"x": 6}
    assert folder.list("nothing") == {}
    assert "0" not in folder.list()
    assert bytes(folder.read("0/x")) == b"abcdef"
    folder.write("0/x", [b"shorter"[:2]])
    assert bytes(folder.read("0/x")) == b"sh"
    folder.delete("0/x")
    folder.delete("0/x")
    assert folder.list("0") == {}
    with pytest.raises(FileNotFoundError):
        folder.read("0/x")


@every_folder
@table("copy", [False, True])
def test_parts_of_a_file_are_read_as_far_as_they_exist(kind: Kind, tmp_path: Path, copy: bool) -> None:
    folder = made(kind, tmp_path)
    data = os.urandom(10_000)
    folder.write("x", [data])
    for start, length in ((0, None), (0, 5), (4095, 2), (4096, 100), (8192, 5000), (9999, 1), (10_000, 1), (20_000, 9)):
        end = None if length is None else start + length
        assert bytes(folder.read("x", start, length, copy=copy)) == data[start:end]
    folder.write("empty", [])
    assert len(folder.read("empty", copy=copy)) == 0


@every_folder
def test_bytes_that_were_read_stay_valid_when_the_file_is_deleted(kind: Kind, tmp_path: Path) -> None:
    folder = made(kind, tmp_path)
    folder.write("x", [b"a" * 100_000])
    data = folder.read("x", 50_000)
    folder.delete("x")
    assert bytes(data) == b"a" * 50_000


@every_folder
def test_a_journal_works_on_every_file_system(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(kind, tmp_path)
    monkeypatch.setattr("pyspark_messaging.journal.journal.open_folder", lambda path: folder)
    for run in range(3):
        opened = RowJournal.open("it", SOURCE, segment_bytes=3000)
        assert opened.logs[0].end == run * 6
        add(opened.logs[0])
        add(opened.logs[0])
        check(opened)
        check(RowJournal.view("it"))
        opened.logs[0].commit(opened.logs[0].end - 1)
        opened.close()


# --- local


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(str(tmp_path))
    folder.write("x", [b"before"])

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.ENOSPC, "no")

    with pytest.raises(OSError, match="no"):
        folder.write("x", broken())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="sync"):
            folder.write("x", [b"after"])
    assert folder.list() == {"x": 6}
    assert bytes(folder.read("x")) == b"before"


def fail(file: int) -> None:
    raise OSError(errno.EIO, "sync")


def test_an_appender_that_failed_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appender = LocalFolder(str(tmp_path)).append_to("x")
    appender.append([b"", b"abc", b"", b"def"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="sync"):
            appender.append([b"more"])
    assert ((tmp_path / "x").read_bytes(), appender.size) == (b"abcdef", 6)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="nothing was written"):
            appender.append([b"more"])
    appender.append([b"g"])
    appender.close()
    appender.close()
    assert (tmp_path / "x").read_bytes() == b"abcdefg"


def test_an_appender_writes_all_however_little_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, views, at: real(file, [b"".join(views)[:7]], at))
    appender = LocalFolder(str(tmp_path)).append_to("x")
    parts = [bytes([n]) * (n % 11) for n in range(200)]
    appender.append(parts)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)
    assert appender.size == sum(map(len, parts))
    appender.close()


def test_a_folder_above_that_may_not_be_read_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "no", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    LocalFolder(str(tmp_path / "x")).make()
    assert (tmp_path / "x").is_dir()


# --- paths


@table("name", ["plain", "with space", "100%", "a%20b", "grün-日本", "a:b", "a#b?c=d", "x://"[:2]])
def test_any_name_is_a_local_folder(tmp_path: Path, name: str) -> None:
    folder = open_folder(str(tmp_path / name))
    folder.make()
    assert isinstance(folder, LocalFolder)
    assert (tmp_path / name).is_dir()
    again = open_folder((tmp_path / name).as_uri())
    assert again.path == folder.path == str(tmp_path / name)
    assert open_folder(folder.path).path == folder.path


def test_relative_paths_and_the_home_of_the_user_are_absolute_for_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_folder("journal").path == str(tmp_path / "journal")
    assert open_folder("./a/b").path == str(tmp_path / "a" / "b")
    assert open_folder("~/journal").path == str(tmp_path / "home" / "journal")
    opened = RowJournal.open("journal", SOURCE)
    assert opened.folder.path == str(tmp_path / "journal")
    opened.close()


@table("url", ["file:///{}", "file:/{}", "file://localhost/{}", "FILE:///{}", "local:///{}"])
def test_urls_of_local_folders(tmp_path: Path, url: str) -> None:
    folder = open_folder(url.format(str(tmp_path).lstrip("/")))
    assert isinstance(folder, LocalFolder)
    assert folder.path == str(tmp_path)


@table(
    "path, what",
    [
        ("file://host/x", "looks like file:///folder"),
        ("file:x", "looks like file:///folder"),
        ("dbfs:/x", "looks like scheme://"),
        ("nosuch://x/y", "no such file system.*nosuch"),
        ("://x", "looks like scheme://"),
        ("", "looks like scheme://"),
        ("~nosuchuser/x", "home"),
        ("a\0b", "NUL"),
    ],
)
@table("attempt", [open_folder, lambda path: RowJournal.open(path, SOURCE), RowJournal.view])
def test_paths_that_are_no_folder_are_refused(path: str, what: str, attempt: Callable[[str], Any]) -> None:
    with pytest.raises(JournalUnreadableError, match=f"(?s)journalPath.*{what}"):
        attempt(path)


def test_without_fsspec_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(JournalUnreadableError, match="fsspec is not installed"):
        open_folder("memory://x")


# --- secrets


@table(
    "path",
    [
        "nosuch://key:sEcReT@bucket/x",
        "nosuch://key:sEc/ReT@bucket/x",
        "nosuch://key:sEc ReT@bucket/x y",
        "nosuch://key:sE@cReT@bucket/x",
        "nosuch://bucket/x?secret_key=sEcReT&region=eu",
        "sftp://me:sEcReT@127.0.0.1:1/x",
    ],
)
def test_no_error_shows_the_keys_of_a_store(path: str) -> None:
    with pytest.raises(JournalUnreadableError) as caught:
        RowJournal.open(path, SOURCE)
    shown = "".join(map(str, (caught.value, caught.value.path, repr(caught.value))))
    assert "ReT" not in shown
    assert "sE" not in shown
    assert "journalPath" in shown
    folder = RemoteFolder(path, fs.LocalFileSystem(), "/")
    for error in (DataLossError(f"gone from ({path})"), folder.error(JournalCorruptError, f"no {path}")):
        assert "ReT" not in repr(error) + str(error)


def test_paths_without_secrets_are_shown() -> None:
    for text in ("/a@b/c", "s3://bucket/x?region=eu", "url was 'mqtt://a:1' and is 'mqtt://b:1'"):
        assert redacted(text) == text


def test_errors_come_from_executors_as_they_are() -> None:
    for error in (
        JournalCorruptError("/a): b", "c (x): d"),
        JournalLockedError("s3://k:s@b", "no"),
        DataLossError("x"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert str(JournalError("/x", "no", "journalPath")) == "option 'journalPath' (/x): no"


# --- object stores


def test_errors_of_clients_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        pass

    class Broken(memory_files.MemoryFileSystem):  # type: ignore[misc]
        cachable = False

        def _open(self, *arguments: Any, **more: Any) -> Any:
            raise ClientError("slow down")

    folder = RemoteFolder("s3://bucket", fs.PyFileSystem(fs.FSSpecHandler(Broken())), "bucket")
    with pytest.raises(OSError, match="ClientError: slow down"):
        folder.write("x", [b""])


def test_files_of_object_stores_do_not_grow() -> None:
    folder = open_folder("memory://x")
    assert not folder.appends
    with pytest.raises(NotImplementedError):
        folder.append_to("x")


def test_pyarrow_knows_file_systems_of_its_own() -> None:
    folder = open_folder("mock:///x")
    assert isinstance(folder, RemoteFolder)
    folder.make("0")
    folder.write("0/a", [b"1"])
    assert folder.list("0") == {"a": 1}


def test_the_lock_of_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(JournalUnreadableError, match="No locks available"):
        RowJournal.open(str(tmp_path), SOURCE)
