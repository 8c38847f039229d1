"""An AMQP 0-9-1 broker at the level of bytes that behaves as RabbitMQ 3.10.8 does, under virtual time.

::

    broker = AmqpBroker(host)
    connection = broker.accept(peer)  # the network calls connection.received(data) and connection.lost()
    broker.faults = AmqpFaults(nack=0.1)

Methods take effect, and are answered, while the bytes that ask for them are received. Later, by timers of the host,
come confirms of stored messages, expiry, heartbeats, and what faults delay.

=====================  ================================================================================================
module                 subject
=====================  ================================================================================================
``broker``             connections, virtual hosts, alarms, restarts, description
``connection``         frames, channels, heartbeats, the end
``handshake``          login, limits, virtual host
``channel``            methods, publishing, deliveries, acknowledgements
``declarations``       methods about exchanges, queues and bindings
``confirms``           publisher confirms and their batches
``virtual_host``       declarations, bindings, routing, dead letters
``queues, quorum``     classic and quorum queues
``consumers``          credit and turns of consumers
``storage``            what survives a kill
``faults``             faults that the owner switches on
``compare``            comparison with a real RabbitMQ, of random ``programs``
=====================  ================================================================================================
"""

from tests.simulation.brokers.amqp.broker import EPOCH, AmqpBroker, Counters
from tests.simulation.brokers.amqp.faults import AmqpFaults

__all__ = ["EPOCH", "AmqpBroker", "AmqpFaults", "Counters"]
