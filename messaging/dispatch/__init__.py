"""The core of the event services: topics, handlers in the registry, delivery in order, permissions, networks.

All event services stand on this room. Applications do not import from it: the event services export the names that
applications need.

======================  ================================================================================================
``topics``              the contract of a grammar; the grammars of OSGi Typed Event and Event Admin, and their index
``distributed_topics``  the grammar of RFC 214 Distributed Eventing, and its index by prefix
``permission``          permissions of principals to publish and to subscribe
``handler``             one handler: its terms, its failures, whether it is blocked
``calling``             registering functions, awaiting their results, containing what code of the application raises
``dispatcher``          the handlers of one bus: added, changed and removed with their registrations, found by topic
``event_service``       opening and closing of an event service
``eventdata``           the data of events: schemas, maps, conversion to types; one event on the wire
``eventnetwork``        event services of several processes on one broker: members, interests, events
``calls``               calls between processes: the operations of one object behind one request channel
======================  ================================================================================================
"""

from messaging.dispatch.calling import PlainObservable as PlainObservable
from messaging.dispatch.calling import contained as contained
from messaging.dispatch.calling import fail_observer as fail_observer
from messaging.dispatch.calling import name_of as name_of
from messaging.dispatch.calling import registered as registered
from messaging.dispatch.calling import run_elsewhere as run_elsewhere
from messaging.dispatch.calling import too_long as too_long
from messaging.dispatch.dispatcher import Dispatcher as Dispatcher
from messaging.dispatch.dispatcher import when_all_done as when_all_done
from messaging.dispatch.distributed_topics import DISTRIBUTED_EVENTS
from messaging.dispatch.distributed_topics import PrefixFilter as PrefixFilter
from messaging.dispatch.distributed_topics import PrefixIndex as PrefixIndex
from messaging.dispatch.distributed_topics import is_private_topic as is_private_topic
from messaging.dispatch.event_service import EventService as EventService
from messaging.dispatch.handler import DispatchHandler as DispatchHandler
from messaging.dispatch.handler import FunctionHandler as FunctionHandler
from messaging.dispatch.handler import HandlerDTO, Tolerance
from messaging.dispatch.handler import Terms as Terms
from messaging.dispatch.handler import check_count as check_count
from messaging.dispatch.handler import dto_of as dto_of
from messaging.dispatch.handler import read_filter as read_filter
from messaging.dispatch.handler import read_timeout as read_timeout
from messaging.dispatch.handler import read_topics as read_topics
from messaging.dispatch.permission import Principal as Principal
from messaging.dispatch.permission import TopicPermission, TopicPermissionCollection, TopicPolicy
from messaging.dispatch.permission import check_principal as check_principal
from messaging.dispatch.topics import EVENT_ADMIN, TYPED_EVENTS
from messaging.dispatch.topics import MULTI_LEVEL as MULTI_LEVEL
from messaging.dispatch.topics import AbstractTopicFilter as AbstractTopicFilter
from messaging.dispatch.topics import TopicFilter as TopicFilter
from messaging.dispatch.topics import TopicGrammar as TopicGrammar
from messaging.dispatch.topics import TopicIndex as TopicIndex
from messaging.dispatch.topics import TopicTrie as TopicTrie
from messaging.dispatch.topics import check_topic as check_topic
from messaging.dispatch.topics import is_topic as is_topic
from messaging.dispatch.topics import parse_filter as parse_filter

__all__ = [
    "DISTRIBUTED_EVENTS",
    "EVENT_ADMIN",
    "TYPED_EVENTS",
    "HandlerDTO",
    "Tolerance",
    "TopicPermission",
    "TopicPermissionCollection",
    "TopicPolicy",
]
