"""What the broker keeps on its disk: sessions and retained messages, as of the last save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.brokers.mqtt.messages import Message
from tests.simulation.brokers.mqtt.packets import V311
from tests.simulation.brokers.mqtt.session import NEVER, Session
from tests.simulation.brokers.mqtt.topics import Subscription

if TYPE_CHECKING:
    from tests.simulation.brokers.mqtt.broker import MqttBroker


class Disk:
    """The last saved state. A save copies the sessions, but no message: messages never change.

    Sessions that end with their connection are not saved, and neither are wills: Mosquitto does the same.
    """

    __slots__ = ("_retained", "_sessions", "saved_at")

    def __init__(self) -> None:
        self._sessions: list[Session] = []
        self._retained: list[Message] = []
        #: virtual time of the last save
        self.saved_at = 0.0

    def save(self, broker: MqttBroker) -> None:
        """Save the state of ``broker``; it replaces the last saved one."""
        self.saved_at = broker.host.now()
        self._sessions = [session.saved() for session in broker.sessions.values() if session.expiry]
        self._retained = list(broker.retained)

    def load(self, broker: MqttBroker) -> None:
        """Give ``broker``, which has no state, the sessions and the retained messages that were saved.

        The expiry interval of a session that was connected when it was saved begins now. That of others goes on.
        """
        now = broker.host.now()
        for message in self._retained:
            broker.retained.put(message)
        for saved in self._sessions:
            session = saved.saved()
            session.version = V311  # not saved by Mosquitto; what overlaps is delivered once until the next CONNECT
            for name, old in saved.subscriptions.items():
                if old.group is not None and not broker.settings.saves_shared:
                    del session.subscriptions[name]
                    continue
                new = Subscription(session, name, old.qos, old.no_local, old.retain_as_published, old.identifiers)
                session.subscriptions[name] = new
                broker.router.add(new)
            if session.ended_at is None:
                session.ended_at = now
            broker.sessions[session.client_id] = session
            if session.expiry != NEVER:
                broker.expire_later(session, session.ended_at + session.expiry - now)
