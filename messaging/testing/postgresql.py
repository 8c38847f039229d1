"""A private PostgreSQL for tests and benchmarks: own port, own data, gone afterwards.

::

    with PostgreSQL() as server:
        engine = sqlalchemy.create_engine(server.create_database())
        ...
        server.kill()  # SIGKILL
        server.start()  # same port, same data

It listens on 127.0.0.1 only, with a random password. PostgreSQL refuses to run as root: a superuser runs it as the user
``postgres``, or as ``daemon``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from messaging.testing.brokers import STOP_TIMEOUT, Broker, BrokerError, accepts, find_postgresql

_HOW_TO: Final = "install it with the system's package manager (in this project's sources, `make test` does)"
_USERS: Final = ("postgres", "daemon")
_PROGRAM_TIMEOUT: Final = 60.0
_READY: Final = "database system is ready to accept connections"


class PostgreSQL(Broker):
    """A PostgreSQL server. Not thread safe. Its superuser is ``postgres``.

    Args:
        config_lines: for postgresql.conf; they come after the defaults and win.
        durable: sync files as in production: slower, but nothing that is committed is lost when the machine stops.
            ``kill`` loses nothing that is committed either way.
    """

    name = "postgresql"
    scheme = "postgresql"
    start_timeout = 60.0

    def __init__(self, config_lines: Iterable[str] = (), *, durable: bool = False) -> None:
        super().__init__()
        self._lines = list(config_lines)
        self._durable = durable
        self._password = secrets.token_hex(16)
        self._data = self.directory / "data"
        self._user = _unprivileged() if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.directory, self._user)

    @property
    def url(self) -> str:
        """Return ``postgresql://postgres:PASSWORD@127.0.0.1:PORT/postgres``."""
        return self.database_url("postgres")

    @property
    def password(self) -> str:
        """Return the password of the user ``postgres``."""
        return self._password

    def database_url(self, database: str) -> str:
        """Return the URL of a database; the driver is psycopg 3."""
        return f"postgresql+psycopg://postgres:{self._password}@{self.host}:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database and return its URL; it takes about 50 ms.

        Raises:
            BrokerError: the server is not running.
        """
        name = f"test_{secrets.token_hex(6)}"
        self._execute("createdb", "--host", self.host, "--port", str(self.port), "--username", "postgres", name)
        return self.database_url(name)

    def stop(self) -> None:
        """End all sessions, shut down and wait; SIGKILL after ``STOP_TIMEOUT`` seconds."""
        self.end_process(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the server and all its processes, and wait until they have ended."""
        processes = self._children()
        super().kill()
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        # a new server refuses to start beside the processes of the old one
        while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _children(self) -> list[int]:
        if not self.running:
            return []
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:  # no Linux: the processes notice the end of the server by themselves
            return []
        return [int(each) for each in text.split()]

    def _launch(self) -> None:
        server = find_postgresql()
        if server is None:
            raise BrokerError(f"postgresql is not installed: {_HOW_TO}")
        if not (self._data / "PG_VERSION").exists():
            self._initialize()
        defaults = ["max_connections = 200", "shared_buffers = 32MB", "unix_socket_directories = ''"]
        if not self._durable:
            defaults += ["fsync = off", "full_page_writes = off"]
        lines = [f"listen_addresses = '{self.host}'", f"port = {self.port}", *defaults, *self._lines]
        config = self._data / "postgresql.auto.conf"
        config.write_text("\n".join(lines) + "\n")
        if self._user is not None:
            shutil.chown(config, self._user)
        self._process = self.spawn(server, "-D", str(self._data), env=_environment(), user=self._user)

    def _initialize(self) -> None:
        shutil.rmtree(self._data, ignore_errors=True)
        file = self.directory / "password"
        file.touch(0o600)
        file.write_text(self._password)
        if self._user is not None:
            shutil.chown(file, self._user)
        options = ["--username=postgres", f"--pwfile={file}", "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        self._execute("initdb", *options, "--no-sync", f"--pgdata={self._data}")
        file.unlink()

    def _execute(self, program: str, *arguments: str) -> None:
        path = find_postgresql(program)
        if path is None:
            raise BrokerError(f"{program} is not installed: {_HOW_TO}")
        try:
            subprocess.run(
                [path, *arguments],
                cwd=self.directory,
                env=_environment() | {"PGPASSWORD": self._password},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROGRAM_TIMEOUT,
                check=True,
                user=self._user,
                group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
                extra_groups=None if self._user is None else (),
            )
        except subprocess.TimeoutExpired as error:
            raise BrokerError(f"{program} took longer than {_PROGRAM_TIMEOUT:g} s") from error
        except subprocess.CalledProcessError as error:
            raise BrokerError(f"{program}: exit {error.returncode}\n{error.stdout}{error.stderr}") from error

    def _answers(self) -> bool:
        # another process may have the port; the log tells that it is this server
        return _READY in self.log(self.log_start) and accepts(self.port)


def _unprivileged() -> str:
    for name in _USERS:
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise BrokerError(f"PostgreSQL does not run as root, and there is no user {' or '.join(_USERS)}")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
