"""Publish plans without a publisher, and what they send."""

from __future__ import annotations

from messaging.model import MessageContext, Outgoing, PublishOptions, PublishPlan


def plan_of(context: MessageContext, options: PublishOptions | None = None) -> PublishPlan:
    """Return the plan of a context, whose values are not checked."""
    return PublishPlan(
        None, options or PublishOptions(), context.channel or "", context.channel_extension,
        *context.values_beside_channel(),
    )  # fmt: skip


def sent_values(outgoing: Outgoing) -> tuple[str | None, ...]:
    """Return channel, extension, content type and encoding, correlation id and reply channel of a message."""
    plan = outgoing.plan
    return (
        plan.channel, plan.channel_extension, plan.content_type, plan.content_encoding, outgoing.correlation_id,
        plan.reply_to_channel,
    )  # fmt: skip
