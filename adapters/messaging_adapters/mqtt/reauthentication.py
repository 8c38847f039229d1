"""Re-authentication on a connection, with the AUTH packet (MQTT 5, 4.12.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from messaging.errors import ConnectionLostError
from messaging.execution import clock
from messaging_adapters.mqtt import packets
from messaging_adapters.mqtt.packets import ProtocolError

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import Target
    from messaging_adapters.mqtt.writing import Writer


class Reauthentication:
    """The authentication exchanges of one connection, one at a time. On the loop.

    Supported are methods of one step: the client sends its token, and the broker accepts or refuses it.
    """

    def __init__(self, target: Target, writer: Writer) -> None:
        self._target = target
        self._writer = writer
        self._answer: asyncio.Future[bool] | None = None

    async def begin(self, target: Target, timeout: float) -> bool:
        """Authenticate with the credentials of ``target``.

        Returns:
            Whether the broker accepted them; ``False`` if it asks for another step, or does not answer within
            ``timeout`` seconds. A broker that refuses them ends the connection.

        Raises:
            ConnectionLostError: the connection ended meanwhile.
        """
        if target.auth_method is None or target.password is None or self._answer is not None:
            return False
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            self._writer.send(
                packets.auth(packets.REAUTHENTICATE, target.auth_method, target.password.get_secret_value().encode())
            )
            done, _ = await clock.wait([answer], timeout=timeout)
            return answer.result() if done else False
        finally:
            self._answer = None

    def answered(self, body: bytes) -> None:
        """Process an AUTH.

        Raises:
            ProtocolError: no exchange is under way, or the reason code is unknown.
        """
        reason = body[0] if body else 0
        if self._answer is None or reason not in (0, packets.CONTINUE_AUTHENTICATION):
            raise ProtocolError(f"an unexpected AUTH with reason code 0x{reason:02X}")
        if not self._answer.done():
            self._answer.set_result(reason == 0)

    def fail_pending(self) -> None:
        """Fail an exchange without answer: the connection ended. Idempotent."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionLostError(f"connection to {self._target} lost"))
            self._answer.exception()  # marks it as retrieved: its caller may have been cancelled
