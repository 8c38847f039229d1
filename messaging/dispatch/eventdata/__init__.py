"""The data of events: as maps, as typed objects, and on the wire (157.2, 157.4.1).

This room knows no event service. It stands on ``messaging.dispatch`` for topics, and on ``messaging.model`` for
channels.

==================  ================================================================================================
``schema``          the fields of classes (157.2.1), their names as topics (157.3.2), and loading them by name
``maps``            events as nested maps (157.2.2, 157.4.2)
``conversion``      conversion to types (157.4.1); ``converters`` has compiled types, simple values, and the errors
``values``          values of events in the portable form that JSON has, and as its text
``enums``           members of enums, which cross between processes as themselves
``layout``          WireEvent: one event on the wire, and its payload in JSON or CBOR
``channels``        topic filters, and the channel patterns that select their events
==================  ================================================================================================
"""

from messaging.dispatch.eventdata.channels import filters_of as filters_of
from messaging.dispatch.eventdata.channels import merged as merged
from messaging.dispatch.eventdata.channels import pattern_below as pattern_below
from messaging.dispatch.eventdata.channels import pattern_of as pattern_of
from messaging.dispatch.eventdata.channels import patterns_of as patterns_of
from messaging.dispatch.eventdata.conversion import convert as convert
from messaging.dispatch.eventdata.conversion import converter_to as converter_to
from messaging.dispatch.eventdata.converters import Converter as Converter
from messaging.dispatch.eventdata.layout import WireError as WireError
from messaging.dispatch.eventdata.layout import WireEvent as WireEvent
from messaging.dispatch.eventdata.layout import decode as decode
from messaging.dispatch.eventdata.layout import encode as encode
from messaging.dispatch.eventdata.layout import microseconds as microseconds
from messaging.dispatch.eventdata.layout import sender_that_waits as sender_that_waits
from messaging.dispatch.eventdata.layout import time_of as time_of
from messaging.dispatch.eventdata.maps import EventData as EventData
from messaging.dispatch.eventdata.maps import as_data as as_data
from messaging.dispatch.eventdata.maps import checked_copy as checked_copy
from messaging.dispatch.eventdata.maps import to_map as to_map
from messaging.dispatch.eventdata.schema import bound as bound
from messaging.dispatch.eventdata.schema import is_reified as is_reified
from messaging.dispatch.eventdata.schema import is_simple as is_simple
from messaging.dispatch.eventdata.schema import is_untyped as is_untyped
from messaging.dispatch.eventdata.schema import load_type as load_type
from messaging.dispatch.eventdata.schema import schema_of as schema_of
from messaging.dispatch.eventdata.schema import topic_of as topic_of
from messaging.dispatch.eventdata.values import from_portable as from_portable
from messaging.dispatch.eventdata.values import read_json as read_json
from messaging.dispatch.eventdata.values import to_portable as to_portable
from messaging.dispatch.eventdata.values import write_json as write_json
