"""The connection of an instance to its broker: connecting, reconnecting, state, subscriptions.

Adapters use ``connection.tls`` by its own name.
"""

from messaging.connection.connection import Connection as Connection
from messaging.connection.state import ConnectionState as ConnectionState
from messaging.connection.state import ConnectionStates as ConnectionStates
from messaging.connection.state import StateName as StateName
from messaging.connection.subscribed import Subscribed as Subscribed
