"""The gateway: store-and-forward routes between messaging instances.

::

    settings     the validated settings: what a configuration file holds

May import all of ``messaging`` but ``cli``, ``testing`` and ``observability``.
"""
