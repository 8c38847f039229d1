"""Broker channels as Spark sources.

::

    journaled          readers of MQTT channels and AMQP queues, through a journal
    rabbitmq_streams   readers of RabbitMQ streams, which need no journal
    rows, typed        the columns that Spark gets: of the message, or parsed from the payload
    receiver           a connection that writes what it receives to one partition of the journal
    group              the name under which the broker keeps messages for a query; its sessions and queues
    group_lock         one query for each group
"""
