"""The telemetry pipeline: a working example of Spark jobs over MQTT, to run and to copy; ``messaging pipeline demo``.

::

    model       readings and alerts             anomaly     the rule for anomalies
    job         the streaming job               batch       the batch job over its tables
    bridge      alerts onto an event bus        session     the Spark session of a job
    fleet, plan simulated devices               processes   the fleet's process, a private mosquitto
    report      checks and figures of a run     plots       pictures of it
    run         all of it, once                 command     ``messaging pipeline``

``examples/telemetry_pipeline`` runs the jobs against your own broker. The package uses the public API of the data
source alone: :func:`pyspark_messaging.register` and the format ``messaging``.
"""
