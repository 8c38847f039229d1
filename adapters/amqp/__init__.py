"""AMQP 0-9-1 (RabbitMQ), URL schemes ``amqp`` and ``amqps``. Needs the extra ``amqp`` to be used, not to be imported.

::

    adapter       AmqpAdapter, AmqpSettings: the contract, the settings, what is checked before anything is sent
    extensions    the extensions of AMQP alone: keys, checks, documentation
    declarations  what they mean together: exchanges, queues, bindings, and what contradicts what
    link          what lives from one connection to its loss
    connection    one connection: aiormq's, with a lane for what passes once per message
    protocol      the stream under aiormq: who gets which frame
    target        address, credentials, TLS
    publisher     the in-flight window, channels that the broker closes
    confirms      confirms and returned messages of one channel
    consumer      a subscription: deliveries and acknowledgements
    streams       how far a stream was read
    delays        rejected messages that wait at the broker
    counting      the header that counts them
    topology      exchanges and queues, found or made
    names         channel <-> routing key
    properties    context <-> message properties
    tables        field tables
    frames        AMQP frames of publishing and consuming
"""

from adapters.amqp.adapter import AmqpAdapter, AmqpSettings

__all__ = ["AmqpAdapter", "AmqpSettings"]
