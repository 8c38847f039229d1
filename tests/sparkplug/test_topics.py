"""Topics of Sparkplug B."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messaging.errors import InvalidChannelError
from messaging.sparkplug import MessageType, Topic
from messaging.testing.tables import table

NAME = st.text(st.characters(exclude_characters="+#/\0", exclude_categories=["Cs"]), min_size=1, max_size=10)


@table(
    "text, topic",
    [
        ("spBv1.0/G 1/NBIRTH/E", Topic(MessageType.NBIRTH, "G 1", "E")),
        ("spBv1.0/G/NDEATH/E", Topic(MessageType.NDEATH, "G", "E")),
        ("spBv1.0/G/NDATA/E", Topic(MessageType.NDATA, "G", "E")),
        ("spBv1.0/G/NCMD/E", Topic(MessageType.NCMD, "G", "E")),
        ("spBv1.0/G/DBIRTH/E/D", Topic(MessageType.DBIRTH, "G", "E", "D")),
        ("spBv1.0/G/DDEATH/E/D", Topic(MessageType.DDEATH, "G", "E", "D")),
        ("spBv1.0/G/DDATA/E/D", Topic(MessageType.DDATA, "G", "E", "D")),
        ("spBv1.0/G/DCMD/E/D", Topic(MessageType.DCMD, "G", "E", "D")),
        ("spBv1.0/STATE/scada", Topic(MessageType.STATE, "", "scada")),
    ],
)
def test_a_topic_is_parsed_and_written_back(text: str, topic: Topic) -> None:
    assert Topic.parse(text) == topic
    assert str(topic) == text


def test_the_state_topic_of_sparkplug_2_is_read() -> None:
    assert Topic.parse("STATE/scada") == Topic(MessageType.STATE, "", "scada")


@table(
    "text",
    [
        "", "/", "spBv1.0", "spBv1.0/G", "spBv1.0/G/NDATA", "spBv1.0/G/NDATA/", "spBv1.0//NDATA/E",
        "spBv1.0/G/NDATA/E/D", "spBv1.0/G/DDATA/E", "spBv1.0/G/DDATA/E/D/x", "spBv1.0/G/DDATA/E/", "spAv1.0/G/NDATA/E",
        "spBv1.0/G/ndata/E", "spBv1.0/G/OTHER/E", "spBv1.0/G/STATE/E", "spBv1.0/G/NDATA/+", "spBv1.0/STATE/",
        "STATE", "a/b/c/d",
    ],
)  # fmt: skip
def test_other_topics_are_refused(text: str) -> None:
    with pytest.raises(InvalidChannelError, match=r"spBv1\.0/<group>/NDATA/<edge node>"):
        Topic.parse(text)


@table(
    "arguments",
    [
        (MessageType.NDATA, "G", "E", "D"),
        (MessageType.DDATA, "G", "E"),
        (MessageType.NDATA, "G/x", "E"),
        (MessageType.NDATA, "G", "#"),
        (MessageType.NDATA, "", "E"),
        (MessageType.NDATA, 5, "E"),
        (MessageType.STATE, "G", "host"),
        ("NDATA", "G", "E"),
    ],
)
def test_parts_that_make_no_topic_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidChannelError):
        Topic(*arguments)


@table("junk", [None, 5, b"spBv1.0/G/NDATA/E", object()])
def test_a_topic_that_is_no_text_is_refused(junk: Any) -> None:
    with pytest.raises(InvalidChannelError):
        Topic.parse(junk)


@given(st.sampled_from(MessageType), NAME, NAME, NAME)
def test_every_topic_is_parsed_again(kind: MessageType, group: str, node: str, device: str) -> None:
    is_state = kind is MessageType.STATE
    if group == "STATE":
        group = "G"
    topic = Topic(kind, "" if is_state else group, node, device if kind.is_device else None)
    assert Topic.parse(str(topic)) == topic
