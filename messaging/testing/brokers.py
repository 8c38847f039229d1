"""Private brokers for tests and benchmarks: own port, own configuration, own data, gone afterwards.

::

    with Mosquitto(["max_inflight_messages 5"]) as broker, messaging.connect(broker.url) as m:
        ...
        broker.kill()  # SIGKILL
        broker.start()  # same port, same data

Brokers listen on 127.0.0.1 only, run as the current user and are stopped by process group. Each has a guard, a
shell waiting on a pipe that only this process holds open: however this process ends, SIGKILL included, the guard
kills the broker and removes its directory.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import hashlib
import json
import math
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HOST: Final = "127.0.0.1"
#: in the log of Mosquitto
_RELOADING: Final = "Reloading config"
STOP_TIMEOUT: Final = 30.0
CTL_TIMEOUT: Final = 60.0

#: Below the ports that systems give to outgoing connections: from that range, a client that retries the port of a
#: stopped broker may be given the same port as its own, connect to itself, and keep the broker from returning.
_PORTS: Final = range(15_000, 32_000)
#: ports given out by this process, and the file descriptors that hold them
_issued: Final[dict[int, int | None]] = {}

#: environment variable: a file to which each start of a broker, in whatever process, adds a line with its kind, and
#: with "again" unless it is the first of that broker
STARTS: Final = "RX_MESSAGING_BROKER_STARTS"

_GUARD: Final = """trap '' HUP INT TERM; read -r _ && exit 0; kill -s KILL -- "-$1"; sleep 1; rm -rf -- "$2" """

_HOW_TO: Final = "install it with the system's package manager (in this project's sources, `make test` does)"


class BrokerError(RuntimeError):
    """A broker did not start, or does not answer. The message holds the end of its log."""


def free_port() -> int:
    """Return a free TCP port of the loopback interface; never the same one twice.

    The port is held by a socket that does not listen: until this process ends, or :func:`release_port`, no other
    process is given it, connections to it are refused, and a server that sets ``SO_REUSEADDR`` can listen on it.
    """
    for _ in range(1_000):
        port = random.choice(_PORTS)
        if port in _issued:
            continue
        holder = socket.socket()
        try:
            holder.bind((HOST, port))  # exclusively: fails beside another holder
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on servers may share it
        _issued[port] = holder.detach()
        return port
    raise BrokerError("no free port found")


def release_port(port: int) -> None:
    """Let other processes have a port of :func:`free_port`; this process is not given it again. Idempotent."""
    holder = _issued.get(port)
    if holder is not None:
        _issued[port] = None
        os.close(holder)


def find_mosquitto() -> str | None:
    """Return the path of the mosquitto binary. Distributions install it outside a normal user's PATH."""
    return shutil.which("mosquitto", path=_search_path())


def find_rabbitmq(command: str = "rabbitmq-server") -> str | None:
    """Return the path of one of RabbitMQ's own scripts.

    Debian's and Fedora's wrappers in /usr/sbin switch to the user ``rabbitmq``, so the scripts behind them come first,
    those beside the plugins before all.
    """
    versions = sorted(map(str, Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")), reverse=True)
    homes = [os.environ.get("RABBITMQ_HOME", ""), *versions, "/usr/lib/rabbitmq", "/opt/rabbitmq"]
    own = os.pathsep.join(f"{home}/{folder}" for home in homes if home for folder in ("sbin", "bin"))
    return shutil.which(command, path=own) or shutil.which(command, path=_search_path())


def find_postgresql(program: str = "postgres") -> str | None:
    """Return the path of a program of the PostgreSQL server; distributions install it outside ``PATH``."""
    patterns = ("/usr/lib/postgresql/*/bin", "/usr/libexec/postgresql*", "/opt/homebrew/opt/postgresql*/bin",
                "/usr/local/opt/postgresql*/bin")  # fmt: skip
    found = [str(each) for pattern in patterns for each in Path("/").glob(pattern[1:])]
    newest_first = sorted(found, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder)], reverse=True)
    folders = [os.environ.get("POSTGRESQL_BIN", ""), *newest_first, os.environ.get("PATH", os.defpath)]
    return shutil.which(program, path=os.pathsep.join(filter(None, folders)))


