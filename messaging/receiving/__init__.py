"""Receiving: subscriptions and their buffers, streams, message handlers, redelivery (RFC 5.4, 5.8)."""

from messaging.receiving.buffer import OnInvalid as OnInvalid
from messaging.receiving.buffer import StreamCounters as StreamCounters
from messaging.receiving.calling import HandlerExhaustedError as HandlerExhaustedError
from messaging.receiving.calling import HandlingVerdict as HandlingVerdict
from messaging.receiving.calling import MessageHandler as MessageHandler
from messaging.receiving.calling import ResultForm as ResultForm
from messaging.receiving.calling import RunnableHandler as RunnableHandler
from messaging.receiving.calling import TypedFunction as TypedFunction
from messaging.receiving.calling import Work as Work
from messaging.receiving.calling import evaluated as evaluated
from messaging.receiving.calling import in_observer as in_observer
from messaging.receiving.calling import is_awaitable as is_awaitable
from messaging.receiving.consumers import AsyncBlock as AsyncBlock
from messaging.receiving.handler import HandlerConsumer as HandlerConsumer
from messaging.receiving.handler import HandlerOnInvalid as HandlerOnInvalid
from messaging.receiving.handler import HandlerRegistration as HandlerRegistration
from messaging.receiving.joint import JointSubscription as JointSubscription
from messaging.receiving.runners import Runner as Runner
from messaging.receiving.runners import runner_of as runner_of
from messaging.receiving.service import Acknowledge as Acknowledge
from messaging.receiving.service import MessageSubscription as MessageSubscription
from messaging.receiving.stream import MessageObserver as MessageObserver
from messaging.receiving.stream import MessageStream as MessageStream
from messaging.receiving.subscription import Consumption as Consumption
from messaging.receiving.subscription import Subscription as Subscription
