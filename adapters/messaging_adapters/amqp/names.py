"""Channel names on AMQP: how ``a/b`` becomes the routing key ``a.b`` and back.

The levels of a channel are joined by ``.``, as RabbitMQ's MQTT plugin does, so that a device on MQTT and an
application on AMQP meet on the same exchange. Characters with a meaning in routing keys are percent-escaped inside a
level, which makes the translation injective: ``a.b`` is ``a%2Eb``, ``50%`` is ``50%25``.

====================  ================  =========================
channel or pattern    routing key       binding key
====================  ================  =========================
``a/b``               ``a.b``           ``a.b``
``a.b/*``             ``a%2Eb.%2A``     ``a%2Eb.%2A``
``+/b/#``             (not a name)      ``*.b.#``
====================  ================  =========================

Routing keys of other programs may have any form. They are read leniently: the five escapes above are undone, and all
other characters stay as they are.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from messaging.errors import InvalidChannelError
from messaging.model import ANY_LEVEL, ANY_LEVELS, SEPARATOR

#: AMQP 0-9-1 carries routing keys, queue and exchange names as short strings
MAX_BYTES: Final = 255

_ESCAPES: Final = {character: f"%{ord(character):02X}" for character in ".*#+%"}
_TO_KEY: Final = str.maketrans({SEPARATOR: ".", **_ESCAPES})
_ESCAPED: Final = re.compile("|".join(_ESCAPES.values()), re.IGNORECASE)


def routing_key(channel: str) -> str:
    """Return the routing key of ``channel``, a name without wildcards."""
    return channel.translate(_TO_KEY)


def binding_key(pattern: str) -> str:
    """Return the binding key of a subscription pattern: ``+`` becomes ``*``, ``#`` stays."""
    return ".".join(
        "*" if level == ANY_LEVEL else level if level == ANY_LEVELS else level.translate(_TO_KEY)
        for level in pattern.split(SEPARATOR)
    )


def channel_name(key: str) -> str:
    """Return the channel of a routing key; the inverse of :func:`routing_key`."""
    name = key.replace(".", SEPARATOR)
    if "%" in name:
        name = _ESCAPED.sub(lambda match: chr(int(match[0][1:], 16)), name)
    return name


#: the pseudo-queue of direct reply-to, see :class:`.deliveries.DirectReplies`, and its channel name
DIRECT_REPLY_TO: Final = "amq.rabbitmq.reply-to"
DIRECT_CHANNEL: Final = channel_name(DIRECT_REPLY_TO)


def reply_key(channel: str) -> str:
    """Return the ``reply-to`` of a reply channel: its routing key, or the broker's address for direct replies."""
    address = channel.removeprefix(f"{DIRECT_CHANNEL}/")
    return routing_key(channel) if address is channel else f"{DIRECT_REPLY_TO}.{unquote(address)}"


@lru_cache(maxsize=1024)
def reply_channel(key: str) -> str:
    """Return the reply channel of a ``reply-to``; the inverse of :func:`reply_key`."""
    address = key.removeprefix(f"{DIRECT_REPLY_TO}.")
    return channel_name(key) if address is key else f"{DIRECT_CHANNEL}/{quote(address, safe='')}"


def check_length(text: str, what: str) -> str:
    """Return ``text`` if it fits into a short string.

    Raises:
        InvalidChannelError: more than 255 bytes in UTF-8, or a lone surrogate.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidChannelError(f"{what} holds a lone surrogate") from None
    if size > MAX_BYTES:
        raise InvalidChannelError(f"{what} is {size} bytes long in UTF-8; AMQP carries at most {MAX_BYTES}")
    return text
