"""The data of events: as maps, as typed objects, and on the wire (157.2, 157.4.1).

This room knows no event service. It stands on ``messaging.dispatch`` for topics, and on ``messaging.model`` for
channels.

==================  ================================================================================================
``schema``          the fields of classes (157.2.1)
``maps``            events as nested maps (157.2.2, 157.4.2)
``conversion``      conversion to types (157.4.1): ``compiled`` types, ``simple`` values, and the errors (``problems``)
``event_types``     types loaded by name; the topic made of the name of a class (157.3.2)
``values``          values of events in the portable form that JSON has; ``json_text`` writes and reads it
``enums``           members of enums, which cross between processes as themselves
``layout``          WireEvent: one event on the wire, and its payload in JSON or CBOR
``channels``        topic filters, and the channel patterns that select their events
==================  ================================================================================================
"""

from messaging.eventdata.channels import filters_of as filters_of
from messaging.eventdata.channels import merged as merged
from messaging.eventdata.channels import pattern_below as pattern_below
from messaging.eventdata.channels import pattern_of as pattern_of
from messaging.eventdata.channels import patterns_of as patterns_of
from messaging.eventdata.conversion import convert as convert
from messaging.eventdata.conversion import converter_to as converter_to
from messaging.eventdata.event_types import is_reified as is_reified
from messaging.eventdata.event_types import is_untyped as is_untyped
from messaging.eventdata.event_types import load_type as load_type
from messaging.eventdata.event_types import topic_of as topic_of
from messaging.eventdata.json_text import read_json as read_json
from messaging.eventdata.json_text import write_json as write_json
from messaging.eventdata.layout import WireError as WireError
from messaging.eventdata.layout import WireEvent as WireEvent
from messaging.eventdata.layout import decode as decode
from messaging.eventdata.layout import encode as encode
from messaging.eventdata.layout import microseconds as microseconds
from messaging.eventdata.layout import sender_that_waits as sender_that_waits
from messaging.eventdata.layout import time_of as time_of
from messaging.eventdata.maps import EventData as EventData
from messaging.eventdata.maps import as_data as as_data
from messaging.eventdata.maps import checked_copy as checked_copy
from messaging.eventdata.maps import to_map as to_map
from messaging.eventdata.schema import bound as bound
from messaging.eventdata.schema import is_simple as is_simple
from messaging.eventdata.schema import schema_of as schema_of
from messaging.eventdata.simple import Converter as Converter
from messaging.eventdata.values import from_portable as from_portable
from messaging.eventdata.values import to_portable as to_portable
