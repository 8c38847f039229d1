"""Reply codes (1.2) and the texts that RabbitMQ makes of them."""

from __future__ import annotations

from typing import Final

NAMES: Final = {
    311: "CONTENT_TOO_LARGE",
    312: "NO_ROUTE",
    313: "NO_CONSUMERS",
    320: "CONNECTION_FORCED",
    402: "INVALID_PATH",
    403: "ACCESS_REFUSED",
    404: "NOT_FOUND",
    405: "RESOURCE_LOCKED",
    406: "PRECONDITION_FAILED",
    501: "FRAME_ERROR",
    502: "SYNTAX_ERROR",
    503: "COMMAND_INVALID",
    504: "CHANNEL_ERROR",
    505: "UNEXPECTED_FRAME",
    506: "RESOURCE_ERROR",
    530: "NOT_ALLOWED",
    540: "NOT_IMPLEMENTED",
    541: "INTERNAL_ERROR",
}
#: codes that close the channel; all others close the connection
SOFT: Final = frozenset({311, 312, 313, 403, 404, 405, 406})

_MAX_TEXT: Final = 255


class AmqpError(Exception):
    """A request that is refused with a reply code.

    Args:
        code: closes the channel or, unless it is in ``SOFT``, the connection.
        text: explanation, without the name of the code.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    @property
    def is_soft(self) -> bool:
        """Return whether only the channel is closed."""
        return self.code in SOFT

    def reply_text(self) -> bytes:
        """Return the text as RabbitMQ sends it: cut off after 252 bytes, with three dots, if it is too long."""
        if self.code == 541:
            return b"INTERNAL_ERROR"
        text = f"{NAMES[self.code]} - {self.text}".encode()
        return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + b"..."


def access_refused(text: str) -> AmqpError:
    """Return the error 403."""
    return AmqpError(403, text)


def not_found(text: str) -> AmqpError:
    """Return the error 404."""
    return AmqpError(404, text)


def precondition_failed(text: str) -> AmqpError:
    """Return the error 406."""
    return AmqpError(406, text)


def resource(kind: str, name: str, vhost: str) -> str:
    """Return how RabbitMQ names a queue or exchange in a text."""
    return f"{kind} '{name}' in vhost '{vhost}'"
