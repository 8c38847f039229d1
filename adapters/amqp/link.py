"""What lives from one ``open`` to the next loss: the connections, the publisher, the subscriptions.

Publishing and consuming have a connection each, so that a broker that is short of memory and takes no messages goes
on delivering them. The one for consuming is made with the first subscription. The end of either ends the link.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from adapters.amqp.connection import CLOSE_GRACE, UNCONFIRMED_GRACE, Wire, connect
from adapters.amqp.consumer import Consumer
from adapters.amqp.delays import Delays
from adapters.amqp.publisher import Publisher
from messaging.errors import (
    AuthenticationError,
    BrokerError,
    ConnectFailedError,
    ConnectionLostError,
    SubscriptionRefusedError,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine

    from adapters.amqp.declarations import Source
    from adapters.amqp.overflow import RefusingQueues
    from adapters.amqp.streams import StreamPosition
    from adapters.amqp.target import Target
    from messaging.adapter import Sink, SubscriptionSpec

logger = logging.getLogger(__name__)


class Link:
    """See the module.

    Args:
        target: where to connect to.
        publishing: the connection to publish on.
        context: for TLS.
        exchange: of channels without extension.
        window: messages that may await their confirm.
        refusing: the queues that refuse messages when they are full; those subscribed to here are added.
        lost: called once if the link ends without ``close``.
        impaired: told when the broker takes no messages, and when it does again; see ``Adapter.impaired``.
    """

    def __init__(
        self,
        target: Target,
        publishing: Wire,
        context: ssl.SSLContext | None,
        *,
        exchange: str,
        window: int,
        refusing: RefusingQueues,
        lost: Callable[[ConnectionLostError], None],
        impaired: Callable[[BrokerError | None], object],
    ) -> None:
        self.alive = True
        self.publisher = Publisher(publishing, exchange, window, refusing)
        self._refusing = refusing
        self._target = target
        self._wires = [publishing]
        self._consuming: Wire | None = None
        self._connecting = asyncio.Lock()
        self._dialling: asyncio.Timeout | None = None
        self._context = context
        self._exchange = exchange
        self._lost = lost
        self._impaired = impaired
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._delays = Delays(publishing, target.username, self._spawn)
        publishing.lost = self._end
        publishing.blocked = self._block

    async def subscribe(
        self, spec: SubscriptionSpec, sink: Sink, source: Source, position: StreamPosition | None
    ) -> Consumer:
        """Subscribe; see ``Adapter.subscribe``. ``source`` is ``spec``, compiled, ``position`` that of its stream."""
        wire = await self._consuming_wire()
        self._count += 1
        consumer = Consumer(
            wire,
            spec,
            sink,
            source,
            position=position,
            delays=self._delays if source.delay is not None else None,
            exchange=self._exchange,
            tag=f"{self._target.name[:40]}-{self._count}",
            spawn=self._spawn,
        )
        await consumer.open()
        self._refusing.declared(source)
        return consumer

    def read(self, wanted: bool) -> None:
        """Read deliveries, or do not for now."""
        if self._consuming is not None:
            self._consuming.read(wanted)

    async def close(self) -> None:
        """Disconnect in good order, within a second or so. Idempotent; does not raise.

        It takes longer, but not much, if the broker still has to read what it does not confirm.
        """
        # acknowledgements are gathered until the end of the loop's turn
        await asyncio.sleep(0)
        self.alive = False
        for wire in self._wires:
            wire.lost = lambda _: None
        self._stop_dialling()
        grace = UNCONFIRMED_GRACE if self.publisher.wrote_unconfirmed() else CLOSE_GRACE
        await asyncio.gather(*[wire.close(grace) for wire in self._wires])
        self.publisher.end(ConnectionLostError(f"connection to {self._target} was closed"))
        self._delays.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def _consuming_wire(self) -> Wire:
        async with self._connecting:
            self._check()
            if self._consuming is None:
                self._consuming = await self._connect()
            return self._consuming

    async def _connect(self) -> Wire:
        try:
            async with asyncio.timeout(self._target.timeout) as self._dialling:
                try:
                    wire = await connect(self._target, "consuming", self._context)
                finally:
                    self._dialling = None  # its time cannot be changed once it is over
        except AuthenticationError as error:
            what = f"no connection to consume on: {error}"
            raise SubscriptionRefusedError(what, code=error.code, detail=error.detail) from error
        except (ConnectFailedError, TimeoutError) as error:
            self._check()  # the link ended, and the attempt with it
            # as good as a loss: the core opens again, with its delays
            reason = str(error) or f"none within {self._target.timeout:g} s"
            code, detail = (error.code, error.detail) if isinstance(error, BrokerError) else (None, None)
            what = f"no connection to {self._target} to consume on: {reason}"
            lost = ConnectionLostError(what, code=code, detail=detail)
            lost.__cause__ = error
            self._end(lost)
            raise lost from error
        if not self.alive:  # it came too late
            await wire.close()
            self._check()
        wire.lost = self._end
        self._wires.append(wire)
        return wire

    def _block(self, reason: str | None) -> None:
        self.publisher.block(reason)
        self._delays.block(reason)
        if reason is None:
            logger.info("%s takes messages again", self._target)
            self._impaired(None)
        else:
            logger.warning("%s takes no messages for now: %s", self._target, reason)
            self._impaired(BrokerError(f"{self._target} takes no messages for now: {reason}", detail=reason))

    def _stop_dialling(self) -> None:
        if self._dialling is not None and not self._dialling.expired():
            self._dialling.reschedule(asyncio.get_running_loop().time())

    def _check(self) -> None:
        if not self.alive:
            raise ConnectionLostError(f"connection to {self._target} lost")

    def _end(self, cause: ConnectionLostError) -> None:
        if not self.alive:
            return
        self.alive = False
        for wire in self._wires:
            # tokens are stale from here on, whichever connection they came from
            wire.alive = False
        self._stop_dialling()
        self.publisher.hand_over()
        self._lost(cause)
        self.publisher.end(cause)
        self._delays.end()
        for wire in self._wires:
            self._spawn(wire.close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