def require(*names: str) -> None:
    """Skip the running test unless the brokers ``names`` are installed; fail it where ``CI`` is ``true``."""
    import pytest

    finders: dict[str, Callable[[], str | None]] = {
        "mosquitto": find_mosquitto,
        "rabbitmq": find_rabbitmq,
        "postgresql": find_postgresql,
    }
    for name in names:
        if finders[name]() is None:
            say: Callable[[str], NoReturn] = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            say(f"{name} is not installed: {_HOW_TO}")


class Broker(abc.ABC):
    """A broker process. Not thread safe.

    Entering the context starts it; leaving stops it and removes its data. ``start`` and ``close`` do the same.

    Attributes:
        host: of the loopback interface.
        port: of the main listener, constant for the life of the object.
        directory: configuration, data and log.
    """

    name: str
    scheme: str
    start_timeout: float

    def __init__(self, host: str = HOST, port: int | None = None) -> None:
        self.host = host
        self.port = port or free_port()
        self._holds_port = port is None
        self.directory = Path(tempfile.mkdtemp(prefix=f"rx-messaging-{self.name}-"))
        self._log_file = self.directory / "broker.log"
        self.log_start = 0
        self._process: _Process | None = None
        self._started_before = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to use the broker: everything but the process."""
        return {**self.__dict__, "_process": None}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "stopped"
        return f"<{type(self).__name__} {self.host}:{self.port} {state}>"

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Return the URL, credentials included."""

    @property
    def pid(self) -> int:
        """Return the process id of the broker proper, not of a script around it.

        Raises:
            BrokerError: it is not running.
        """
        if self._process is None:
            raise BrokerError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the broker process is running."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, on the same port and data as before, and wait until it answers. Nothing happens if it is running.

        Raises:
            BrokerError: it ended or did not answer within ``start_timeout`` seconds.
        """
        if self.running:
            return
        self.kill()  # processes left of a broker that ended by itself
        _count_start(self.name, again=self._started_before)
        for attempts_left in (2, 1, 0):
            try:
                self.log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
                self._launch()
                self.wait_ready()
            except BaseException as error:
                self.kill()
                # Another process took the port between looking and listening. Later starts must not move to another.
                clash = isinstance(error, BrokerError) and re.search(
                    "address.*in use|eaddrinuse", self.log(self.log_start), re.I
                )
                if not clash or self._started_before or not attempts_left:
                    raise
                self._change_ports()
            else:
                self._started_before = True
                return

    def stop(self) -> None:
        """SIGTERM and wait; SIGKILL after ``STOP_TIMEOUT`` seconds. Nothing happens if it is not running."""
        self.end_process(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL and wait: nothing is flushed, no connection is closed in good order."""
        self.end_process(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start, on the same port and data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop for good and remove the directory. Idempotent."""
        self.stop()
        self._release_ports()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url_at(self, host: str, port: int) -> str:
        """Return :attr:`url` for clients that reach the broker at another address, such as a proxy."""
        parts = urlsplit(self.url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials}{at}{host}:{port}").geturl()

    @property
    def answers(self) -> bool:
        """Return whether it is running and can be used; within about a second."""
        return self.running and self._answers()

    def log(self, start: int = 0) -> str:
        """Return the log so far, earlier runs included, from the byte ``start`` on."""
        if not self._log_file.exists():
            return ""
        with self._log_file.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds (``start_timeout`` without) until the broker answers.

        Raises:
            BrokerError: it ended, or time is up.
        """
        timeout = self.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while not self._answers():
            if not self.running:
                raise self._error("ended while starting")
            if time.monotonic() > deadline:
                raise self._error(f"does not answer after {timeout:g} s")
            time.sleep(0.02)

    @abc.abstractmethod
    def _launch(self) -> None:
        """Write the configuration and start the process."""

    @abc.abstractmethod
    def _answers(self) -> bool:
        """Return whether the broker can be used; within about a second."""

    def _change_ports(self) -> None:
        self._release_ports()
        self.port = free_port()
        self._holds_port = True

    def _release_ports(self) -> None:
        if self._holds_port:
            release_port(self.port)

    def end_process(self, how: signal.Signals) -> None:
        """End the server with a signal, and wait until it has ended."""
        if self._process is not None:
            self._process.end(how)
            self._process = None

    def spawn(self, *command: str, env: dict[str, str] | None = None, user: str | None = None) -> _Process:
        """Start the server, whose output goes to the log."""
        return _Process(command, env, self._log_file, self.directory, user)

    def _error(self, what: str) -> BrokerError:
        return BrokerError(
            f"{self.name} on port {self.port} {what}. Its log ends with:\n{self.log(self.log_start)[-4_000:]}"
        )


class Mosquitto(Broker):
    """Mosquitto with one listener, unlimited queues and no access control.

    Args:
        config_lines: for mosquitto.conf, after the listener. A line with the keyword of a default replaces it.
            ``log_dest`` must stay as it is, and ``log_type`` include ``information``.
        host, port: of the listener; by default 127.0.0.1 and a free port.
        persistence: keep sessions, queues and retained messages over a restart, and over ``kill`` except for the
            last tenth of a second: every change is written when the broker gets round to it, which is slow.
    """

    name = "mosquitto"
    scheme = "mqtt"
    start_timeout = 15.0

    def __init__(
        self,
        config_lines: Iterable[str] = (),
        *,
        persistence: bool = False,
        host: str = HOST,
        port: int | None = None,
    ) -> None:
        super().__init__(host, port)
        self._lines = list(config_lines)
        defaults = ["allow_anonymous true", "max_queued_messages 0", "max_queued_bytes 0"]
        if os.geteuid() == 0:
            defaults.append("user root")  # else it becomes the user mosquitto, who must not enter our directory
        if persistence:
            defaults += [
                "persistence true",
                f"persistence_location {self.directory}/",
                "autosave_on_changes true",
                "autosave_interval 1",
            ]
        self._defaults = defaults

    @property
    def url(self) -> str:
        """Return ``mqtt://127.0.0.1:PORT``."""
        return f"{self.scheme}://{self.host}:{self.port}"

    def _launch(self) -> None:
        binary = find_mosquitto()
        if binary is None:
            raise BrokerError(f"mosquitto is not installed: {_HOW_TO}")
        config = self.directory / "mosquitto.conf"
        # The listener comes first: what belongs to a listener belongs to the one above it.
        lines = [f"listener {self.port} {self.host}", *_overridden(self._defaults, self._lines, " "), *self._lines]
        config.write_text("\n".join(lines) + "\n")
        self._process = self.spawn(binary, "-c", str(config))

    def _answers(self) -> bool:
        # Another process may have the port; the log tells that it is this broker.
        is_running = re.search(r"version \S+ running", self.log(self.log_start)) is not None
        return is_running and self._serves()

    def reload(self, timeout: float = 10.0) -> None:
        """Have the broker read its configuration again, and wait up to ``timeout`` seconds until it has.

        Raises:
            BrokerError: time is up, or the broker has ended.
        """
        before = self.log().count(_RELOADING)
        deadline, signalled = time.monotonic() + timeout, -math.inf
        while self.log().count(_RELOADING) <= before:
            now = time.monotonic()
            if not self.running:
                raise self._error("ended while it should reload its configuration")
            if now > deadline:
                raise self._error(f"did not reload its configuration within {timeout:g} s")
            if now > signalled + 1.0:  # a signal that arrives at the end of an earlier reload is lost
                os.kill(self.pid, signal.SIGHUP)
                signalled = now
            time.sleep(0.01)
        # the line is written first; the next SIGHUP would be lost until the broker is back in its loop
        self.wait_ready(timeout)

    def _serves(self) -> bool:
        """Return whether the broker is in its loop.

        It writes to its log, and listens, before it enters the loop; a SIGTERM between the two would be lost. In the
        loop it ends a connection that its client has ended.
        """
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as client:
                client.shutdown(socket.SHUT_WR)
                client.recv(1)  # the end, or an alert of TLS
        except ConnectionResetError:
            return True
        except OSError:
            return False
        return True


class RabbitMQ(Broker):
    """A RabbitMQ node of its own: own Erlang cookie, own port mapper, no management plugin.

    The user is guest / guest, an administrator.

    Args:
        config_lines: for rabbitmq.conf. A line with the key of a default replaces it.
        plugins: to enable; with ``rabbitmq_mqtt`` there is :attr:`mqtt_url`. That one costs 3 to 6 seconds when it
            runs for the first time: it waits for other nodes to join.
        cluster: a node whose cluster this one joins at its first start. That one has the port mapper of both, and is
            stopped last, unless both were given one.
        port_mapper: used instead of one of its own, so that each node of a cluster can be killed; see
            :class:`RabbitCluster`.
        virtual_hosts: that it has beside ``/``.

    Attributes:
        virtual_host: that :attr:`url`, :attr:`mqtt_url` and :meth:`ctl` speak of; ``/``, unless it is set.
    """

    name = "rabbitmq"
    scheme = "amqp"
    start_timeout = 90.0  # mostly the machine's affair: 4 s alone, much more beside a busy test run

    def __init__(
        self,
        config_lines: Iterable[str] = (),
        plugins: Sequence[str] = (),
        *,
        cluster: RabbitMQ | None = None,
        port_mapper: PortMapper | None = None,
        virtual_hosts: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.virtual_host = "/"
        self._virtual_hosts = list(virtual_hosts)
        self._cluster = cluster
        self._is_mapper_shared = cluster is not None or port_mapper is not None
        self._mapper: PortMapper = port_mapper or (cluster._mapper if cluster else PortMapper(self.directory))
        self.plugins = tuple(plugins)
        self._lines = list(config_lines)
        self._node = f"rx{secrets.token_hex(4)}@localhost"
        self.mqtt_port, self._dist_port = free_port(), free_port()
        cookie = self._cookie
        cookie.write_text(secrets.token_hex(16) if cluster is None else cluster._cookie.read_text())
        cookie.chmod(0o400)

    @property
    def url(self) -> str:
        """Return ``amqp://guest:guest@127.0.0.1:PORT/``, and the virtual host unless it is ``/``."""
        path = "" if self.virtual_host == "/" else quote(self.virtual_host, safe="")
        return f"{self.scheme}://guest:guest@{self.host}:{self.port}/{path}"

    @property
    def version(self) -> tuple[int, ...]:
        """Return the version, such as ``(4, 3, 6)``; empty before the first start."""
        found = re.search(r"Starting RabbitMQ ([0-9.]+)", self.log())
        return tuple(map(int, found[1].split("."))) if found else ()

    @property
    def mqtt_url(self) -> str:
        """Return ``mqtt://guest:guest@127.0.0.1:PORT``.

        Raises:
            BrokerError: the plugin ``rabbitmq_mqtt`` is not enabled.
        """
        if "rabbitmq_mqtt" not in self.plugins:
            raise BrokerError("this RabbitMQ runs without the plugin rabbitmq_mqtt")
        user = "guest" if self.virtual_host == "/" else quote(f"{self.virtual_host}:guest", safe="")
        return f"mqtt://{user}:guest@{self.host}:{self.mqtt_port}"

    def start(self) -> None:
        """See ``Broker.start``."""
        is_first = not self._started_before
        super().start()
        if self._cluster is not None and is_first:
            self.ctl("stop_app")
            self.ctl("join_cluster", self._cluster._node)
            self.ctl("start_app")
            self.wait_ready()

    def enable(self, *plugins: str) -> None:
        """Enable plugins, now and for later starts, and wait until they can be used.

        Raises:
            BrokerError: RabbitMQ refused, or is not running.
        """
        missing = [plugin for plugin in plugins if plugin not in self.plugins]
        if missing:
            self._command("rabbitmq-plugins", "enable", *missing)
            self.plugins += tuple(missing)
            self.wait_ready()

    def join_at_start(self, other: RabbitMQ) -> None:
        """Have this node join the cluster of ``other``, which is running by then, when it starts for the first time."""
        self._cookie.chmod(0o600)
        self._cookie.write_text(other._cookie.read_text())
        self._cookie.chmod(0o400)
        self._lines += [
            "cluster_formation.peer_discovery_backend = classic_config",
            f"cluster_formation.classic_config.nodes.1 = {other._node}",
            f"cluster_formation.classic_config.nodes.2 = {self._node}",
        ]

    def drain(self) -> None:
        """Put the node into maintenance: it closes its connections, and accepts none until :meth:`revive`.

        Raises:
            BrokerError: RabbitMQ refused, or is not running.
        """
        for attempts_left in (2, 1, 0):
            try:
                self._command("rabbitmq-upgrade", "drain")
                return
            except BrokerError as error:
                # it fails over a connection that ends by itself while it is closed
                if ":noproc" not in str(error) or not attempts_left:
                    raise

    def revive(self) -> None:
        """End the maintenance of the node, and wait until it can be used. Raises as :meth:`drain`."""
        self._command("rabbitmq-upgrade", "revive")
        self.wait_ready()

    def ctl(self, *args: str, timeout: float = CTL_TIMEOUT) -> str:
        """Run ``rabbitmqctl`` against this node (about a second) and return what it printed.

        Commands that concern a virtual host get :attr:`virtual_host`, unless ``args`` name another.

        Raises:
            BrokerError: it failed, or took longer than ``timeout`` seconds.
        """
        is_default = self.virtual_host == "/" or not {"-p", "--vhost"}.isdisjoint(args)
        return self._command(
            "rabbitmqctl", *(() if is_default else ("--vhost", self.virtual_host)), *args, timeout=timeout
        )

    def add_virtual_host(self, name: str) -> None:
        """Add a virtual host that ``guest`` may use. Nothing happens if there is one of that name.

        Raises:
            BrokerError: RabbitMQ refused, or is not running.
        """
        if name not in self._virtual_hosts:
            self._command("rabbitmqctl", "add_vhost", name)
            self._command("rabbitmqctl", "set_permissions", "--vhost", name, "guest", ".*", ".*", ".*")
            self._virtual_hosts.append(name)

    def _command(self, command: str, *args: str, timeout: float = CTL_TIMEOUT) -> str:
        script = find_rabbitmq(command)
        if script is None:
            raise BrokerError(f"{command} is not installed: {_HOW_TO}")
        try:
            done = subprocess.run(
                [script, "--quiet", "--node", self._node, *args],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise BrokerError(f"{command} {args} took longer than {timeout:g} s") from error
        except subprocess.CalledProcessError as error:
            raise BrokerError(f"{command} {args}: exit {error.returncode}\n{error.stdout}{error.stderr}") from error
        return done.stdout

    def _change_ports(self) -> None:
        self._release_ports()
        self.port, self.mqtt_port, self._dist_port = (free_port() for _ in range(3))
        if not self._is_mapper_shared:
            self._mapper.port = free_port()

    def _release_ports(self) -> None:
        for port in (self.port, self.mqtt_port, self._dist_port):
            release_port(port)
        if not self._is_mapper_shared:
            release_port(self._mapper.port)

    def _definitions(self) -> str:
        """Return definitions that a node imports when it starts: each ``rabbitmqctl`` would take a second."""
        salt = secrets.token_bytes(4)
        password = base64.b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
        hosts = ["/", *self._virtual_hosts]
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        hashed = {"password_hash": password, "hashing_algorithm": "rabbit_password_hashing_sha256"}
        return json.dumps(
            {
                "users": [{"name": "guest", "tags": "administrator", **hashed}],
                "vhosts": [{"name": host} for host in hosts],
                "permissions": [{"user": "guest", "vhost": host, **everything} for host in hosts],
            }
        )

    @property
    def _cookie(self) -> Path:
        return self.directory / ".erlang.cookie"

    def _launch(self) -> None:
        script = find_rabbitmq()
        if script is None:
            raise BrokerError(f"rabbitmq is not installed: {_HOW_TO}")
        defaults = [
            f"listeners.tcp.1 = {self.host}:{self.port}",
            "disk_free_limit.absolute = 16MB",
            "vm_memory_high_watermark.relative = 0.8",
        ]
        if self._virtual_hosts:
            definitions = self.directory / "definitions.json"
            definitions.write_text(self._definitions())
            defaults.append(f"load_definitions = {definitions}")
        lines = [*_overridden(defaults, self._lines, "="), *self._lines]
        (self.directory / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        # rabbitmq.conf may not speak of plugins that are not enabled yet; this file may.
        mqtt = f'[{{rabbitmq_mqtt, [{{tcp_listeners, [{{"{self.host}", {self.mqtt_port}}}]}}]}}].\n'
        (self.directory / "advanced.config").write_text(mqtt)
        (self.directory / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")
        (self.directory / "rabbitmq-env.conf").touch()
        environment = self._environment()
        if not self._is_mapper_shared:
            self._mapper.start()
        self._process = self.spawn(script, "-noinput", env=environment)

    def _answers(self) -> bool:
        if "rabbitmq_mqtt" in self.plugins and not accepts(self.mqtt_port):
            return False
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1.0) as probe:
            probe.sendall(b"AMQP\x00\x00\x09\x01")
            return probe.recv(1) == b"\x01"  # a method frame: connection.start
        return False

    def end_process(self, how: signal.Signals) -> None:
        """End the node, and its port mapper unless others use it."""
        super().end_process(how)
        if not self._is_mapper_shared:
            self._mapper.stop()

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_", "NOTIFY_SOCKET"))}
        plugins = Path(find_rabbitmq() or "").parent.parent / "plugins"
        if plugins.is_dir():  # rabbitmq-plugins 4.0 does not find it by itself
            kept["RABBITMQ_PLUGINS_DIR"] = str(plugins)
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        return kept | {
            "PATH": _search_path(),
            "HOME": str(self.directory),
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": str(self._mapper.port),
            "RABBITMQ_ALLOW_INPUT": "true",  # the script then becomes the node, rather than wait for it
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced.config"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "rabbitmq-env.conf"),
            "RABBITMQ_CTL_DIST_PORT_MAX": "1",
            "RABBITMQ_CTL_DIST_PORT_MIN": "0",  # any free one
            # schedulers that spin while they wait take ten times as long on a busy machine
            "RABBITMQ_CTL_ERL_ARGS": f"{loopback} +sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_NODENAME": self._node,
            # Spin for a moment before sleeping: with RabbitMQ's "none" the start is one long chain of wake-ups and
            # takes twice as long.
            "RABBITMQ_SCHEDULER_BUSY_WAIT_THRESHOLD": "very_short",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": loopback,
        }


class PortMapper:
    """Erlang's port mapper (epmd) for RabbitMQ nodes, which find each other by it.

    In the foreground: the one that a node would start on its own becomes a daemon and stays for ever.

    Args:
        directory: for its log.
    """

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: _Process | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            BrokerError: it is not installed, or ended.
        """
        epmd = shutil.which("epmd", path=_search_path())
        if epmd is None:
            raise BrokerError(f"rabbitmq is not installed: epmd is missing; {_HOW_TO}")
        command = (epmd, "-port", str(self.port), "-address", HOST)
        self._process = _Process(command, None, self._directory / "epmd.log", self._directory)
        deadline = time.monotonic() + RabbitMQ.start_timeout
        while not accepts(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BrokerError(f"the port mapper (epmd) does not answer on port {self.port}: address in use?")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.end(signal.SIGKILL)  # it has nothing to lose, and ignores SIGTERM while a node is registered
            self._process = None


class RabbitCluster:
    """RabbitMQ nodes in one cluster, each of which can be killed and started again.

    Entering the context starts it, which takes about four seconds for each node. Leaving stops it and removes its data.

    Args:
        size: number of nodes.
        config_lines: of each node, see :class:`RabbitMQ`.

    Attributes:
        nodes: in the order of :attr:`url`.
    """

    def __init__(self, size: int = 3, config_lines: Iterable[str] = ()) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="rx-messaging-cluster-"))
        self._mapper = PortMapper(self._directory)
        self.nodes = [RabbitMQ(config_lines, port_mapper=self._mapper) for _ in range(size)]
        for node in self.nodes[1:]:
            node.join_at_start(self.nodes[0])

    @property
    def url(self) -> str:
        """Return a URL that names all nodes, credentials included."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"{RabbitMQ.scheme}://guest:guest@{hosts}/"

    def node(self, host: str) -> RabbitMQ:
        """Return the node that clients reach at ``host``, as ``127.0.0.1:5672``."""
        return next(node for node in self.nodes if f"{node.host}:{node.port}" == host)

    def __enter__(self) -> Self:
        try:
            self._mapper.start()
            for node in self.nodes:
                node.start()
            self.nodes[0].ctl("await_online_nodes", str(len(self.nodes)), timeout=RabbitMQ.start_timeout)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all nodes and remove their data. Idempotent."""
        for node in self.nodes:
            node.kill()
            node.close()
        self._mapper.stop()
        release_port(self._mapper.port)
        shutil.rmtree(self._directory, ignore_errors=True)


class _Process:
    """A process in a process group of its own, and its guard."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str] | None,
        log: Path,
        directory: Path,
        user: str | None = None,
    ) -> None:
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user,
                group=None if user is None else pwd.getpwnam(user).pw_gid,
                extra_groups=None if user is None else (),
            )
        self.pid = self._popen.pid
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "broker-guard", str(self.pid), str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        return self._popen.poll()

    def end(self, how: signal.Signals) -> None:
        """Signal the process, wait for it, and dismiss the guard."""
        if self._popen.poll() is None:
            if how is not signal.SIGKILL:
                self._popen.send_signal(how)
                self._popen.send_signal(signal.SIGCONT)  # a test may have stopped it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(STOP_TIMEOUT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(STOP_TIMEOUT)
        self._guard.communicate(b"\n", timeout=STOP_TIMEOUT)


def _count_start(name: str, *, again: bool) -> None:
    """Add to the starts of a run, see :data:`STARTS`."""
    path = os.environ.get(STARTS)
    if path:
        with contextlib.suppress(OSError), open(path, "a") as file:  # noqa: PTH123  # appending is atomic
            file.write(f"{name}{' again' if again else ''}\n")


def _search_path() -> str:
    extra = ["/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/homebrew/bin", "/usr/bin", "/bin"]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *extra])


def _overridden(defaults: Iterable[str], lines: Iterable[str], separator: str) -> list[str]:
    """Return the defaults whose keyword no line gives."""
    given = {line.split(separator)[0].strip() for line in lines}
    return [line for line in defaults if line.split(separator)[0].strip() not in given]


def accepts(port: int, host: str = HOST) -> bool:
    """Return whether a server listens on ``port``."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False
