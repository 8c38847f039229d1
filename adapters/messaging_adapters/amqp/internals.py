"""Adaptations to the inner workings of aiormq, aio-pika and pamqp, each with a plain fallback.

Everything that depends on more than the public API of these libraries is in this module:

======================  ==============================================  ==============================================
adaptation              reason                                          fallback on public API
======================  ==============================================  ==============================================
``StreamEnd``           aiormq logs a traceback for each stream that    The traceback is logged.
                        ends without ``connection.close-ok``
``LenientChannel``      pamqp accepts fewer names than brokers do, and  Such a name is refused with the reply code 502.
                        writes floats of binding arguments in 32 bits   A float among binding arguments matches no
                                                                        header.
``ObservedConnection``  aio-pika registers callbacks for each channel   Each channel costs about a kilobyte until its
                        that it cannot remove again                     connection ends.
======================  ==============================================  ==============================================

The adaptations are in use with the versions in ``TESTED``, and the fallbacks with all others. What depends on the
choice reads ``ENABLED`` when a connection is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, cast

import aio_pika
import aiormq
from aiormq import spec

from messaging_adapters.amqp import frames, tables

if TYPE_CHECKING:
    from aiormq.abc import AbstractChannel
    from pamqp.base import Frame

logger = logging.getLogger(__name__)

#: the versions that the adaptations are written for
TESTED: Final = {"aio-pika": "10.2.", "aiormq": "7.2.", "pamqp": "4.0."}


def untested() -> list[str]:
    """Return the installed libraries, with their versions, that are not in ``TESTED``."""
    return [f"{name} {version(name)}" for name, tested in TESTED.items() if not version(name).startswith(tested)]


#: whether the adaptations are in use
ENABLED: bool = not untested()
if not ENABLED:
    logger.warning(
        "amqp: adaptations to the AMQP library are off: not tested with %s; names of exchanges and queues are limited "
        "to letters, digits, space and -_.:@#,/+, and floats in bindingArguments match no header",
        ", ".join(untested()),
    )


class StreamEnd(asyncio.StreamReader):
    """The stream that aiormq reads. With ``ends_quietly``, aiormq reads ``connection.close-ok`` at its end."""

    ends_quietly = False
    _has_ended_quietly = False

    def feed_eof(self) -> None:
        """End the stream."""
        if self.ends_quietly and not self.at_eof():
            self.ends_quietly = False
            self._has_ended_quietly = True
            self.feed_data(frames.CLOSE_OK)
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        """End the stream over an error. A quiet end hides the error from aiormq, also one that follows it."""
        if self.ends_quietly:
            self.feed_eof()
        elif not self._has_ended_quietly:  # aiormq may not have read the end yet
            super().set_exception(exc)


class ObservedConnection(aiormq.Connection):
    """A connection with one observer of its closure, from which aio-pika can remove its callbacks."""

    _observer: asyncio.Future[Any] | None = None

    @property
    def closing(self) -> asyncio.Future[Any]:
        """Return the observer of the closure."""
        if self._observer is None:
            self._observer = super().closing
        return self._observer


def _lenient(kind: type[Frame], **replaced: Callable[..., object]) -> type[Frame]:
    """Return a method without pamqp's check of names, and with other functions ``replaced``."""
    return cast("type[Frame]", type(kind.__name__, (kind,), {"validate": lambda _: None, **replaced}))


def _marshal_bind(method: spec.Queue.Bind) -> bytes:
    """Return ``queue.bind`` as bytes, with its arguments written as headers are: only then do floats match."""
    names = b"".join(map(frames.short_string, (method.queue, method.exchange, method.routing_key)))
    return b"\x00\x00" + names + b"\x00" + tables.write_table(method.arguments or {})


#: methods of an aiormq channel -> what they send, without pamqp's check of names, and its field that comes first
_METHODS: Final[Mapping[str, tuple[type[Frame], str]]] = {
    "exchange_declare": (_lenient(spec.Exchange.Declare), "exchange"),
    "queue_declare": (_lenient(spec.Queue.Declare), "queue"),
    "queue_purge": (_lenient(spec.Queue.Purge), "queue"),
    "queue_delete": (_lenient(spec.Queue.Delete), "queue"),
    "queue_bind": (_lenient(spec.Queue.Bind, marshal=_marshal_bind), "queue"),
    "queue_unbind": (_lenient(spec.Queue.Unbind), "queue"),
    "basic_consume": (_lenient(spec.Basic.Consume), "queue"),
}


class _LenientMethods:
    """An aiormq channel whose declarations, bindings and consumers may have any name that fits into 255 bytes."""

    def __init__(self, channel: aiormq.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            return getattr(self._channel, name)
        method, first = _METHODS[name]

        async def send(*given: str, timeout: float | None = None, **fields: Any) -> Any:
            fields.pop("consumer_callback", None)  # a frame lane takes the deliveries
            return await self._channel.rpc(
                method(**dict(zip((first,), given, strict=False)), **fields), timeout=timeout
            )

        return send


class LenientChannel(aio_pika.Channel):
    """aio-pika's channel on a :class:`_LenientMethods`."""

    async def get_underlay_channel(self) -> AbstractChannel:
        """Return the channel that aio-pika's exchanges and queues send their methods on."""
        channel = cast("aiormq.Channel", await super().get_underlay_channel())
        return cast("AbstractChannel", _LenientMethods(channel))
