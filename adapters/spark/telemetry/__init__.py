"""Device telemetry through Spark: a pipeline that works, to try and to copy from; ``messaging pipeline demo``.

::

    model       readings and alerts             anomaly     which readings are anomalies, and why
    job         the streaming job               batch       the batch job over its tables
    bridge      alerts onto an event bus        session     a Spark session of our own
    fleet       simulated devices               processes   the fleet's process, a private mosquitto
    report      checks and figures of a run     plots       pictures of it
    run         all of it, once                 command     ``messaging pipeline``

``examples/telemetry_pipeline`` runs the jobs against brokers that are there.
"""
