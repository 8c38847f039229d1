"""The settings of ``amqp://`` and ``amqps://``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from messaging.model.settings import Seconds, TlsSettings


class AmqpSettings(TlsSettings):
    """Settings of ``amqp://`` and ``amqps://``; the path of the URL is the virtual host, ``/`` if there is none."""

    heartbeat: int = Field(
        10, ge=0, le=65_534, description="interval of heartbeats, seconds; two silent ones are a loss; 0 for none"
    )
    sasl: Literal["plain", "external"] = Field(
        "plain", description="who this client is: `plain`, user name and password; `external`, its certificate"
    )
    exchange: str = Field("amq.topic", min_length=1, description="topic exchange of channels without extension")
    publish_window: int = Field(4096, ge=1, description="messages that may await the broker's confirm")
    blocked_timeout: Seconds | None = Field(
        None,
        description="seconds for which the broker may accept no messages before another host is tried; if not given, "
        "it is waited for",
    )
    max_priority: int = Field(
        0,
        ge=0,
        le=9,
        description="levels of `priority` in queues declared here (`x-max-priority`); 0 for none, the plain queue",
    )
