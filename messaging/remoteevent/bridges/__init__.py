"""Bridges between remote events and other forms of events (EV.4).

============  ======================================================================================================
``adapter``   EventAdapter: a method, a function or a Subject for each kind of event
``topics``    source and id as a topic, and back
``forms``     a remote event as a map, and back, without loss
``feed``      Bridge: a source of other events that feeds a generator
``typed``     to_typed and from_typed: typed events of a ``TypedEventBus``
``channels``  ChannelListener and ChannelGenerator: the messages of a channel of a broker
``consumers`` distributed events to a listener, such as a mailbox
============  ======================================================================================================
"""

from messaging.remoteevent.bridges.adapter import EventAdapter as EventAdapter
from messaging.remoteevent.bridges.channels import ChannelGenerator as ChannelGenerator
from messaging.remoteevent.bridges.channels import ChannelListener as ChannelListener
from messaging.remoteevent.bridges.channels import ChannelMessage as ChannelMessage
from messaging.remoteevent.bridges.consumers import DistributedEvent as DistributedEvent
from messaging.remoteevent.bridges.consumers import from_distributed as from_distributed
from messaging.remoteevent.bridges.feed import Bridge as Bridge
from messaging.remoteevent.bridges.forms import as_map as as_map
from messaging.remoteevent.bridges.forms import from_map as from_map
from messaging.remoteevent.bridges.topics import kind_of as kind_of
from messaging.remoteevent.bridges.topics import topic_of as topic_of
from messaging.remoteevent.bridges.typed import BusEvent as BusEvent
from messaging.remoteevent.bridges.typed import TypedListener as TypedListener
from messaging.remoteevent.bridges.typed import from_typed as from_typed
from messaging.remoteevent.bridges.typed import to_typed as to_typed
