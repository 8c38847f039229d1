"""Mistakes of a caller raise an error of this project, at once, in words that help."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import field_validator

from messaging import Message, MessageContext
from messaging.errors import ArgumentError, InvalidOptionError
from messaging.model import parse_url
from messaging.model.settings import Settings, load_settings
from messaging.testing.tables import table
from tests.doubles.fake import FakeBroker, settle_loop
from tests.doubles.fixtures import Connect


@table("extensions", [7, None, "qos", [("qos", "1")]])
def test_extensions_of_a_context_are_a_mapping(broker: FakeBroker, connect: Connect, extensions: Any) -> None:
    m = connect(broker)
    with pytest.raises(ArgumentError, match="extensions"):
        m.publisher.publish(Message(b"", MessageContext("a", extensions=extensions)))
    with pytest.raises(ArgumentError, match="extensions"):
        m.subscription.subscribe(MessageContext("a", extensions=extensions))
    settle_loop()
    assert broker.calls == ["open"]


class Unfit:
    """Nothing pydantic knows how to validate."""


@table("model", [7, "Reading", Unfit, object()])
@table("on_invalid", ["raise", "skip"])
def test_a_model_is_checked_when_subscribing(broker: FakeBroker, connect: Connect, model: Any, on_invalid: Any) -> None:
    m = connect(broker)
    with pytest.raises(ArgumentError, match="no type pydantic can validate"):
        m.subscribe("a", model, on_invalid=on_invalid)
    settle_loop()
    assert broker.calls == ["open"]


@table("services", [7, "registry", {}])
def test_services_is_a_registry(broker: FakeBroker, connect: Connect, services: Any) -> None:
    with pytest.raises(ArgumentError, match=f"ServiceRegistry, not {type(services).__name__}"):
        connect(broker, services=services)
    assert broker.opened == 0


class Fussy(Settings):
    version: str = "5"

    @field_validator("version")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "5":
            raise ValueError("must be '5'")
        return value


def test_an_invalid_option_is_reported_without_the_words_of_pydantic() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        load_settings(Fussy, parse_url("memory://x"), {"version": "4"})
    assert str(caught.value) == "option 'version': must be '5'"


@table("option", ["name", "client_id", "username", "password"])
def test_a_control_character_in_an_option_is_named_and_not_shown_as_a_pattern(option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        load_settings(Settings, parse_url("memory://x"), {option: "se\x01cret"})
    assert str(caught.value).startswith(f"option {option!r}: holds U+0001")
    assert "cret" not in str(caught.value)
