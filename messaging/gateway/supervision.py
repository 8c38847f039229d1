"""Runs a gateway as a service: signals, and the notifications of systemd.

| signal | effect |
|---|---|
| SIGTERM, SIGINT | publish what is stored for at most ``drain_timeout``, and end; a second one ends at once |
| SIGHUP | read the configuration again; one with errors is logged, and the present one goes on |

With ``Type=notify`` systemd hears when the gateway runs, reloads and stops, and what it does. With ``WatchdogSec`` it
hears that the engine's loop and the worker threads respond; a gateway that hangs is restarted.

**Threads.** :func:`supervise` is for the main thread, where signals arrive.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from messaging.errors import ConfigurationError, GatewaySettingsError, MessagingError
from messaging.errors.text import SafeLog
from messaging.execution import Flag, Waiters, clock, engine, workers
from messaging.gateway.gateway import Gateway
from messaging.gateway.settings import GatewaySettings

logger = SafeLog(__name__)

#: how often the status of the service is told, seconds
_STATUS_INTERVAL: Final = 10.0
#: how often the thread looks whether another one has stopped the gateway, seconds
_LOOK: Final = 0.5
#: how long the engine and a worker thread may take to respond, as part of the time of the watchdog
_RESPONSE: Final = 0.25


class ServiceManager:
    """The notification socket of systemd (``sd_notify``). For one thread.

    Args:
        address: of the socket: a path, or an abstract name that begins with ``@``; empty: there is none to notify.
        watchdog: time in which systemd expects a sign of life, seconds; ``None``: it expects none.
    """

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog = watchdog

    @classmethod
    def of_environment(cls) -> Self:
        """Return the one that started this process; without ``Type=notify`` there is none to notify."""
        address = os.environ.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls("")
        watchdog: float | None = None
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            try:
                watchdog = int(os.environ.get("WATCHDOG_USEC", "")) / 1e6
            except ValueError:
                watchdog = None
        return cls(address, watchdog if watchdog is not None and watchdog > 0 else None)

    def notify(self, **values: object) -> None:
        """Tell values such as ``READY=1``. A socket that is gone is logged, and changes nothing."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
                client.settimeout(1.0)
                client.sendto(text.encode(), self._address)
        except OSError as error:
            logger.warning("service manager: cannot notify it: %s", error)


def supervise(gateway: Gateway, read: Callable[[], GatewaySettings]) -> None:
    """Start a gateway, run it until a signal or :meth:`Gateway.stop`, and close it. On the main thread.

    Args:
        gateway: was not started.
        read: returns the settings for a reload, as they are now.

    Raises: as :meth:`Gateway.start`.
    """
    manager = ServiceManager.of_environment()
    events = _SignalRequests(gateway)
    gateway.read_settings = read
    with events.installed():
        gateway.start()
        try:
            manager.notify(READY=1, STATUS=_status(gateway))
            _serve(gateway, events, manager)
        finally:
            manager.notify(STOPPING=1, STATUS="publishing what is stored")
            gateway.close()


class _SignalRequests:
    """What signals ask for. Handlers only set flags and wake the main thread."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.is_reload_due = False
        self.waiters = Waiters()

    @contextmanager
    def installed(self) -> Iterator[None]:
        handlers: dict[signal.Signals, Callable[[int, Any], None]] = {
            signal.SIGTERM: self._end, signal.SIGINT: self._end, signal.SIGHUP: self._reload,
        }  # fmt: skip
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, *_: object) -> None:
        self._gateway.stop(drain=not self._gateway.is_stopping)
        self.waiters.wake()

    def _reload(self, *_: object) -> None:
        self.is_reload_due = True
        self.waiters.wake()


def _serve(gateway: Gateway, events: _SignalRequests, manager: ServiceManager) -> None:
    watchdog = manager.watchdog
    pause = _STATUS_INTERVAL if watchdog is None else min(_STATUS_INTERVAL, watchdog / 3)
    due = clock.monotonic() + pause
    while True:
        events.waiters.wait_for(lambda: gateway.is_stopping or events.is_reload_due, min(_LOOK, pause))
        if gateway.is_stopping:
            return
        if events.is_reload_due:
            events.is_reload_due = False
            manager.notify(RELOADING=1, MONOTONIC_USEC=round(clock.monotonic() * 1_000_000))
            _reload(gateway)
            manager.notify(READY=1)
        if clock.monotonic() < due:
            continue
        due = clock.monotonic() + pause
        if watchdog is not None:
            if _responds(watchdog * _RESPONSE):
                manager.notify(WATCHDOG=1)
            else:
                logger.error("gateway '%s': its threads do not respond; the watchdog is not told", gateway.name)
        manager.notify(STATUS=_status(gateway))


def _reload(gateway: Gateway) -> None:
    assert gateway.read_settings is not None  # noqa: S101  # set by supervise
    try:
        gateway.reload(gateway.read_settings())
    except GatewaySettingsError as error:
        for problem in error.problems:
            logger.error("%s", problem)
        logger.error("gateway '%s': not reloaded: the configuration has errors", gateway.name)
    except (ConfigurationError, MessagingError) as error:
        logger.error("gateway '%s': not reloaded: %s", gateway.name, error)


def _responds(timeout: float) -> bool:
    """Return whether the engine's loop and a worker thread respond in time."""
    flag = Flag()
    engine().call(workers().submit, flag.set)
    return flag.wait(timeout)


def _status(gateway: Gateway) -> str:
    report = gateway.report()
    stored = sum(route.buffer.depth for route in report.routes)
    problems = gateway.problems()
    text = f"{len(report.routes)} routes, {stored} messages stored"
    return f"{text}; {problems[0]}" if problems else text
