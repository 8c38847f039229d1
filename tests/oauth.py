"""A RabbitMQ that asks for JSON Web Tokens, and the tokens: signed with a key that both know (HS256)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import time
from typing import Any, Final

from messaging.testing.brokers import RabbitMQ

_KEY: Final = b"0123456789abcdef0123456789abcdef"
_numbers: Final = itertools.count()
#: on every virtual host, to every exchange and queue, with every routing key
_SCOPES: Final = [f"rabbitmq.{what}:*/*{key}" for what in ("configure", "write", "read") for key in ("", "/*")]


def token(valid_for: float, **claims: Any) -> str:
    """Return a token, unlike all others, that is valid for so many seconds, cut to whole seconds by the clock."""
    given = {"sub": "plant", "aud": ["rabbitmq"], "jti": str(next(_numbers)), "scope": _SCOPES}
    expiry = {"exp": int(time.time() + valid_for)}
    text = f"{_part({'alg': 'HS256', 'typ': 'JWT'})}.{_part({**given, **expiry, **claims})}"
    return f"{text}.{_base64(hmac.new(_KEY, text.encode(), hashlib.sha256).digest())}"


def _part(value: object) -> str:
    return _base64(json.dumps(value).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class TokenRabbitMQ(RabbitMQ):
    """Takes tokens as passwords, whatever the user name; ``guest`` is a user with a password all the same.

    The broker looks at the expiry with each operation. What it has allowed it remembers for a second.
    """

    def __init__(self, plugins: tuple[str, ...] = ()) -> None:
        super().__init__(plugins=("rabbitmq_auth_backend_oauth2", *plugins))

    def start(self) -> None:
        """See ``Broker.start``."""
        was_running = self.running
        super().start()
        if was_running:
            return
        key = f'#{{<<"kty">> => <<"oct">>, <<"alg">> => <<"HS256">>, <<"k">> => <<"{_base64(_KEY)}">>}}'
        keys = f'[{{default_key, <<"key">>}}, {{signing_keys, #{{<<"key">> => {{map, {key}}}}}}}]'
        self.ctl(
            "eval",
            'application:set_env(rabbitmq_auth_backend_oauth2, resource_server_id, <<"rabbitmq">>), '
            f"application:set_env(rabbitmq_auth_backend_oauth2, key_config, {keys}), "
            "application:set_env(rabbit, channel_tick_interval, 1000), "
            "application:set_env(rabbit, auth_backends, [rabbit_auth_backend_oauth2, rabbit_auth_backend_internal]).",
        )

    def connections(self) -> list[str]:
        """Return the connections, by process id of Erlang."""
        return sorted(self.ctl("list_connections", "pid", "--silent").split())

    @property
    def bare_url(self) -> str:
        """Return the URL without credentials."""
        return f"amqp://{self.host}:{self.port}/"
