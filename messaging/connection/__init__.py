"""One connection of an instance to its broker: connecting, reconnecting, its state, its subscriptions.

May import: ``adapter`` (the contract), ``model``, ``execution``. ``connection.tls`` is what adapters need for TLS.
"""

from messaging.connection.connection import Connection as Connection
from messaging.connection.state import ConnectionState as ConnectionState
from messaging.connection.state import ConnectionStates as ConnectionStates
from messaging.connection.state import StateName as StateName
from messaging.connection.subscribed import Subscribed as Subscribed
