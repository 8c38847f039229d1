"""Tools for tests of adapters and applications: a pytest plugin, a virtual clock, brokers, the conformance suite.

===============  ===================================================================================================
``conformance``  the suite that every adapter passes; ``python -m messaging.testing.conformance URL``
``plugin``       the pytest plugin: the options and marks of the suite, fixtures such as ``mosquitto``
``brokers``      Mosquitto and RabbitMQ as private processes that a test starts, kills and restarts
``postgresql``   PostgreSQL likewise
``clock``        a virtual clock: an hour passes at once, and everything that falls due runs in order
``proxy``        a TCP proxy that cuts, delays and shapes connections
``waiting``      ``eventually``, ``Recorder``, ``subscribed``, and the one deadline of all waits
``tables``       ``table``: a table of cases as one test
===============  ===================================================================================================

The conformance suite and the plugin need pytest: ``pip install 'rx-messaging[testing]'``. Nothing else in ``messaging``
imports this package. It uses the public API, and of the adapters only ``memory://``, whose connections it cuts from
within.
"""
