"""Observability: what a program shows of its state to tools that watch it.

Metrics and health checks read the reports of the parts of a program (:mod:`messaging.services.reporting`). Import what
you need from the modules, for example ``messaging.observability.metrics``: each needs optional packages of its own.
"""
