"""The keywords of ``publish``, ``subscribe``, ``on``, ``request`` and ``reply`` for type checkers and editors.

Each keyword is an extension in snake case, or a value of the context; ``None`` means unset. Values are also checked at
run time: a type expresses neither ranges nor the announced features of an instance. Extensions of an adapter outside
this project have no keyword: set them with ``MessageContextBuilder.extension_entry``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict


class SharedKeywords(TypedDict, total=False):
    """Keywords common to publishing and subscribing."""

    qos: int | str | None
    guaranteed_delivery: bool | None
    guaranteed_ordering: bool | None
    autocreate: bool | None
    # AMQP
    exchange_type: str | None
    exchange_durable: bool | None
    exchange_auto_delete: bool | None
    alternate_exchange: str | None
    exchange_arguments: Mapping[str, Any] | None
    declare: Literal["create", "passive", "none"] | None
    queue_overflow: Literal["drop-head", "reject-publish", "reject-publish-dlx"] | None


class RequestKeywords(SharedKeywords, total=False):
    """Keywords of ``request``, in addition to its parameters."""

    content_type: str | None
    content_encoding: str | None
    correlation_id: str | None
    reply_to: str | None
    channel_extension: str | None
    headers: Mapping[str, Any] | None
    last_will: bool | None
    mandatory: bool | None
    message_id: str | None
    priority: int | None
    retain: bool | None
    time_to_live: float | None
    # MQTT
    will_delay: float | None
    # AMQP
    app_id: str | None
    envelope: bool | None
    type: str | None


class PublishKeywords(RequestKeywords, total=False):
    """Keywords of ``publish``."""

    store_and_forward: bool | None
    timeout: float | None


class StreamKeywords(TypedDict, total=False):
    """Keywords common to subscribing and to requests with many replies."""

    buffer_size: int | None
    overflow: Literal["block", "drop_oldest", "drop_latest", "fail"] | None
    prefetch: int | None


class RequestManyKeywords(RequestKeywords, StreamKeywords, total=False):
    """Keywords of ``request_many``, in addition to its parameters."""


class ReplyKeywords(SharedKeywords, StreamKeywords, total=False):
    """Keywords of ``reply``, in addition to its parameters, for its subscription."""

    auto_acknowledge: bool | None
    dead_letter_channel: str | None
    deduplicate: bool | float | None
    max_deliveries: int | None
    queue: str | None
    # MQTT
    retain_handling: int | None
    retain_as_published: bool | None
    no_local: bool | None
    packet_id: bool | None
    # AMQP
    exchange_internal: bool | None
    bindings: Sequence[str] | None
    binding_arguments: Mapping[str, Any] | None
    queue_arguments: Mapping[str, Any] | None
    queue_type: Literal["classic", "quorum", "stream"] | None
    durable: bool | None
    exclusive: bool | None
    auto_delete: bool | None
    single_active_consumer: bool | None
    consumer_priority: int | None
    delivery_limit: int | None
    max_priority: int | None
    message_time_to_live: float | None
    queue_expires: float | None
    max_length: int | None
    max_length_bytes: int | None
    dead_letter_exchange: str | None
    dead_letter_routing_key: str | None
    max_age: float | None
    stream_segment_bytes: int | None
    stream_offset: str | float | datetime | None
    redelivery_delay: float | None
    redelivery_delay_max: float | None


class SubscribeKeywords(ReplyKeywords, total=False):
    """Keywords of ``subscribe`` and ``on``, in addition to their parameters."""

    channel_extension: str | None
