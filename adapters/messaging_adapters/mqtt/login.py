"""The log-in of an instance whose credentials may change, and what becomes of the session at a planned reconnect.

**Log-in.** Each connection is made with new credentials. While connected, MQTT 5 logs in anew with AUTH if the instance
has an authentication method (4.12.1); otherwise the connection is ended in good order, and another one is made.

**Bridged sessions.** A planned reconnect loses no message with QoS 1 or 2 if the broker keeps the session meanwhile.
With MQTT 5 it does so for every instance whose credentials may change: CONNECT asks for a session of one second, the
DISCONNECT of a planned reconnect extends it, and that of ``close`` ends it. A broker that refuses the credentials of
AUTH ends the connection, and keeps the session for that second. After any other loss a new session begins, as without
this. MQTT 3.1.1 has no such means: there ``clean_start=false`` keeps the session.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from messaging.errors import CredentialsError

if TYPE_CHECKING:
    from messaging.model.credentials import Credentials
    from messaging_adapters.mqtt.handshake import Connack, Target
    from messaging_adapters.mqtt.settings import MqttSettings

#: seconds that the broker keeps the session of a bridged connection that is lost: the least there is. DISCONNECT may
#: change the time only if CONNECT asked for more than none (MQTT 5, 3.14.2.2.2).
_SHORTEST: Final = 1
#: seconds that it keeps the session for a planned reconnect
_BRIDGE: Final = 60


class LogIn:
    """The credentials of one instance. On the loop.

    Attributes:
        is_bridging: whether a planned reconnect is under way for which the broker keeps a bridged session.
        is_renewing: whether new credentials are being handed over on the connection.
    """

    def __init__(self, settings: MqttSettings, username: str | None) -> None:
        self._username = username
        self._has_method = settings.auth_method is not None
        self._bridges = settings.v5 and settings.has_provider and not settings.persistent
        self.is_bridging = False
        self.is_renewing = False

    def target(self, target: Target, credentials: Credentials) -> Target:
        """Return ``target`` with these credentials.

        Raises:
            CredentialsError: they have no user name.
        """
        username = credentials.username if credentials.username is not None else self._username
        if username is None and not self._has_method:
            raise CredentialsError(
                "the credentials have no user name: return one with the password, or set the option 'username'"
            )
        target.secrets.append(credentials.password)
        return dataclasses.replace(target, username=username, password=credentials.password)

    def session_expiry(self, given: int) -> int:
        """Return the session expiry interval of CONNECT, seconds."""
        return _SHORTEST if self._bridges else given

    def begin_planned(self) -> int | None:
        """Note a planned reconnect. Return the session expiry interval of its DISCONNECT; ``None`` for no change."""
        self.is_bridging = self._bridges
        return _BRIDGE if self._bridges else None

    def end(self) -> int | None:
        """Return the session expiry interval of a DISCONNECT that ends the instance; ``None`` for no change."""
        return 0 if self._bridges else None


class SessionPlace:
    """The broker that has the session which the subscriptions and unfinished handshakes belong to."""

    def __init__(self) -> None:
        self._at: tuple[str, int, str | None] | None = None

    def is_left(self, target: Target, connack: Connack) -> bool:
        """Return whether the session at ``target`` is not the one of the last connection, or may not be.

        A session of this client at another host is that of an earlier connection to it, unless the brokers share their
        sessions, which a client cannot know. Its packet ids stand for other messages. So the subscriptions are made
        again, the unconfirmed messages are sent again as new ones, and its unsettled messages arrive as new ones.
        """
        before, self._at = self._at, (target.host, target.port, target.address)
        return connack.session_present and before is not None and before != self._at
