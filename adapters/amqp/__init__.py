"""AMQP 0-9-1 (RabbitMQ), URL schemes ``amqp`` and ``amqps``. The extra ``amqp`` is needed to connect, not to import.

::

    adapter           AmqpAdapter: the contract, checks before anything is sent
    settings          AmqpSettings
    target            address, credentials, TLS
    extensions        the extensions of AMQP alone: keys, checks, documentation
    declarations      exchanges, queues and bindings of a context, compiled; contradictions
    link              connections, publisher and subscriptions, from one connection to its loss
    connection        one connection: aio-pika's, with a fast lane for the frames of messages
    protocol          the stream below aiormq: which frame goes to which reader
    internals         adaptations to aio-pika, aiormq and pamqp beyond their public API, and their fallbacks
    topology          exchanges, queues, bindings and consumers at the broker
    publisher         the window of unconfirmed messages, channels that the broker closes
    publish_channels  the channels of a publisher
    plans             the compiled parts of a publish
    confirms          confirms and returned messages of one channel
    retries           messages that the broker refused for now
    overflow          queues that refuse messages when they are full
    consumer          a subscription: deliveries and acknowledgements
    deliveries        deliveries assembled from frames
    routes            the channels that deliveries arrive on
    replies           direct reply-to
    streams           position of reading a stream
    delays            rejected messages that wait at the broker
    counting          the header that counts their deliveries
    names             channel <-> routing key
    properties        context <-> message properties
    compression       kombu's conventions
    tables            field tables
    frames            AMQP frames of publishing and consuming
"""

from adapters.amqp.adapter import AmqpAdapter
from adapters.amqp.settings import AmqpSettings

__all__ = ["AmqpAdapter", "AmqpSettings"]
