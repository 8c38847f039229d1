"""``enqueue``: write a message into the outbox, within the transaction of the caller."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, overload
from uuid import uuid4

from sqlalchemy import insert

from messaging.errors import ArgumentError, InvalidChannelError, InvalidExtensionError
from messaging.errors.checks import check_instance
from messaging.execution import clock
from messaging.model import (
    CHECKS,
    Features,
    as_message,
    check_name,
    check_printable,
    check_text,
    stored_properties,
)
from messaging.outbox.sql.connections import AnyConnection, AwaitedConnection, SyncConnection, in_transaction
from messaging.outbox.sql.tables import DEFAULT_TABLES, OutboxTables, bucket_of
from messaging.publishing import MessagePublisher
from messaging.publishing.publisher import as_bytes

if TYPE_CHECKING:
    from messaging.model import Message, MessageContext, MessageContextProvider

_PRINTABLE = ("content_type", "content_encoding")
_TEXTS = ("channel_extension", "correlation_id")


@overload
def enqueue(
    connection: SyncConnection,
    message: Message | MessageContextProvider,
    context: str | MessageContext | MessageContextProvider | None = None,
    *,
    key: str | None = None,
    tables: OutboxTables = DEFAULT_TABLES,
) -> str: ...
@overload
def enqueue(
    connection: AwaitedConnection,
    message: Message | MessageContextProvider,
    context: str | MessageContext | MessageContextProvider | None = None,
    *,
    key: str | None = None,
    tables: OutboxTables = DEFAULT_TABLES,
) -> Awaitable[str]: ...
def enqueue(
    connection: AnyConnection,
    message: Message | MessageContextProvider,
    context: str | MessageContext | MessageContextProvider | None = None,
    *,
    key: str | None = None,
    tables: OutboxTables = DEFAULT_TABLES,
) -> str | Awaitable[str]:
    """Write a message into the outbox, within the transaction of ``connection``.

    The relay publishes it after the transaction has committed, and never if it rolls back.

    Args:
        connection: a ``Connection`` or ``Session``; with an ``AsyncConnection`` or ``AsyncSession`` the result is
            awaitable, and the message is written when it is awaited. It must not be in ``AUTOCOMMIT`` mode.
        message: the message, or a provider (a builder) that builds it.
        context: a channel replaces the message's channel; a context replaces the message's context, as with
            :meth:`MessagePublisher.publish <messaging.MessagePublisher.publish>`.
        key: messages with the same key are published in the order of the commits, and within a transaction in the
            order of the calls; messages with different keys are independent. By default the channel.
        tables: the tables of the outbox.

    Returns:
        The id of the message: that of the extension ``messageId``, or a new one. It stays the same however often the
        message is published.

    Raises:
        ArgumentError: no channel, a malformed one, a payload that is not bytes, an extension that cannot be stored, an
            empty key, or a connection without transaction. Nothing was written. What depends on the broker, such as
            its features and its size limit, is checked when the relay publishes the message.
        sqlalchemy.exc.SQLAlchemyError: the database refused the statement.
    """
    check_instance("tables", tables, OutboxTables)
    row = _row(message, context, key)

    def write(connection: Any) -> str:
        connection.execute(insert(tables.outbox).inline(), row)
        message_id: str = row["message_id"]
        return message_id

    return in_transaction(connection, write, tables.outbox)


def _row(
    message: Message | MessageContextProvider,
    override: str | MessageContext | MessageContextProvider | None,
    key: str | None,
) -> dict[str, Any]:
    built = as_message(message, "enqueue")
    context = built.context
    if override is not None:
        context = MessagePublisher.override(context, override)
    if context.channel is None:
        raise InvalidChannelError("no channel: neither the message's context nor the call names one")
    channel = check_name(context.channel)
    for name in (*_PRINTABLE, *_TEXTS):
        value = getattr(context, name)
        if value is not None:
            (check_printable if name in _PRINTABLE else check_text)(name, value)
    if context.reply_to_channel is not None:
        check_name(context.reply_to_channel)
    if key is None:
        key = channel
    check_text("key", key)
    if not key:
        raise ArgumentError("key must not be empty; without one it is the channel")
    extensions = _stored_extensions(context)
    message_id = extensions.pop(Features.EXTENSION_MESSAGE_ID, None)
    return {
        "bucket": bucket_of(key),
        "key": key,
        "channel": channel,
        "properties": stored_properties(context.replace(extensions=extensions)),
        "payload": as_bytes(built.payload),
        "message_id": message_id or uuid4().hex,
        "created": clock.now(),
    }


def _stored_extensions(context: MessageContext) -> dict[str, Any]:
    """Return the extensions of a context after a check of the ones that every adapter understands alike."""
    extensions = dict(context.extensions)
    for name, value in context.extensions.items():
        check = CHECKS.get(name)
        if check is None or value is None:  # of an adapter, which checks it when the relay publishes
            continue
        try:
            check(value)
        except ValueError as error:
            if context.is_received and name == Features.EXTENSION_MESSAGE_ID:
                del extensions[name]  # an id that another program gave, and that cannot be published again
                continue
            raise InvalidExtensionError(name, str(error)) from None
    if extensions.get(Features.EXTENSION_LAST_WILL):
        raise InvalidExtensionError(
            Features.EXTENSION_LAST_WILL, "a last will belongs to a connection; the outbox publishes messages at once"
        )
    return extensions
