"""What the suite runs against: a broker's URL, and a way to cut the link to it."""

from __future__ import annotations

import itertools
import secrets
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import messaging
from messaging.errors import ConnectFailedError
from messaging.services import ServiceRegistry
from tests.conformance.helpers import PATIENCE, eventually, state
from tests.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.brokers import Broker

_RUN: Final = secrets.token_hex(3)
_numbers: Final = itertools.count(1)


class Link(Protocol):
    """The link between an instance and its broker."""

    def down(self) -> None:
        """Break it abnormally and keep it broken; returns when the instance has noticed."""

    def up(self) -> None:
        """Let the instance reconnect."""

    def sever(self) -> None:
        """Break it abnormally, once."""


class Backend:
    """A broker and what a test needs of it. Closes what it made.

    Attributes:
        name: the id of the parametrised test.
        url: where to connect to.
        services: the registry of all instances made here.
        features: what instances announce once connected.
        prioritising: settings of an instance whose queues deliver by priority.
        reliable: context of publishes that are confirmed and of subscriptions that acknowledge, in snake case.
    """

    #: announced features by URL: found out once
    announced: Final[dict[str, frozenset[str]]] = {}

    def __init__(self, name: str, url: str, broker: Broker | None = None) -> None:
        """``broker``, if given, belongs to this backend."""
        self.name = name
        self.url = url
        self.services = ServiceRegistry()
        self._broker = broker
        self._stack = ExitStack()
        if broker is not None:
            self._stack.callback(broker.close)

    def close(self) -> None:
        """Close every instance, newest first."""
        self._stack.close()

    def restart(self) -> None:
        """Stop the broker and start it again on the same data; for tests marked ``restart``."""
        assert self._broker is not None
        self._broker.restart()

    @property
    def features(self) -> frozenset[str]:
        """See the class."""
        if self.name not in self.announced:
            with messaging.connect(self.url, services=self.services) as m:
                self.announced[self.name] = m.features
        return self.announced[self.name]

    @property
    def reliable(self) -> dict[str, Any]:
        """See the class."""
        return {"guaranteed_delivery": True} if "guaranteedDelivery" in self.features else {}

    @property
    def prioritising(self) -> dict[str, Any]:
        """See the class."""
        return {"max_priority": 9} if urlsplit(self.url).scheme in ("amqp", "amqps") else {}

    def connect(self, url: str | None = None, **settings: Any) -> messaging.Messaging:
        """A new instance; connected, unless an event loop runs in the calling thread."""
        instance = messaging.connect(url or self.url, services=self.services, **{"timeout": PATIENCE, **settings})
        self._stack.callback(instance.close)
        return instance

    def connect_severable(self, **settings: Any) -> tuple[messaging.Messaging, Link]:
        """A connected instance and the link it hangs on."""
        link = self.wire()
        return link.connect(**settings), link

    def wire(self) -> Wire:
        """A link for an instance that is to be connected later."""
        parts = urlsplit(self.url)
        if parts.port is None:
            raise AssertionError(f"--backend-url {parts.scheme}://...: name the port, so that a proxy fits in between")
        proxy = self._stack.enter_context(Proxy(parts.hostname or "", parts.port))
        netloc = parts.netloc.rpartition("@")
        url = parts._replace(netloc=f"{netloc[0]}{netloc[1]}{proxy.host}:{proxy.port}").geturl()
        return Wire(self, proxy, url)

    def channel(self, name: str = "channel") -> str:
        """A channel nobody else uses."""
        return f"conformance/{_RUN}-{next(_numbers)}/{name}"

    def queue(self) -> str:
        """The name of a queue that does not exist yet."""
        return f"conformance-{_RUN}-{next(_numbers)}"

    def __repr__(self) -> str:
        return f"<Backend {self.name}>"


class MemoryBackend(Backend):
    """``memory://``, with a broker of its own for each test."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"memory://conformance-{_RUN}-{next(_numbers)}")

    def connect_severable(self, **settings: Any) -> tuple[messaging.Messaging, Link]:
        """See :class:`Backend`."""
        self.connect()  # a broker ends with its last client; this one stays
        instance = self.connect(**{**_QUICK, **settings})
        return instance, _MemoryLink(instance, urlsplit(self.url).hostname or "")


#: reconnecting in the time a test has
_QUICK: Final[dict[str, Any]] = {"reconnect_min": 0.02, "reconnect_max": 0.1}


class _Cut:
    """What both links share: the instance is told, and seen to notice."""

    instance: messaging.Messaging

    def cut(self) -> None:
        raise NotImplementedError

    def up(self) -> None:
        raise NotImplementedError

    def down(self) -> None:
        self.cut()
        eventually(lambda: state(self.instance) == "reconnecting", "the instance notices the loss")

    def sever(self) -> None:
        self.down()
        self.up()


class Wire(_Cut):
    """A link through a proxy."""

    def __init__(self, backend: Backend, proxy: Proxy, url: str) -> None:
        self.url = url
        self.proxy = proxy
        self._backend = backend

    def connect(self, **settings: Any) -> messaging.Messaging:
        """The instance on this link."""
        self.instance = self._backend.connect(self.url, **{**_QUICK, **settings})
        return self.instance

    def cut(self) -> None:
        self.proxy.refuse()

    def up(self) -> None:
        self.proxy.accept()


class _MemoryLink(_Cut):
    """The broker drops the client. Nothing can keep it out, so the way in is barred on this side."""

    def __init__(self, instance: messaging.Messaging, broker: str) -> None:
        self.instance = instance
        self._broker = broker
        self._adapter = instance._adapter

    def cut(self) -> None:
        from adapters.memory.broker import join

        async def refused(_: object) -> bool:
            raise ConnectFailedError("the test keeps the link down")

        def drop() -> None:
            setattr(self._adapter, "open", refused)  # noqa: B010  # a method, and mypy minds
            join(self._broker).disconnect(self.instance.name)

        _on_engine(drop)

    def up(self) -> None:
        _on_engine(lambda: delattr(self._adapter, "open"))


def _on_engine(function: Callable[[], object]) -> None:
    from messaging.execution import engine

    done = Event()

    def run() -> None:
        try:
            function()
        finally:
            done.set()

    engine().call(run)
    if not done.wait(PATIENCE):
        raise AssertionError("the engine does not answer")
