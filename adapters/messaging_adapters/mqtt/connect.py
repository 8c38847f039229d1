"""What CONNECT says of an instance: its broker and client, and its last will."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from messaging.connection.proxies import parse_proxy
from messaging.connection.tls import ClientTls
from messaging.errors import AuthenticationError, MissingExtraError, PayloadTooLargeError, PublishRefusedError
from messaging_adapters.mqtt import settings as options
from messaging_adapters.mqtt.capabilities import WILL_DELAY
from messaging_adapters.mqtt.handshake import ConnectTarget, Will

if TYPE_CHECKING:
    from messaging.errors import ConnectFailedError
    from messaging.model import BrokerUrl, Outgoing
    from messaging_adapters.mqtt.mapping import PublishCodec
    from messaging_adapters.mqtt.settings import MqttSettings

#: bytes of the payload of a will
_MAX_PAYLOAD: Final = 65_535
#: reasons of a refusing CONNACK that blame the will: topic invalid, payload format, retain and QoS not supported
_REFUSALS: Final = ("Topic name invalid", "Payload format invalid", "Retain not supported", "QoS not supported")


def target_of(url: BrokerUrl, settings: MqttSettings, name: str) -> ConnectTarget:
    """Return where to connect to, and as which client."""
    username, password = options.credentials(url, settings)
    path = None
    if url.scheme in options.WEB:
        try:
            from messaging_adapters.mqtt import websocket as websocket
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "websockets":
                raise
            raise MissingExtraError("ws", f"{url.scheme}://") from error
        path = "/" + quote(url.path or options.WEB_PATH)
    return ConnectTarget(
        host=url.host,
        port=url.port or options.PORTS[url.scheme],
        name=name,
        settings=settings,
        client_id=options.client_id(settings, name),
        username=username,
        password=password,
        tls=ClientTls(settings, url.label(name)) if url.scheme in options.SECURE else None,
        proxy=parse_proxy(settings.proxy),
        web_path=path,
    )


class ConnectWill:
    """The will that CONNECT carries.

    Attributes:
        will: the will; ``None`` for none.
    """

    def __init__(self, codec: PublishCodec) -> None:
        self._codec = codec
        #: the message, until the broker has registered it
        self._outgoing: Outgoing | None = None
        #: whether the instance has connected without it
        self._is_trial = True
        self.will: Will | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the broker has not registered it yet."""
        return self._outgoing is not None

    def set(self, outgoing: Outgoing, *, is_trial: bool) -> bool:
        """Set the will. Return whether it fits; otherwise it has failed.

        With ``is_trial`` a connection that is refused with it is tried without it.
        """
        payload, properties = self._codec.will(outgoing)
        if len(payload) > _MAX_PAYLOAD:
            outgoing.fail(PayloadTooLargeError(len(payload), _MAX_PAYLOAD, "a last will in MQTT"))
            return False
        options = outgoing.plan.options
        delay = math.ceil(options.custom.get(WILL_DELAY, 0))
        channel = outgoing.plan.channel or ""
        self.will = Will(channel, payload, int(options.qos), options.retain, properties, delay)
        self._outgoing = outgoing
        self._is_trial = is_trial
        return True

    def current(self) -> Will | None:
        """Return the will for the next CONNECT: none if its deadline has passed meanwhile."""
        if self._outgoing is not None and self._outgoing.settled:
            self.will = self._outgoing = None
        return self.will

    def registered(self) -> None:
        """Confirm the will: the broker has accepted the connection."""
        if self._outgoing is not None:
            self._outgoing.confirm()
            self._outgoing = None

    def connect_failed(self, error: ConnectFailedError) -> None:
        """Drop a new will that is, or may be, the reason why the broker refused the connection."""
        outgoing = self._outgoing
        suspicious = isinstance(error, AuthenticationError) or any(reason in str(error) for reason in _REFUSALS)
        if outgoing is not None and suspicious and self._is_trial:
            self.will = self._outgoing = None
            outgoing.fail(PublishRefusedError(f"the last will is not registered: {error}"))
