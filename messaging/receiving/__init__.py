"""Receiving: subscriptions and their buffers, streams, message handlers, redelivery (RFC 5.4, 5.8).

May import: ``connection``, ``adapter`` (the contract), ``model``, ``execution``, ``services``. Independent of
``publishing``.
"""

from messaging.receiving.blocks import AsyncBlock as AsyncBlock
from messaging.receiving.consumers import in_observer as in_observer
from messaging.receiving.handler import HandlerOnInvalid as HandlerOnInvalid
from messaging.receiving.handler import HandlerRegistration as HandlerRegistration
from messaging.receiving.handler import MessageHandler as MessageHandler
from messaging.receiving.joint import JointSubscription as JointSubscription
from messaging.receiving.parameters import NOT_ANNOTATED as NOT_ANNOTATED
from messaging.receiving.parameters import MessageParameter as MessageParameter
from messaging.receiving.parameters import evaluated as evaluated
from messaging.receiving.parameters import parameter_of as parameter_of
from messaging.receiving.receiver import OnInvalid as OnInvalid
from messaging.receiving.receiver import StreamCounters as StreamCounters
from messaging.receiving.runners import Handler as Handler
from messaging.receiving.runners import HandlerExhaustedError as HandlerExhaustedError
from messaging.receiving.runners import LoopRunner as LoopRunner
from messaging.receiving.runners import Origin as Origin
from messaging.receiving.runners import Runner as Runner
from messaging.receiving.runners import ThreadRunner as ThreadRunner
from messaging.receiving.runners import Verdict as Verdict
from messaging.receiving.runners import is_awaitable as is_awaitable
from messaging.receiving.service import Acknowledge as Acknowledge
from messaging.receiving.service import MessageSubscription as MessageSubscription
from messaging.receiving.stream import MessageObserver as MessageObserver
from messaging.receiving.stream import MessageStream as MessageStream
from messaging.receiving.subscription import Consumption as Consumption
from messaging.receiving.subscription import Subscription as Subscription
