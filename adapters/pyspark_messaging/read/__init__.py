"""Broker channels as Spark sources.

::

    journaled          readers of MQTT channels and AMQP queues, through a journal
    rabbitmq_streams   readers of RabbitMQ streams, which need no journal
    rows, typed        the columns that Spark gets: of the message, or parsed from the payload
    receiver           a connection that writes what it receives to one partition of the journal
    receiver_settings  the client ids, queues and extensions of the receivers
    group, group_lock  the name under which the broker keeps messages for a query; one query for each
    takeover           one query for each group, on MQTT
"""
