"""AMQP 0-9-1 (RabbitMQ), URL schemes ``amqp`` and ``amqps``. Needs the extra ``amqp`` to be used, not to be imported.

::

    adapter      AmqpAdapter, AmqpSettings: the contract, the settings, what is checked before anything is sent
    link         what lives from one connection to its loss
    connection   one connection: aiormq's, with a lane for what passes once per message
    publisher    confirms, the in-flight window, channels that the broker closes
    consumer     a subscription: deliveries and acknowledgements
    topology     exchanges and queues
    names        channel <-> routing key
    properties   context <-> message properties
    frames       AMQP frames of publishing and consuming
"""

from adapters.amqp.adapter import AmqpAdapter, AmqpSettings

__all__ = ["AmqpAdapter", "AmqpSettings"]
