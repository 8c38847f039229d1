"""Functions and types that routes of the tests name by import path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, field_validator

from messaging.errors import DecodeError
from messaging.gateway.pipeline import Draft

NUMBER = 5


class Reading(BaseModel):
    celsius: float
    unit: str = "degC"

    @field_validator("celsius")
    @classmethod
    def _check(cls, value: float) -> float:
        if value == 13:
            raise KeyError("thirteen")
        return value


class Nested:
    @staticmethod
    def same(draft: Draft) -> Draft:
        return draft


def none(draft: Draft) -> None:
    return None


def text(draft: Draft) -> str:
    return "text"


def raw(draft: Draft) -> bytes:
    return b"\x00raw"


def array(draft: Draft) -> bytearray:
    return bytearray(b"raw")


def mapping(draft: Draft) -> dict[str, Any]:
    return {"found": draft.value}


def model(draft: Draft) -> Reading:
    return Reading(celsius=1.5)


def several(draft: Draft) -> Iterator[Any]:
    for each in draft.value:
        yield {"item": each}


def targets(draft: Draft) -> list[Draft]:
    return [draft.copy(target=f"target/{each}") for each in draft.value]


def new(draft: Draft) -> Draft:
    return Draft(draft.channel, b'"new"', captures=draft.captures)


def fail(draft: Draft) -> None:
    raise LookupError("the cause")


def refuse(draft: Draft) -> None:
    raise DecodeError("refused")


def wrong(draft: Draft) -> int:
    return 5


def endless(draft: Draft) -> Iterator[dict[str, int]]:
    return ({"n": number} for number in itertools.count())


def bad_item(draft: Draft) -> list[Any]:
    return [{"good": 1}, b"no json"]
