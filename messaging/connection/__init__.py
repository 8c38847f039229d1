"""One connection of an instance to its broker: connecting, reconnecting, its state, its subscriptions.

May import: ``adapter`` (the contract), ``model``, ``execution``. ``connection.tls`` is what adapters need for TLS.
"""

from messaging.connection.connection import Connection
from messaging.connection.state import ConnectionState, ConnectionStates, StateName
from messaging.connection.subscribed import Subscribed

__all__ = [
    "Connection",
    "ConnectionState",
    "ConnectionStates",
    "StateName",
    "Subscribed",
]
