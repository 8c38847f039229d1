"""One suite for every adapter, through the public API only, steered by the features an instance announces.

::

    pytest tests/conformance                                   # the adapters of this project
    pytest tests/conformance --backend memory --backend amqp   # some of them
    pytest tests/conformance --backend-url tcp+x://host:4711   # somebody else's, whose package is installed

A test marked ``feature("retain")`` is run on the backends that announce ``retain``, and skipped on others. Nothing
else is ever skipped: :mod:`.test_coverage` and ``conftest.py`` see to it. Tests marked ``wire`` hold the network back,
which ``memory://`` lacks; those marked ``restart`` are for brokers of the tests' own.
"""
