"""Faults of ``memory://``."""

from __future__ import annotations

from tests.simulation.plants.model import Edit, Planted

MEMORY = (
    Planted(
        "a rejected message with a priority that none before it had is lost",
        "memory://: a rejected message with a priority none before it had waited with was lost",
        "memory",
        (
            Edit(
                "adapters/messaging_adapters/memory/queues.py",
                """\
        self._line(entry).appendleft((payload, plan, correlation_id, retained, deliveries + 1, expires))
""",
                """\
        line = self._ready[plan.options.priority or 0]
        line.appendleft((payload, plan, correlation_id, retained, deliveries + 1, expires))
        self._length += 1
""",
            ),
        ),
        "messaging/testing/conformance/test_redelivery.py::test_a_redelivered_message_is_the_same_message"
        " --backend memory",
    ),
    Planted(
        "a message whose consumer acknowledges at once stops the queue",
        "Review: loop given back between batches, a worker in reserve, no recursion in the memory "
        "broker, bounded outbox",
        "memory",
        (
            Edit(
                "adapters/messaging_adapters/memory/queues.py",
                "        if self._dispatching:\n            self._dispatch_again = True\n            return\n",
                "        if self._dispatching:\n            return\n",
            ),
        ),
        "tests/receiving/test_no_loss.py::test_memory_hands_out_a_burst_in_order_however_small_the_credit",
    ),
    Planted(
        "delayed messages take no room in a bounded queue",
        "Hold memory:// to the extensions of the real adapters",
        "memory",
        (
            Edit(
                "adapters/messaging_adapters/memory/queues.py",
                "        return self._length + len(self._delayed) >= self._max_length",
                "        return self._length >= self._max_length",
            ),
        ),
        "tests/memory/test_like.py::test_delayed_messages_take_room_in_a_bounded_queue",
    ),
    Planted(
        "the last will of a dropped client is not published",
        "Wills are watched over; order of what is sent again; no leaked loops, listeners or threads",
        "memory",
        (
            Edit(
                "adapters/messaging_adapters/memory/broker.py",
                "        will, self.will = self.will, None\n        broker = self.broker\n",
                "        will = self.will = None\n        broker = self.broker\n",
            ),
        ),
        "messaging/testing/conformance/test_last_will.py"
        "::test_a_will_is_sent_when_the_link_is_lost_and_not_before --backend memory",
    ),
)
