"""Names, types and canonical texts of attributes; errors name the attribute and a correct value."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.v1.event import CloudEvent as SdkEvent
from hypothesis import given
from hypothesis import strategies as st

from messaging.cloudevents import CloudEvent, from_message, to_message
from messaging.errors import DecodeError, InvalidEventError
from messaging.model import Message, MessageContext
from messaging.testing.tables import table

NEEDED = {"specversion": "1.0", "id": "1", "source": "/plant", "type": "reading"}


def received(**headers: Any) -> CloudEvent:
    return from_message(Message(b"", MessageContext("a", extensions={"headers": {**NEEDED, **headers}})))


@table(
    "attributes, text",
    [
        ({"source": "/a"}, "attribute 'type' is missing"),
        ({"type": "a"}, "attribute 'source' is missing"),
        ({**NEEDED, "id": ""}, "attribute 'id': must not be empty"),
        ({**NEEDED, "id": 5}, "attribute 'id': must be a str, not int"),
        ({**NEEDED, "specversion": "0.3"}, "attribute 'specversion': must be '1.0'"),
        ({**NEEDED, "subject": ""}, "attribute 'subject': must not be empty; leave the attribute out"),
        ({**NEEDED, "source": "a b"}, "attribute 'source': must be a URI reference, .* percent-encoded"),
        ({**NEEDED, "source": "a%2"}, "attribute 'source': must be a URI reference"),
        ({**NEEDED, "dataschema": "/relative"}, "attribute 'dataschema': must be an absolute URI"),
        ({**NEEDED, "datacontenttype": "json"}, "attribute 'datacontenttype': must be a media type, such as 'applic"),
        ({**NEEDED, "time": "2018-04-05T17:31:00Z"}, "attribute 'time': must be a datetime with a time zone, not str"),
        ({**NEEDED, "time": datetime(2026, 1, 1)}, "attribute 'time': needs its time zone"),
        (
            {**NEEDED, "time": datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=30)))},
            "attribute 'time': must have a time zone of whole minutes",
        ),
        ({**NEEDED, "Upper": "a"}, "attribute name 'Upper': must be lower-case letters a-z and digits"),
        ({**NEEDED, "with-dash": "a"}, "attribute name 'with-dash'"),
        ({**NEEDED, "data": "a"}, "attribute name 'data'"),
        ({**NEEDED, "sequence": 2**31}, "attribute 'sequence': must be an integer of 32 bits; send a larger one as"),
        ({**NEEDED, "ratio": 0.5}, "attribute 'ratio': must be a str, int, bool, bytes or datetime, not float"),
        ({**NEEDED, "list": [1]}, "attribute 'list': must be a str, int, bool, bytes or datetime, not list"),
        ({**NEEDED, "note": "a\nb"}, "attribute 'note': must not hold control characters"),
        ({**NEEDED, "note": "\ud800"}, "attribute 'note': must not hold control characters, surrogates"),
        ({**NEEDED, "note": "\ufffe"}, "attribute 'note': .* noncharacters"),
        ({**NEEDED, "note": "a" * 65_537}, "attribute 'note': must be at most 65536 characters"),
        ({**NEEDED, "raw": b"a" * 65_537}, "attribute 'raw': must be at most 65536 bytes"),
        ({**NEEDED, **{f"x{n}": n for n in range(300)}}, "at most 256 attributes, not 30"),
    ],
)
def test_an_invalid_attribute_is_named_with_what_would_be_right(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidEventError, match=text):
        CloudEvent(attributes)


def test_an_event_gets_an_id_a_time_and_the_version_and_copies_the_attributes() -> None:
    given_ = {"source": "/plant", "type": "reading", "subject": None}
    event = CloudEvent(given_, 1)
    assert given_ == {"source": "/plant", "type": "reading", "subject": None}
    assert len(event.get_id()) == 36
    time = event.get_time()
    assert time is not None
    assert abs(datetime.now(UTC) - time) < timedelta(seconds=60)
    assert event.get_specversion() == "1.0"
    assert event.get_subject() is None


def test_a_received_event_has_no_time_that_it_was_not_sent_with() -> None:
    assert received().get_attributes() == NEEDED


def test_events_are_equal_by_attributes_and_data_and_show_no_data() -> None:
    one, two = (CloudEvent({**NEEDED, "time": datetime(2026, 1, 1, tzinfo=UTC)}, {"secret": 1}) for _ in range(2))
    assert one == two
    assert one != CloudEvent({**one.get_attributes()}, {"secret": 2})
    assert one == SdkEvent({**one.get_attributes()}, {"secret": 1})
    assert one != 5
    assert repr(one) == "<CloudEvent id='1' source='/plant' type='reading'>"


@table(
    "text, time",
    [
        ("2018-04-05T17:31:00Z", datetime(2018, 4, 5, 17, 31, tzinfo=UTC)),
        ("2018-04-05t17:31:00z", datetime(2018, 4, 5, 17, 31, tzinfo=UTC)),
        ("2018-04-05T17:31:00.1Z", datetime(2018, 4, 5, 17, 31, 0, 100_000, tzinfo=UTC)),
        ("2018-04-05T17:31:00.123456789Z", datetime(2018, 4, 5, 17, 31, 0, 123_456, tzinfo=UTC)),
        ("2018-04-05T17:31:00-05:30", datetime(2018, 4, 5, 23, 1, tzinfo=UTC)),
        ("2016-12-31T23:59:60Z", datetime(2017, 1, 1, tzinfo=UTC)),
    ],
)
def test_times_are_read_as_in_rfc_3339(text: str, time: datetime) -> None:
    assert received(time=text).get_time() == time


@table(
    "text",
    ["2018-04-05", "2018-04-05T17:31:00", "2018-04-05 17:31:00Z", "17:31Z", "", "now", "2018-13-05T17:31:00Z",
     "2018-04-05T17:31:61Z", "9999-12-31T23:59:60Z", "2018-04-05T17:31:00+25:00", "٢٠١٨-04-05T17:31:00Z"],
)  # fmt: skip
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(DecodeError, match=r"attribute 'time': (must be a time as in RFC 3339, such as|is no time of)"):
        received(time=text)


def test_a_time_that_amqp_has_as_a_timestamp_is_read() -> None:
    assert received(time=datetime(2026, 1, 1, tzinfo=UTC)).get_time() == datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(DecodeError, match="attribute 'time': must be a datetime"):
        received(time=5)


TEXTS = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters=[chr(n) for n in range(0xFDD0, 0xFDF0)]),
    min_size=1, max_size=50,
).filter(lambda text: all(ord(each) & 0xFFFE != 0xFFFE for each in text))  # fmt: skip
TIMES = st.datetimes(
    min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30),
    timezones=st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)  # fmt: skip
EXTENSIONS = st.dictionaries(
    st.from_regex(r"x[a-z0-9]{1,19}", fullmatch=True),
    st.one_of(TEXTS, st.integers(-(2**31), 2**31 - 1), st.booleans(), st.binary(max_size=30), TIMES),
    max_size=4,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False),
              st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4)),
    max_leaves=12,
)  # fmt: skip
DATA = st.one_of(
    st.tuples(st.just("application/json"), JSON),
    st.tuples(st.just("application/vnd.x+json; charset=utf-8"), JSON),
    st.tuples(st.just("text/plain"), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)),
    st.tuples(st.just("image/png"), st.binary(min_size=1, max_size=50)),
    st.tuples(st.none(), JSON),
)
EVENTS = st.builds(
    lambda identity, kind, time, extensions, data: CloudEvent(
        {**extensions, "id": identity, "type": kind, "source": "/plant", "time": time, "datacontenttype": data[0]},
        data[1],
    ),
    TEXTS, TEXTS, TIMES, EXTENSIONS, DATA,
)  # fmt: skip


def texts(event: CloudEvent, *, keep: tuple[type, ...]) -> dict[str, Any]:
    """Attributes as they are after a transport that keeps the types ``keep``."""
    sent = to_message(event, "a").context.extensions["headers"]
    found = {name: each if isinstance(each, keep) else sent[name] for name, each in event.get_attributes().items()
             if name in sent}  # fmt: skip
    found["time"] = event.get_time()
    if event.get_datacontenttype() is not None or event.get_data() is not None:
        found["datacontenttype"] = event.get_datacontenttype() or "application/json"
    return found


@given(EVENTS)
def test_every_event_is_equal_after_structured_mode(event: CloudEvent) -> None:
    found = from_message(to_message(event, "a", "structured"))
    kept = {name: each for name, each in texts(event, keep=(str, int)).items() if name in event.get_attributes()}
    assert found.get_attributes() == kept
    assert found.get_data() == event.get_data()


@given(EVENTS)
def test_every_event_is_equal_after_binary_mode(event: CloudEvent) -> None:
    found = from_message(to_message(event, "a"))
    assert found.get_attributes() == texts(event, keep=())
    assert found.get_data() == event.get_data()


@given(EVENTS)
def test_every_event_is_equal_with_the_headers_of_amqp(event: CloudEvent) -> None:
    found = from_message(to_message(event, "a", binding="amqp"))
    assert found.get_attributes() == texts(event, keep=(str, int, bytes))
    assert found.get_data() == event.get_data()
