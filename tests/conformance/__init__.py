"""One suite for every adapter, through the public API only, steered by the features an instance announces.

::

    pytest tests/conformance                                   # the adapters of this project
    pytest tests/conformance --backend memory --backend amqp   # some of them
    pytest tests/conformance --backend-url tcp+x://host:4711   # somebody else's, whose package is installed

A test marked ``feature("retain")`` is run on the backends that announce ``retain``, and skipped on others. A test
marked ``wire`` needs a network to hold back or to cut; ``memory://`` has none. Nothing else is ever skipped:
:mod:`.test_coverage` and the hooks of ``conftest.py`` see to it.
"""
