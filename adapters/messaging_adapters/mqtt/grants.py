"""What the broker grants, compared with what was asked for.

A guarantee that is lost is an error: a session that the broker does not keep, a subscription with acknowledgement that
it makes without. Less of the same is a warning, given once by an instance for each case.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from messaging.bounded import BoundedCache
from messaging.errors import ConnectFailedError

if TYPE_CHECKING:
    from messaging_adapters.mqtt.handshake import Connack, Target

logger = logging.getLogger(__name__)

#: A broker counts a client as lost after this many intervals of silence (MQTT-3.1.2-22).
_SILENT_INTERVALS: Final = 1.5


def keepalive(asked: int, granted: int | None) -> int:
    """Return the interval of pings, seconds: the broker's may shorten the one asked for, but not lengthen it.

    A client may send pings at any time (MQTT 5, 3.1.2.10), so this side notices a lost broker as early as it was
    asked to.
    """
    if granted is None:
        return asked
    return min(asked, granted) if asked and granted else asked or granted


class Grants:
    """Compares the answers of the brokers of one instance. On the loop."""

    def __init__(self) -> None:
        self._warned: BoundedCache[str, bool] = BoundedCache()

    def _warn(self, target: Target, text: str) -> None:
        key = f"{target} {text}"
        if key not in self._warned:
            self._warned[key] = True
            logger.warning("%s: %s", target.component, text)

    def connected(self, target: Target, connack: Connack, *, needs_session: bool) -> ConnectFailedError | None:
        """Compare a CONNACK. Return the error for a guarantee that the broker does not give.

        Args:
            target: what CONNECT asked for.
            connack: what the broker granted.
            needs_session: whether the user asked for a session that outlives the connection.
        """
        asked, granted = target.session_expiry, connack.session_expiry
        if granted is not None and not granted and needs_session:
            return ConnectFailedError(
                f"{target} keeps no session: it grants a session expiry of 0 s, and {asked} s were asked for; have the "
                "broker allow sessions, or connect without 'session_expiry' and 'keep_session'"
            )
        if granted is not None and granted < asked:
            self._warn(
                target,
                f"the broker keeps the session of a lost client for {granted} s, not for {asked} s: messages that it "
                "holds for longer are lost",
            )
        asked, granted = target.keepalive, connack.keepalive
        if granted is not None and asked and (granted > asked or not granted):
            when = f"after up to {granted * _SILENT_INTERVALS:g} s" if granted else "never"
            self._warn(
                target,
                f"the broker set the keepalive to {granted} s instead of {asked} s: it notices the silent loss of this "
                f"client {when}, and sends its last will then",
            )
        return None

    def subscribed(self, target: Target, topic_filter: str, asked: int, granted: int) -> None:
        """Compare the QoS of a SUBACK; see :func:`is_unacknowledged` for the one that is refused."""
        if granted < asked:
            self._warn(
                target,
                f"the broker granted QoS {granted} to the subscription to {topic_filter!r}, which asked for QoS "
                f"{asked}: messages may come twice",
            )

    def resumed(self, target: Target, *, asked: bool, granted: bool) -> None:
        """Compare the session of a reconnect; each one that is lost is a warning of its own."""
        if asked and not granted:
            logger.warning(
                "%s: the broker no longer has the session of this client: messages that it held for it are lost; "
                "subscribing again",
                target.component,
            )


def is_unacknowledged(asked: int, granted: int) -> bool:
    """Return whether a subscription with acknowledgement was granted without: messages would be lost on the way."""
    return asked > 0 and granted == 0
