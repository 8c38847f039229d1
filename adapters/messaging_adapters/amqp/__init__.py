"""AMQP 0-9-1 (RabbitMQ), URL schemes ``amqp`` and ``amqps``. The extra ``amqp`` is needed to connect, not to import.

``adapter`` implements the contract. ``extensions`` and ``declarations`` compile contexts. ``link`` holds the two
connections from ``open`` to the next loss. ``connection`` and ``protocol`` put the lane for messages under aio-pika,
``publisher`` and ``consumer`` are its two sides. ``internals`` reaches below the public API of the libraries.
"""

from messaging_adapters.amqp.adapter import AmqpAdapter
from messaging_adapters.amqp.target import AmqpSettings

__all__ = ["AmqpAdapter", "AmqpSettings"]
