"""The conformance suite: what every adapter promises, tested through the public API.

::

    python -m messaging.testing.conformance nats://localhost:4222         # an adapter whose package is installed
    python -m messaging.testing.conformance nats://localhost:4222 -k ack  # any option of pytest follows the URLs
    python -m messaging.testing.conformance                               # the adapters of this project

The features that an instance announces select the tests: a test marked ``feature("retain")`` runs on the backends that
announce ``retain``, and is skipped on others. A test that is skipped for another reason fails, and so does a backend
that announces a feature without a test (:mod:`.test_coverage`). Tests marked ``wire`` cut the network in a proxy,
which ``memory://`` lacks. Tests marked ``restart`` need a broker that the suite starts itself. Of the backends on
brokers that the suite starts itself, ``mqtt311-envelope`` is MQTT 3.1.1 with one more layer: it runs the tests marked
``envelope``, of what the envelope adds and carries.

The command runs ``pytest -p messaging.testing.plugin --pyargs messaging.testing.conformance --backend-url URL``.
"""

from typing import Final

#: backends on brokers that the suite starts itself: the fixture of the broker, and the options that follow its URL
NETWORKED: Final = {
    "mqtt311": ("mosquitto", "?version=3.1.1"),
    "mqtt311-envelope": ("mosquitto", "?version=3.1.1&envelope=true"),
    "mqtt5": ("mosquitto", "?version=5"),
    "amqp": ("rabbitmq", ""),
}

_MQTT: Final = {*("autocreate", "brokerRedelivery", "priority", "queueAdministration", "queueRetention", "routingKey")}
#: features that the adapters of this project do not announce: their tests are left out, rather than skipped
LACKING: Final[dict[str, frozenset[str]]] = {
    "memory": frozenset(),
    "mqtt311": frozenset(
        {
            *("deduplicate", "generateCorrelationId", "generateReplyChannel", "headers", "mandatory", "messageId"),
            *("messageProperties", "replyTo", "replyToManyPublish", "replyToManySubscribe", "timeToLive"),
            *_MQTT,
        }
    ),
    "mqtt311-envelope": frozenset({"mandatory", *_MQTT}),
    "mqtt5": frozenset(_MQTT),
    "amqp": frozenset({"lastWill", "retain"}),
}
