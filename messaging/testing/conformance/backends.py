"""The backends of the suite: a broker's URL, and a way to cut the connection to it."""

from __future__ import annotations

import itertools
import secrets
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import messaging
from messaging import Features
from messaging.errors import ConnectFailedError
from messaging.execution import engine, may_block
from messaging.model import parse_url
from messaging.services import ServiceRegistry
from messaging.testing.conformance.helpers import state
from messaging.testing.proxy import Proxy
from messaging.testing.waiting import PATIENCE, eventually
from messaging_adapters.memory import MemoryAdapter

if TYPE_CHECKING:
    from messaging.adapter import Events
    from messaging.model import BrokerUrl
    from messaging.model.settings import Settings
    from messaging.testing.brokers import Broker

_RUN: Final = secrets.token_hex(3)
_numbers: Final = itertools.count(1)


class Link(Protocol):
    """The connection of an instance to its broker, as a test sees it."""

    def down(self) -> None:
        """Break the connection and prevent another one. Returns once the instance is reconnecting."""

    def up(self) -> None:
        """Let the instance reconnect."""

    def sever(self) -> None:
        """Break the connection once. Returns once the instance is reconnecting."""


class Backend:
    """A broker, and the instances of one test. Closes the instances it made.

    Args:
        name: the id of the parametrised test.
        url: the URL of the broker.
        broker: what :meth:`restart` restarts.

    Attributes:
        name, url: see above.
        services: the registry of all instances made here.
    """

    #: announced features by the name of the backend: found out once
    announced: Final[dict[str, frozenset[str]]] = {}

    def __init__(self, name: str, url: str, broker: Broker | None = None) -> None:
        self.name = name
        self.url = url
        self.services = ServiceRegistry()
        self._broker = broker
        self._stack = ExitStack()

    def close(self) -> None:
        """Close every instance, newest first."""
        self._stack.close()

    def restart(self) -> None:
        """Stop the broker and start it again on the same data. For tests marked ``restart``."""
        assert self._broker is not None
        self._broker.restart()

    @property
    def features(self) -> frozenset[str]:
        """Return the features that a connected instance announces."""
        if self.name not in self.announced:
            with messaging.connect(self.url, services=self.services) as m:
                self.announced[self.name] = m.features
        return self.announced[self.name]

    @property
    def reliable(self) -> dict[str, Any]:
        """Return the extensions of confirmed publishing and of subscriptions that acknowledge, in snake case."""
        return {"guaranteed_delivery": True} if "guaranteedDelivery" in self.features else {}

    @property
    def prioritising(self) -> dict[str, Any]:
        """Return the settings of an instance whose queues deliver by priority."""
        return {"max_priority": 9} if urlsplit(self.url).scheme in ("amqp", "amqps") else {}

    def connect(self, url: str | None = None, **settings: Any) -> messaging.Messaging:
        """Return a new instance, connected unless an event loop runs in the calling thread."""
        instance = messaging.connect(url or self.url, services=self.services, **{"timeout": PATIENCE, **settings})
        self.close_later(instance)
        return instance

    def close_later(self, instance: messaging.Messaging) -> None:
        """Close ``instance`` with this backend."""
        self._stack.callback(instance.close)

    def connect_severable(self, **settings: Any) -> tuple[messaging.Messaging, Link]:
        """Return a connected instance and its link."""
        link = self.wire()
        return link.connect(**settings), link

    def wire(self) -> Wire:
        """Return a link through a proxy, for an instance that connects later."""
        parts = urlsplit(self.url)
        proxy = self._stack.enter_context(Proxy(parts.hostname or "", parts.port or 0))
        netloc = parts.netloc.rpartition("@")
        url = parts._replace(netloc=f"{netloc[0]}{netloc[1]}{proxy.host}:{proxy.port}").geturl()
        return Wire(self, proxy, url)

    def channel(self, name: str = "channel") -> str:
        """Return a channel of this test alone."""
        return f"conformance/{_RUN}-{next(_numbers)}/{name}"

    def queue(self) -> str:
        """Return the name of a queue that does not exist yet."""
        return f"conformance-{_RUN}-{next(_numbers)}"

    def full_context(self, m: messaging.Messaging) -> dict[str, Any]:
        """Return a value of each kind that a message of ``m`` can carry, in snake case."""
        context = self.reliable
        if Features.MESSAGE_PROPERTIES in m.features:
            context |= {"content_type": "x/y", "correlation_id": "4711", "reply_to": self.channel("reply")}
        if Features.EXTENSION_HEADERS in m.features:
            context["headers"] = {"k": "v"}
        if Features.EXTENSION_TIME_TO_LIVE in m.features:
            context["time_to_live"] = 60.0
        if Features.EXTENSION_PRIORITY in m.features:
            context["priority"] = 4
        return context

    def __repr__(self) -> str:
        return f"<Backend {self.name}>"


class MemoryBackend(Backend):
    """``memory://``, with a broker of its own for each test."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"memory://conformance-{_RUN}-{next(_numbers)}")

    def connect_severable(self, **settings: Any) -> tuple[messaging.Messaging, Link]:
        """See :class:`Backend`."""
        self.connect()  # a broker ends with its last client; this one stays
        settings = {"timeout": PATIENCE, **_QUICK, **settings}
        instance = messaging.Messaging(_BarredAdapter, parse_url(self.url), self.services, settings)
        self.close_later(instance)
        if may_block():
            instance.ready.result(PATIENCE)
        return instance, _MemoryLink(instance, _BarredAdapter.made[instance.name])


#: settings that reconnect within the time a test has
_QUICK: Final[dict[str, Any]] = {"reconnect_min": 0.02, "reconnect_max": 0.1}


class _Cut:
    """The steps that both links share: cut the connection, and wait until the instance has noticed."""

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
        """Return an instance on this link."""
        self.instance = self._backend.connect(self.url, **{**_QUICK, **settings})
        return self.instance

    def cut(self) -> None:
        self.proxy.refuse()

    def up(self) -> None:
        self.proxy.accept()


class _BarredAdapter(MemoryAdapter):
    """An adapter of ``memory://`` that can be kept from its broker."""

    #: by the name of the instance
    made: ClassVar[WeakValueDictionary[str, _BarredAdapter]] = WeakValueDictionary()

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        super().__init__(url, settings, name)
        self.is_barred = False
        self.made[name] = self

    async def open(self, events: Events) -> bool:
        if self.is_barred:
            raise ConnectFailedError("the test keeps the link down")
        return await super().open(events)


class _MemoryLink(_Cut):
    """The broker drops the client. It cannot refuse one, so the adapter does not connect until :meth:`up`."""

    def __init__(self, instance: messaging.Messaging, adapter: _BarredAdapter) -> None:
        self.instance = instance
        self._adapter = adapter

    def cut(self) -> None:
        done = Event()

        def drop() -> None:
            self._adapter.is_barred = True
            self._adapter.client.broker.disconnect(self._adapter.name)
            done.set()

        engine().call(drop)
        if not done.wait(PATIENCE):
            raise AssertionError("the engine does not answer")

    def up(self) -> None:
        self._adapter.is_barred = False
