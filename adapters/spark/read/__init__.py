"""Broker channels as Spark sources.

::

    journaled          readers of MQTT channels and AMQP queues, through a journal
    rabbitmq_streams   readers of RabbitMQ streams, which need no journal
    rows               the columns and the batch sizes that Spark gets
    typed              columns parsed from the payload
    receiver           a connection that writes what it receives to one partition of the journal
    receiver_settings  the client ids, queues and extensions of the receivers
    group              the name under which the broker keeps messages for a query
    group_lock         one query for each group, on one machine and on AMQP
    takeover           one query for each group, on MQTT

Imports :mod:`adapters.spark.journal`, options, columns, errors and task connections; nothing of the writers, the
archive or the telemetry pipeline. :mod:`adapters.spark.formats` hands the readers to Spark.
"""
