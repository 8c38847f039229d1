"""The private PostgreSQL: it keeps what is committed, listens on the loopback only, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from messaging.testing.brokers import BrokerError, require
from messaging.testing.postgresql import PostgreSQL
from messaging.testing.waiting import eventually
from tests.processes import has_ended
from tests.scripts import ROOT
from tests.testing.test_brokers import listening


@pytest.fixture(autouse=True)
def _installed() -> None:
    require("postgresql")


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(url.replace("+psycopg", ""))


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_it_comes_back_with_its_port_and_data(how: str) -> None:
    with PostgreSQL() as server:
        port, pid, url = server.port, server.pid, server.create_database()
        with connect(url) as connection:  # commits
            connection.execute("CREATE TABLE kept AS SELECT 7 AS it")
        connection.close()
        getattr(server, how)()
        assert has_ended(pid)
        assert not listening(port)
        server.start()
        assert server.port == port
        with connect(url) as connection:
            assert connection.execute("SELECT it FROM kept").fetchall() == [(7,)]
        connection.close()


def test_it_is_reached_with_the_password_and_on_the_loopback_only(postgresql: PostgreSQL) -> None:
    with connect(postgresql.url) as connection:
        shown = connection.execute(
            "SELECT current_setting('listen_addresses'), current_setting('unix_socket_directories')"
        ).fetchall()
    connection.close()
    assert shown == [("127.0.0.1", "")]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(postgresql.url.replace(postgresql.password, "wrong"))


def test_it_does_not_run_as_root(postgresql: PostgreSQL) -> None:
    assert Path(f"/proc/{postgresql.pid}").stat().st_uid != 0


def test_each_test_has_a_database_of_its_own(postgresql: PostgreSQL) -> None:
    first, second = postgresql.create_database(), postgresql.create_database()
    with connect(first) as connection:
        connection.execute("CREATE TABLE it ()")
    connection.close()
    with connect(second) as connection:
        assert connection.execute("SELECT to_regclass('it')").fetchall() == [(None,)]
    connection.close()


def test_settings_of_the_caller_win() -> None:
    with PostgreSQL(["max_connections = 7"], durable=True) as server:
        with connect(server.url) as connection:
            found = connection.execute("SELECT current_setting('max_connections'), current_setting('fsync')").fetchall()
        connection.close()
    assert found == [("7", "on")]


def test_a_wrong_setting_is_told_with_the_log() -> None:
    with pytest.raises(BrokerError, match="no_such_setting"), PostgreSQL(["no_such_setting = 1"]):
        pass


def test_it_ends_with_the_process_that_started_it() -> None:
    code = "from messaging.testing.postgresql import PostgreSQL; import os, sys, time\n"
    code += "s = PostgreSQL(); s.start(); print(s.pid, s.directory, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    pid, directory = done.stdout.split()
    eventually(lambda: has_ended(pid))
    eventually(lambda: not Path(directory).exists())
    assert os.geteuid() != 0 or done.returncode == -9
