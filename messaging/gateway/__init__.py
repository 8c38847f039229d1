"""The gateway: store-and-forward routes between messaging instances, as one configuration file describes them.

::

    settings       the validated settings: what a configuration file holds, and their JSON schema
    files          TOML and YAML files to settings
    positions      where the keys of a TOML file stand
    problems       problems of a configuration, with line and key
    checks         what settings must fulfil beyond their types
    plan           what goes where

    gateway        the gateway: everything below, run together
    instances      its messaging instances, and their checks
    services       what it runs beside its routes
    supervision    signals, and systemd
    control        the control socket, for the command line
    reports        DTOs of the state

    route          a route: intake, buffer and drain
    subscriptions  subscriptions at sources, made again when they end
    intake         applies the pipeline to received messages, and stores them
    pipeline       filters, transforms, deadband, sampling, batches
    patterns       channel patterns with captures, and channels made of captured values
    destinations   where messages go to, and with which context
    stored         a message on its way
    buffer         the messages of a route on disk
    drain          publishes what is stored, to targets that routes share
    dead_letters   messages that cannot be handled

    requests       requests that are passed on to responders
    devices        states of bridged devices
    status         the state of the gateway at a broker
"""

from messaging.gateway.checks import check
from messaging.gateway.files import Configuration, load, read
from messaging.gateway.gateway import Gateway
from messaging.gateway.plan import Plan, PlannedFlow, plan
from messaging.gateway.problems import Problem, Severity
from messaging.gateway.reports import GatewayDTO
from messaging.gateway.settings import GatewaySettings, schema

__all__ = [
    "Configuration",
    "Gateway",
    "GatewayDTO",
    "GatewaySettings",
    "Plan",
    "PlannedFlow",
    "Problem",
    "Severity",
    "check",
    "load",
    "plan",
    "read",
    "schema",
]
