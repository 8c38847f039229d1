"""The handshake of a connection (2.2.4): login, limits, virtual host."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from pamqp import commands

from tests.simulation.brokers.amqp import methods, tables
from tests.simulation.brokers.amqp.errors import AmqpError
from tests.simulation.brokers.amqp.tables import Field, Table, text

if TYPE_CHECKING:
    from tests.simulation.brokers.amqp.connection import AmqpConnection

HEADER: Final = b"AMQP\x00\x00\x09\x01"
#: what the broker offers
CHANNEL_MAX: Final = 2047
FRAME_MAX: Final = 131_072
_FRAME_MIN: Final = 4096

_CAPABILITIES: Final = (
    "publisher_confirms", "exchange_exchange_bindings", "basic.nack", "consumer_cancel_notify", "connection.blocked",
    "consumer_priorities", "authentication_failure_close", "per_consumer_qos", "direct_reply_to",
)  # fmt: skip
_PROPERTIES: Final[Table] = {
    "capabilities": Field("F", {name: Field("t", True) for name in _CAPABILITIES}),
    "cluster_name": text("simulated@localhost"),
    "copyright": text("Copyright (c) 2007-2022 VMware, Inc. or its affiliates."),
    "information": text("Licensed under the MPL 2.0. Website: https://rabbitmq.com"),
    "platform": text("Erlang/OTP 25.2.3"),
    "product": text("RabbitMQ"),
    "version": text("3.10.8"),
}
START: Final = methods.encode(
    commands.Connection.Start, 0, version_major=0, version_minor=9, server_properties=_PROPERTIES,
    mechanisms=b"AMQPLAIN PLAIN", locales=b"en_US",
)  # fmt: skip


class Handshake:
    """The handshake of ``connection``, which it leads through its states."""

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection

    def take(self, index: int, data: bytes, at: int) -> None:
        """Take the method ``index``, whose arguments start at ``at``.

        Raises:
            AmqpError: the connection is refused.
        """
        state = self._connection.state
        if state == "start" and index == commands.Connection.StartOk.index:
            self._log_in(methods.decode(index, data, at))
        elif state == "tune" and index == commands.Connection.TuneOk.index:
            self._tune(methods.decode(index, data, at))
        elif state == "open" and index == commands.Connection.Open.index:
            self._open(methods.decode(index, data, at))
        elif index == commands.Connection.Close.index:
            self._connection.send(commands.Connection.CloseOk)
            self._connection.finish()
        else:
            name = methods.NAMES.get(index, "unknown")
            raise AmqpError(503, f"unexpected method in connection state {state}: {name}")

    def _log_in(self, given: Any) -> None:
        connection = self._connection
        capabilities = given.client_properties.get("capabilities")
        if capabilities is not None and capabilities.kind == "F":
            connection.capabilities = {name: each.value is True for name, each in capabilities.value.items()}
        if given.mechanism not in ("PLAIN", "AMQPLAIN"):
            raise AmqpError(503, f"unknown authentication mechanism '{given.mechanism}'")
        credentials = _credentials(given.mechanism, given.response)
        if credentials is None or not connection.broker.login(*credentials):
            connection.broker.host.note(f"amqp: {connection.peer.name}: login refused")
            if connection.can("authentication_failure_close"):
                what = f"Login was refused using authentication mechanism {given.mechanism}. For details see the broker"
                refusal = AmqpError(403, f"{what} logfile.")
                connection.send(commands.Connection.Close, reply_code=403, reply_text=refusal.reply_text())
            connection.finish()
            return
        connection.user, connection.secret = credentials
        connection.user_bytes = connection.user.encode()
        connection.state = "tune"
        connection.send(
            commands.Connection.Tune,
            channel_max=CHANNEL_MAX,
            frame_max=FRAME_MAX,
            heartbeat=connection.broker.heartbeat,
        )

    def _tune(self, given: Any) -> None:
        for name, lowest, highest, value in (
            ("frame_max", _FRAME_MIN, FRAME_MAX, given.frame_max),
            ("channel_max", 1, CHANNEL_MAX, given.channel_max),
        ):
            if value and value < lowest:
                raise AmqpError(530, f"negotiated {name} = {value} is lower than the minimum allowed value ({lowest})")
            if not value or value > highest:
                shown = value or "no limit"
                what = f"negotiated {name} = {shown} is higher than the maximum allowed value ({highest})"
                raise AmqpError(530, what)
        connection = self._connection
        connection.frame_max, connection.channel_max = given.frame_max, given.channel_max
        connection.state = "open"
        connection.begin_heartbeats(given.heartbeat)

    def _open(self, given: Any) -> None:
        connection = self._connection
        vhost = connection.broker.vhosts.get(given.virtual_host)
        if vhost is None:
            raise AmqpError(530, f"vhost {given.virtual_host} not found")
        connection.opened(vhost)
        connection.send(commands.Connection.OpenOk)


def _credentials(mechanism: str, response: bytes) -> tuple[str, str] | None:
    """Return user and password, or ``None`` if the response is malformed."""
    if mechanism == "PLAIN":
        parts = response.split(b"\x00")
        if len(parts) != 3:
            return None
        found = parts[1], parts[2]
    else:
        table, _ = tables.read_table(struct.pack(">I", len(response)) + response, 0)
        login, password = table.get("LOGIN"), table.get("PASSWORD")
        if login is None or password is None:
            return None
        found = login.value, password.value
    return found[0].decode("utf-8", "replace"), found[1].decode("utf-8", "replace")
