"""The settings of ``memory://``, alone and like another adapter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from pydantic import Field, create_model

from messaging.errors import InvalidOptionError
from messaging.instance import find_adapter
from messaging.model.settings import Settings, from_environment

Like = Literal["amqp", "mqtt5", "mqtt311"]

#: the adapter that stands behind each kind, and its protocol version
_ADAPTERS: Final[dict[str, tuple[str, str | None]]] = {
    "amqp": ("amqp", None), "mqtt5": ("mqtt", "5"), "mqtt311": ("mqtt", "3.1.1"),
}  # fmt: skip


class MemorySettings(Settings):
    """The settings of ``memory://``, in addition to the common ones."""

    max_queue_length: int = Field(10_000, ge=1, description="messages a queue holds; publishers to a full queue wait")
    max_priority: int | None = Field(
        None,
        ge=0,
        le=9,
        description="levels of `priority` in queues made here; 0 for none; every priority if not given",
    )
    like: Like | None = Field(
        None,
        description="the adapter of production, `amqp`, `mqtt5` or `mqtt311`: its features are announced, and its "
        "options accepted",
    )

    @classmethod
    def for_options(cls, given: Mapping[str, Any]) -> type[Settings]:
        """See ``Settings.for_options``: with ``like``, the options of that adapter are accepted, too."""
        like = given["like"] if "like" in given else from_environment(cls).get("like")
        return _settings_like(like) if isinstance(like, str) and like in get_args(Like) else cls


@functools.cache
def _settings_like(like: str) -> type[Settings]:
    scheme, version = _ADAPTERS[like]
    kind = find_adapter(scheme).settings_type
    # the other adapter's first: it has its own default of a setting that both have
    combined: type[Settings] = create_model(f"MemorySettingsLike_{like}", __base__=(kind, MemorySettings))
    if version is not None:
        field = copy.copy(kind.model_fields["version"])
        field.default = version
        combined = create_model(combined.__name__, __base__=combined, version=(field.annotation, field))  # type: ignore[arg-type]
    return combined


def scheme_like(settings: MemorySettings) -> str | None:
    """Return the URL scheme of the adapter that the instance is like; with TLS, so that options of TLS are accepted.

    Raises:
        InvalidOptionError: ``version`` is another one.
    """
    if settings.like is None:
        return None
    scheme, version = _ADAPTERS[settings.like]
    if version is not None and getattr(settings, "version", version) != version:
        raise InvalidOptionError("version", f"options 'version' and 'like' contradict each other: like={settings.like}")
    is_web = any(getattr(settings, option, None) is not None for option in ("ws_headers", "ws_query"))
    return "wss" if is_web else f"{scheme}s"
