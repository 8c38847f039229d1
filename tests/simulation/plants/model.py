"""A fault that an earlier commit mended, and the text that brings it back."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A change of one place of the product.

    Attributes:
        file: path from the root of the project, with ``/``.
        before: text that stands there exactly once.
        after: the text that replaces it.
    """

    file: str
    before: str
    after: str


class Planted(NamedTuple):
    """A mended fault, the edits that bring it back, and an existing test that fails with them.

    Attributes:
        name: what goes wrong, in a few words; unique.
        subject: of the commit that mended it, or that brought the code which prevents it.
        service: the part of the toolkit that loses, repeats, reorders, forgets or hangs; one of ``SERVICES``.
        edits: applied together; several edits of one file are applied in order.
        test: arguments of pytest that select the test, separated by spaces.
    """

    name: str
    subject: str
    service: str
    edits: tuple[Edit, ...]
    test: str


#: parts of the toolkit, in the order in which the faults are listed
SERVICES = (
    "mqtt",
    "amqp",
    "memory",
    "receiving",
    "requests",
    "outbox",
    "inbox",
    "devices",
    "gateway",
    "typed bus",
    "distributed admin",
    "remote events",
    "leases",
    "transactions",
    "spark",
    "journal",
)
