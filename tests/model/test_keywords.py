"""The keywords of the short way: typed, complete, and none of them two things at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import messaging
from messaging import Messaging
from messaging.errors import InvalidOptionError, UnknownKeywordError, UnsupportedFeatureError
from messaging.model import (
    CHECKS,
    PUBLISH_ONLY,
    SUBSCRIBE_ONLY,
    PublishKeywords,
    ReplyKeywords,
    RequestKeywords,
    RequestManyKeywords,
    SubscribeKeywords,
)
from messaging.testing.tables import table
from messaging_adapters.amqp.adapter import AmqpAdapter
from messaging_adapters.memory.adapter import MemoryAdapter
from messaging_adapters.mqtt.adapter import MqttAdapter

#: values of the context, which are no extensions
CONTEXT = {"content_type", "content_encoding", "correlation_id", "reply_to"}
ADAPTERS = (MemoryAdapter, MqttAdapter, AmqpAdapter)


def snake(key: str) -> str:
    return re.sub("([A-Z])", lambda found: "_" + found[1].lower(), key)


PUBLISHING = {snake(key) for key in CHECKS.keys() - SUBSCRIBE_ONLY}.union(
    *({snake(key) for key in adapter.publish_extensions} for adapter in ADAPTERS)
)
SUBSCRIBING = {snake(key) for key in CHECKS.keys() - PUBLISH_ONLY}.union(
    *({snake(key) for key in adapter.subscribe_extensions} for adapter in ADAPTERS)
)


@table(
    "method, extensions, shared",
    [
        (Messaging.publish, PUBLISHING, set()),
        (Messaging.request, PUBLISHING, {"timeout"}),
        (Messaging.request_many, PUBLISHING, {"timeout"}),
        (Messaging.subscribe, SUBSCRIBING, set()),
        (Messaging.on, SUBSCRIBING, set()),
        (Messaging.reply, SUBSCRIBING, set()),
    ],
)
def test_no_parameter_hides_an_extension(method: Callable[..., Any], extensions: set[str], shared: set[str]) -> None:
    """``durable`` is an extension of AMQP queues: a parameter of that name would keep it from the broker."""
    assert inspect.signature(method).parameters.keys() & extensions == shared


@table(
    "keywords, expected",
    [
        (PublishKeywords, PUBLISHING | CONTEXT | {"channel_extension"}),
        (RequestKeywords, PUBLISHING - {"timeout", "store_and_forward"} | CONTEXT | {"channel_extension"}),
        (
            RequestManyKeywords,
            PUBLISHING - {"timeout", "store_and_forward"}
            | CONTEXT
            | {"channel_extension", "buffer_size", "overflow", "prefetch"},
        ),
        (SubscribeKeywords, SUBSCRIBING | {"channel_extension"}),
        (ReplyKeywords, SUBSCRIBING),
    ],
)
def test_the_keywords_are_the_extensions_of_all_adapters(keywords: type, expected: set[str]) -> None:
    assert hints(keywords).keys() == expected


def hints(keywords: type) -> dict[str, Any]:
    names = {"Mapping": Mapping, "Sequence": Sequence, "datetime": datetime}
    return get_type_hints(keywords, localns=names)


def checks() -> dict[str, Callable[[Any], Any]]:
    found = {snake(key): check for key, check in CHECKS.items()}
    for adapter in ADAPTERS:
        for extensions in (adapter.publish_extensions, adapter.subscribe_extensions):
            found |= {snake(key): check for key, check in extensions.items()}
    return found


#: types of keywords -> values of which the check takes one
SAMPLES: dict[Any, tuple[Any, ...]] = {
    bool: (True,),
    int: (1, 2),
    float: (1.5,),
    str: ("a", "1", "topic", "1h"),
    datetime: (datetime(2026, 1, 1, tzinfo=UTC),),
    Mapping[str, Any]: ({"k": "v"},),
    Sequence[str]: (["a"],),
}


@table("name, annotation", sorted({**hints(PublishKeywords), **hints(SubscribeKeywords)}.items()))
def test_the_check_of_an_extension_accepts_the_type_of_its_keyword(name: str, annotation: Any) -> None:
    check = checks().get(name)
    if check is None:
        assert name in CONTEXT | {"channel_extension"}
        return
    for kind in get_args(annotation):
        if kind is type(None):
            continue
        if get_origin(kind) is Literal:
            for value in get_args(kind):
                check(value)
            with pytest.raises(ValueError, match="one of"):
                check("no such value")
        else:
            assert any(takes(check, value) for value in SAMPLES[kind]), (name, kind)


def takes(check: Callable[[Any], Any], value: Any) -> bool:
    try:
        check(value)
    except ValueError:
        return False
    return True


def _parameters(call: str) -> set[str]:
    parameters = inspect.signature(getattr(Messaging, call)).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}


@table("call", ["publish", "request", "request_many", "subscribe", "on", "reply"])
@table("is_given", [True, False])
def test_a_misspelt_keyword_is_refused_by_a_short_error_with_the_nearest_one(
    m: Messaging, call: str, is_given: bool
) -> None:
    """Also if its value means unset."""
    arguments = {"on": ("a", print), "reply": ("a", print)}.get(call, ("a",))
    for right in _parameters(call) | {"qos"}:
        wrong = right[:-1] + "_" + right[-1] * 2
        with pytest.raises(UnknownKeywordError) as caught:
            getattr(m, call)(*arguments, **{wrong: 1 if is_given else None})
        assert isinstance(caught.value, TypeError)
        assert str(caught.value) == f"{call}() has no keyword {wrong!r}; did you mean {right!r}?"
        assert caught.value.keyword == wrong
    with pytest.raises(UnknownKeywordError, match=rf"^{call}\(\) has no keyword 'xyzzy'$"):
        getattr(m, call)(*arguments, xyzzy=1)


def test_a_misspelt_keyword_of_a_decorator_is_refused_where_it_decorates(m: Messaging) -> None:
    for decorate in (m.on("a", concurency=2), m.reply("a", concurency=2)):  # type: ignore[call-overload]
        with pytest.raises(UnknownKeywordError, match="did you mean 'concurrency'"):
            decorate(print)


def test_an_extension_that_another_instance_has_is_no_misspelt_keyword(m: Messaging) -> None:
    with pytest.raises(UnsupportedFeatureError, match="does not support 'queueArguments'") as caught:
        m.on("a", print, queue_arguments={})
    assert not isinstance(caught.value, TypeError)


@table("parameter", ["interceptors", "services", "will", "birth", "timeout", "name"])
def test_a_misspelt_keyword_of_connect_names_the_nearest_one(parameter: str) -> None:
    with pytest.raises(InvalidOptionError, match=rf"did you mean '{parameter}'\?$"):
        messaging.connect("memory://keywords", **{parameter[:-1] + "x" + parameter[-1]: 1})
