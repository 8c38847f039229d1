"""The broker connection of a task. Many tasks connect at once, and retry while the broker is unreachable."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import messaging
from messaging.errors import AuthenticationError, ConnectFailedError
from messaging.model import parse_url
from messaging.model.settings import load_settings

if TYPE_CHECKING:
    from messaging import Messaging
    from pyspark_messaging.options import Broker

#: pauses between attempts to connect, in seconds
_RETRY_FIRST, _RETRY_LAST = 0.1, 2.0
#: MQTT: the session ends with the connection
_NO_SESSION: Final = {"clean_start": True, "session_expiry": 0}


def connect(broker: Broker, patience: float, **settings: Any) -> Messaging:
    """Connect a task. Retries for ``patience`` seconds, unless the broker refuses the connection.

    Raises:
        ConnectFailedError: no connection in that time; ``AuthenticationError`` if the broker refused the credentials.
    """
    keywords = broker.keywords(retry_connect=False, **settings)
    if broker.is_mqtt:
        keywords |= _NO_SESSION
    client_id = load_settings(broker.adapter.settings_type, parse_url(broker.url), keywords).client_id
    until = time.monotonic() + patience
    pause = _RETRY_FIRST
    while True:
        if client_id is not None:  # tasks, and their retries, need different ids
            keywords["client_id"] = f"{client_id}-{secrets.token_hex(4)}"
        try:
            return messaging.connect(broker.url, **keywords)
        except AuthenticationError:
            raise
        except ConnectFailedError as error:
            if error.code is not None or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_LAST)
