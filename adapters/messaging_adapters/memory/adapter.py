"""The adapter of ``memory://``, which passes messages to a :class:`~messaging_adapters.memory.broker.MemoryBroker`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from messaging.adapter import Adapter, Events, Sink
from messaging.errors import (
    ConnectionLostError,
    InvalidExtensionError,
    InvalidUrlError,
    PublishRefusedError,
    UnroutableError,
)
from messaging.instance import find_adapter
from messaging.model import QUEUE_BROKER_FEATURES, Capabilities, Features, SubscriptionSpec, headers, parse_url
from messaging.model.settings import Settings
from messaging_adapters.memory.broker import Client, MemoryBroker, join
from messaging_adapters.memory.modelled import NO_LOCAL, SUBSCRIBE_EXTENSIONS, check, delay_of
from messaging_adapters.memory.queues import MemoryConsumer, Queue, limits_of, settle
from messaging_adapters.memory.settings import MemorySettings, scheme_like

if TYPE_CHECKING:
    from messaging.model import BrokerUrl, Incoming, Outgoing, PublishPlan

_FEATURES: Final = QUEUE_BROKER_FEATURES | {
    Features.EXTENSION_LAST_WILL,
    Features.EXTENSION_RETAIN,
    *SUBSCRIBE_EXTENSIONS,
}
#: limit of payloads, bytes: a guard against mistakes, the same as RabbitMQ's
_MAX_MESSAGE_SIZE: Final = 128 * 2**20


class MemoryAdapter(Adapter):
    """The adapter of ``memory://``. QoS "0" is delivered without acknowledgement, "1" and "2" with it.

    With the option ``like`` it announces the features of another adapter, which checks what is asked for.
    """

    provider: ClassVar[str] = "rx-messaging.memory"
    settings_type: ClassVar[type[Settings]] = MemorySettings
    subscribe_extensions: ClassVar[Mapping[str, Callable[[Any], Any]]] = SUBSCRIBE_EXTENSIONS

    settings: MemorySettings

    def __init__(self, url: BrokerUrl, settings: Settings, name: str) -> None:
        super().__init__(url, settings, name)
        self.capabilities = Capabilities(
            name=name,
            protocols=("memory",),
            features=_FEATURES,
            qos_levels=("0", "1", "2"),
            default_qos="1",
            header_types=headers.TYPED,  # they are not encoded
            max_message_size=self.settings.max_message_size or _MAX_MESSAGE_SIZE,
            can_reject=True,
            subscribe_extensions=self.subscribe_extensions,
        )
        #: checks what is asked for; never connected
        self._model: Adapter | None = None
        scheme = scheme_like(self.settings)
        if scheme is not None:
            self._model = find_adapter(scheme)(parse_url(f"{scheme}://memory"), settings, name)
            # a session ends with its connection here
            self.capabilities = dataclasses.replace(self._model.capabilities, keeps_session=False)
        if url.port is not None or url.username is not None or url.path:
            raise InvalidUrlError(f"{url}: a memory URL is just memory://name, without user, port or path")
        self._client: Client | None = None
        #: kept while this instance reconnects
        self._broker: MemoryBroker | None = None
        #: kept over a reconnect
        self._will: Outgoing | None = None

    def check_publish(self, plan: PublishPlan) -> None:
        if self._model is not None:
            self._model.check_publish(plan)

    def check_subscribe(self, spec: SubscriptionSpec) -> None:
        if self._model is not None:
            self._model.check_subscribe(spec)
        check(spec)
        if spec.options.queue is None and not spec.options.autocreate:
            raise InvalidExtensionError(
                Features.EXTENSION_AUTOCREATE,
                "a subscription without queue makes one of its own; name an existing queue with the extension "
                f"{Features.EXTENSION_QUEUE!r}",
            )

    @property
    def client(self) -> Client:
        """Return this instance as its broker sees it.

        Raises:
            ConnectionLostError: it is not connected.
        """
        if self._client is None:
            raise ConnectionLostError(f"{self.name!r} is not connected to {self.url}")
        return self._client

    async def open(self, events: Events) -> bool:
        if self._broker is None:
            self._broker = join(self.url.host)
        broker = self._broker

        def dropped() -> None:
            self._client = None
            events.lost(ConnectionLostError(f"memory://{broker.name} dropped {self.name!r}"))

        client = self._client = Client(self.name, broker, dropped)
        client.will = self._will
        broker.clients[client] = None
        return False

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.leave()
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.release()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        client = self.client
        broker = client.broker
        touched: dict[Queue, None] = {}
        routed: PublishPlan | None = None
        queues: tuple[Queue, ...] = ()
        for outgoing in batch:
            plan = outgoing.plan
            if plan is not routed:
                queues = broker.route(plan)
                touched.update(dict.fromkeys(queues))
                routed = plan
            for queue in queues:
                if queue.is_full():
                    queues = await client.wait_for_room(outgoing, touched)
                    break
            if outgoing.settled:  # its deadline passed, here or in the outbox
                continue
            if client.gone:
                outgoing.fail(ConnectionLostError(f"memory://{broker.name} dropped {self.name!r}"))
                continue
            if not queues and plan.options.mandatory:
                outgoing.fail(UnroutableError(f"channel {plan.channel!r} has no subscribers at memory://{broker.name}"))
                continue
            if not queues and not plan.options.autocreate:
                outgoing.fail(
                    PublishRefusedError(
                        f"nothing is bound to channel {plan.channel!r} at memory://{broker.name}, and autocreate is off"
                    )
                )
                continue
            broker.publish(outgoing, queues, client)
            outgoing.confirm()
        for queue in touched:
            queue.dispatch()

    async def set_will(self, will: Outgoing) -> None:
        self._will = will
        if self._client is not None:
            self._client.will = will
        will.confirm()

    async def subscribe(self, spec: SubscriptionSpec, sink: Sink) -> MemoryConsumer:
        client = self.client
        custom = spec.options.custom
        consumer = client.broker.subscribe(spec, sink, limits_of(spec, self.settings))
        consumer.delay = delay_of(spec)
        if custom.get(NO_LOCAL):
            consumer.queue.excluded = client
        client.consumers[consumer] = None
        return consumer

    async def declare_queue(self, specs: Sequence[SubscriptionSpec], *, is_bound: bool) -> None:
        for spec in specs:
            self.client.broker.declare(spec, limits_of(spec, self.settings), is_bound=is_bound)

    async def peek_queue(self, name: str, limit: int) -> list[Incoming]:
        return self.client.broker.named(name).peek(limit)

    async def purge_queue(self, name: str) -> int:
        return self.client.broker.named(name).purge()

    async def delete_queue(self, name: str, *, if_empty: bool, if_unused: bool) -> int:
        return self.client.broker.delete(name, if_empty=if_empty, if_unused=if_unused)

    async def join(self, spec: SubscriptionSpec, sink: Sink, handle: MemoryConsumer | None) -> MemoryConsumer:
        """See ``Adapter.join``: one queue with several patterns."""
        if handle is None:
            return await self.subscribe(spec, sink)
        self.client.broker.bind(handle, spec.channel)
        return handle

    async def part(self, handle: MemoryConsumer, channel: str) -> None:
        self.client.broker.unbind(handle, channel)

    async def unsubscribe(self, handle: Any) -> None:
        client = self._client
        if client is not None:
            client.consumers.pop(handle, None)
            client.broker.unsubscribe(handle)

    def acknowledge(self, tokens: Sequence[Any]) -> None:
        settle(tokens, redeliver=False)

    def reject(self, tokens: Sequence[Any]) -> None:
        # in reverse, so that they are in their order at the front of the queue
        settle(tokens[::-1], redeliver=True)

    def redelivers(self, spec: SubscriptionSpec, handle: Any = None) -> bool:  # noqa: ARG002  # the contract's
        """Return whether the subscription has a named queue, also like an adapter that cannot reject."""
        return spec.options.queue is not None

    def is_stale(self, token: Any) -> bool:
        closed: bool = token[0].closed
        return closed

    def pause(self, handle: Any | None) -> None:
        """Hand out no more messages of a subscription; there is nothing else to be read."""
        if handle is not None:
            handle.paused = True

    def resume(self, handle: Any | None) -> None:
        if handle is not None:
            handle.paused = False
            handle.queue.dispatch()
