"""Faults of wills and births."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

DEVICES = (
    Planted(
        "what waits in the outbox is published before the birth",
        "Register a will with the first connection, publish a birth after each",
        "devices",
        (
            Edit(
                "messaging/connection/connection.py",
                "        if not self._loss.is_set():\n            await self.presence.connected()\n",
                "        self.outbox.connected()\n        await clock.sleep(0.01)\n"
                "        if not self._loss.is_set():\n            await self.presence.connected()\n",
            ),
        ),
        "tests/instance/test_presence.py::test_the_will_goes_with_the_first_connect",
    ),
    Planted(
        "only the first connection publishes the birth",
        "Register a will with the first connection, publish a birth after each",
        "devices",
        (
            Edit(
                "messaging/connection/connection.py",
                "        if not self._loss.is_set():\n            await self.presence.connected()\n",
                "        if not self._loss.is_set() and not self.ready.done():\n"
                "            await self.presence.connected()\n",
            ),
        ),
        "tests/instance/test_presence.py::test_the_will_goes_with_the_first_connect",
    ),
    Planted(
        "an instance that closes in good order leaves its will to the broker",
        "Register a will with the first connection, publish a birth after each",
        "devices",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/connection.py",
                "            self.transport.finish(packets.disconnect(session_expiry=session_expiry))\n",
                '            self.transport.finish(b"")\n',
            ),
        ),
        "tests/mqtt/test_connection.py::test_closing_in_good_order_publishes_no_will_even_with_unread_data",
    ),
    Planted(
        "the broker does not get the will again with a further connection",
        "Register a will with the first connection, publish a birth after each",
        "devices",
        (
            Edit(
                "adapters/messaging_adapters/mqtt/session.py",
                "            self._outgoing.confirm()\n            self._outgoing = None\n",
                "            self._outgoing.confirm()\n            self._outgoing = self.will = None\n",
            ),
        ),
        "tests/instance/test_presence.py::test_the_will_goes_with_the_first_connect",
    ),
)
