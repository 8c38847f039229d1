"""The URL parser: strict, total, and silent about passwords."""

from __future__ import annotations

import contextlib
import string
import traceback
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from messaging.errors import InvalidUrlError
from messaging.model import BrokerUrl, Endpoint, Host, check_hosts, is_secret_option, parse_host, parse_url
from messaging.testing.tables import table
from tests.model.test_channels import allowed

SECRET = "hunter2-pl4nted"

SCHEMES = st.from_regex(r"[a-z][a-z0-9+.-]{0,8}", fullmatch=True)
HOSTS = st.one_of(
    st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,8}[A-Za-z0-9])?(\.[A-Za-z0-9]{1,5}){0,3}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
PORTS = st.none() | st.integers(1, 65535)
TEXTS = st.text(st.characters(codec="utf-8").filter(allowed), max_size=12)
NONEMPTY = TEXTS.filter(bool)


@st.composite
def urls(draw: st.DrawFn) -> BrokerUrl:
    username = draw(st.none() | NONEMPTY)
    password = draw(st.none() | TEXTS) if username is not None else None
    first, *others = draw(st.lists(st.builds(Host, HOSTS, PORTS), min_size=1, max_size=4, unique_by=Host.key))
    return BrokerUrl(
        scheme=draw(SCHEMES),
        host=first.name,
        port=first.port,
        username=username,
        password=None if password is None else SecretStr(password),
        path=draw(st.none() | TEXTS),
        options=draw(st.dictionaries(NONEMPTY, TEXTS, max_size=4)),
        others=tuple(others),
    )


def written(url: BrokerUrl) -> str:
    """The URL as a careful person writes it, password and all."""
    text = f"{url.scheme}://"
    if url.username is not None:
        text += quote(url.username, safe="")
        if url.password is not None:
            text += ":" + quote(url.password.get_secret_value(), safe="")
        text += "@"
    text += ",".join(
        (f"[{host.name}]" if ":" in host.name else host.name) + ("" if host.port is None else f":{host.port}")
        for host in url.hosts
    )
    text += "" if url.path is None else "/" + quote(url.path, safe="")
    if url.options:
        text += "?" + "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in url.options.items())
    return text


@given(urls())
def test_every_valid_url_survives_the_round_trip(url: BrokerUrl) -> None:
    parsed = parse_url(written(url))
    assert parsed == url
    assert [*parsed.options] == [*url.options]


@given(urls())
def test_the_text_of_a_url_parses_to_the_same_url_but_for_its_secrets(url: BrokerUrl) -> None:
    again = parse_url(str(url))
    for name in ("scheme", "host", "port", "username", "path", "others", "hosts", "address"):
        assert getattr(again, name) == getattr(url, name)
    assert (again.password is None) == (url.password is None)
    for key, value in url.options.items():
        assert again.options[key] == ("***" if is_secret_option(key) else value)


LIKE_A_URL = st.builds(
    "{}://{}{}{}".format,
    SCHEMES,
    st.text("ab:@/?#[]%=&.0,", max_size=15),
    st.sampled_from(["", "@"]),
    st.text("ab:@/?#[]%=&.0,", max_size=15),
)


@given(st.text(max_size=60) | LIKE_A_URL)
@settings(max_examples=200)
def test_any_text_parses_or_is_an_invalid_url(text: str) -> None:
    said = ""
    try:
        url = parse_url(text)
    except InvalidUrlError as error:
        said = str(error)
    else:
        assert parse_url(str(url)).host == url.host
    assert len(said.encode()) < 300


JUNK = st.text(string.ascii_letters + string.digits + string.punctuation + " é\n", max_size=12)


@given(prefix=JUNK, user=JUNK, host=JUNK, suffix=JUNK)
@example(prefix="", user="0?", host="=", suffix="%")
@example(prefix="", user="0?", host="=1&:hunter2-pl4nted@=2", suffix="")
@settings(max_examples=300)
def test_a_planted_password_never_appears(prefix: str, user: str, host: str, suffix: str) -> None:
    """Whatever is wrong with the rest, and with ``@`` or not."""
    for text in (
        f"mqtt://{user}:{SECRET}@{host}{suffix}",
        f"{prefix}://{user}:{SECRET}@{host}{suffix}",
        f"{prefix}{user}:{SECRET}@{host}",
        f"mqtt://{user}:{SECRET}{suffix}@{host}",
        f"mqtt://u:{suffix}{SECRET}@{host}",
    ):
        try:
            url = parse_url(text)
        except InvalidUrlError as error:
            shown = "".join(traceback.format_exception(error))
            assert SECRET not in shown
        else:
            if url.password is not None and SECRET in url.password.get_secret_value():
                assert SECRET not in str(url)
                assert SECRET not in repr(url)
                assert SECRET not in f"{url} {url!r}"


@table("host", ["localhost=1", "localhost=%", "localhost=1&x=2", "=1"])
def test_a_password_behind_a_question_mark_is_no_name_of_an_option(host: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_url(f"mqtt://user?:{SECRET}@{host}")
    assert SECRET not in str(caught.value)


@table(
    "text, message",
    [
        ("", "no '://'"),
        ("localhost", "no '://'"),
        ("mqtt:localhost", "no '://'"),
        ("://host", "malformed scheme"),
        ("1mqtt://host", "malformed scheme"),
        ("mq tt://host", r"U\+0020 at index 2"),
        ("mqtt://ho\x00st", r"U\+0000 at index 9"),
        ("mqtt://ho\ud800st", r"U\+D800 at index 9"),
        ("mqtt://", "no host"),
        ("mqtt://:1883", "no host"),
        ("mqtt:///path", "no host"),
        ("mqtt://-a", "not a host name"),
        ("mqtt://a..b", "not a host name"),
        ("mqtt://é", "not a host name"),
        ("mqtt://" + "a" * 254, "not a host name"),
        ("mqtt://host:", "port must be a number"),
        ("mqtt://host:x", "port must be a number"),
        ("mqtt://host:0", "port must be a number from 1 to 65535"),
        ("mqtt://host:65536", "port must be a number from 1 to 65535"),
        ("mqtt://host:\N{ARABIC-INDIC DIGIT ONE}", "port must be a number"),
        ("mqtt://host:1883000000", "port must be a number"),
        ("mqtt://host:00000199999", "port must be a number"),
        (f"mqtt://host:000001{'0' * 5000}", "port must be a number"),
        ("mqtt://[fe80::1%a%2Fb]", "not an IPv6 address"),
        ("mqtt://::1", "brackets"),
        ("mqtt://[::1", "']' is missing"),
        ("mqtt://[::g]", "not an IPv6 address"),
        ("mqtt://[::1]x", "only ':port' may follow"),
        ("mqtt://host#x", "holds a '#'"),
        ("mqtt://@host", "empty user name"),
        ("mqtt://:pw@host", "empty user name"),
        ("mqtt://a:b:c@host", "%3A"),
        ("mqtt://a:b@c@host", "%40"),
        ("mqtt://a:b/c@host", "%2F"),
        ("mqtt://a:%zz@host", "password is not followed by two hex digits"),
        ("mqtt://%f@host", "user name is not followed by two hex digits"),
        ("mqtt://a:%ff@host", "password is not UTF-8"),
        ("mqtt://a:%00@host", r"password holds U\+0000"),
        ("mqtt://host/%ff", "path is not UTF-8"),
        ("mqtt://host?", "option=value pairs"),
        ("mqtt://host?a", "option=value pairs"),
        ("mqtt://host?=1", "option=value pairs"),
        ("mqtt://host?a=1&", "option=value pairs"),
        ("mqtt://host?a=1&a=2", "option 'a' is given twice"),
        ("mqtt://host?a=%", "option 'a' is not followed by two hex digits"),
        ("mqtt://" + "a" * 8192, "8199 characters; at most 8192"),
    ],
)
def test_a_malformed_url_is_refused_with_its_fault(text: str, message: str) -> None:
    with pytest.raises(InvalidUrlError, match=message.replace("(", r"\(")):
        parse_url(text)


@table("value", [None, 7, b"mqtt://host", ["mqtt://host"]])
def test_urls_that_are_no_text_are_refused(value: object) -> None:
    with pytest.raises(InvalidUrlError, match="must be a str"):
        parse_url(value)  # type: ignore[arg-type]


def test_parts_are_taken_apart() -> None:
    url = parse_url("AMQPS://us%40er:p%3Aw@[::1]:5671/%2Fv%2Fhost?prefetch=10&name=a%26b&empty=")
    assert (url.scheme, url.host, url.port, url.username, url.path) == ("amqps", "::1", 5671, "us@er", "/v/host")
    assert url.password is not None
    assert url.password.get_secret_value() == "p:w"
    assert dict(url.options) == {"prefetch": "10", "name": "a&b", "empty": ""}
    assert str(url) == "amqps://us%40er:***@[::1]:5671/%2Fv%2Fhost?prefetch=10&name=a%26b&empty="


def test_no_path_and_an_empty_path_are_two_things() -> None:
    assert parse_url("amqp://host").path is None
    assert parse_url("amqp://host/").path == ""


def test_an_empty_password_is_a_password() -> None:
    url = parse_url("mqtt://me:@host")
    assert url.password is not None
    assert url.password.get_secret_value() == ""
    assert str(url) == "mqtt://me:***@host"


def test_secrets_in_options_are_masked_too() -> None:
    url = parse_url(f"mqtt://host?password={SECRET}&key_passphrase={SECRET}&api_token={SECRET}&Secret={SECRET}&name=x")
    assert SECRET not in str(url) + repr(url)
    assert "name=x" in str(url)


def test_a_url_cannot_be_changed() -> None:
    url = parse_url("mqtt://host?a=1")
    with pytest.raises(AttributeError):
        url.host = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        url.options["a"] = "2"  # type: ignore[index]


@table(
    "text, address",
    [
        ("mqtt://joe:secret@broker:1884/x?version=5", "broker:1884"),
        ("mqtt://broker", "broker"),
        ("amqp://[::1]:5672", "[::1]:5672"),
        ("amqp://[::1]", "[::1]"),
    ],
)
def test_the_address_is_host_and_port_as_the_url_has_them(text: str, address: str) -> None:
    assert parse_url(text).address == address


# --- several hosts


def test_several_hosts_have_their_own_ports_and_share_the_rest() -> None:
    url = parse_url("amqp://me:p%2Cw@a,b:1234,[::1],[::2]:99/v,host?name=x,y")
    assert [*url.hosts] == [Host("a"), Host("b", 1234), Host("::1"), Host("::2", 99)]
    assert (url.host, url.port) == ("a", None)
    assert url.password is not None
    assert url.password.get_secret_value() == "p,w"
    assert (url.username, url.path, url.options["name"]) == ("me", "v,host", "x,y")
    assert url.address == "a,b:1234,[::1],[::2]:99"
    assert str(url) == "amqp://me:***@a,b:1234,[::1],[::2]:99/v%2Chost?name=x,y"
    assert url.label("plant") == "amqp 'plant' (a,b:1234,[::1],[::2]:99)"
    assert url.label("plant", Endpoint(Host("b", 1234), "10.0.0.1")) == "amqp 'plant' (b:1234 at 10.0.0.1)"


@table(
    "text, message",
    [
        ("mqtt://a,", "an empty host beside a ','"),
        ("mqtt://,a", "an empty host beside a ','"),
        ("mqtt://a,,b", "an empty host beside a ','"),
        ("mqtt://a,b:", "host 2: the port must be a number"),
        ("mqtt://a:1,b:65536", "host 2: the port must be a number"),
        ("mqtt://a,b c", "U\\+0020"),
        ("mqtt://a,b!", "host 2: this is not a host name"),
        ("mqtt://a,::1", "host 2: an IPv6 address stands in brackets"),
        ("mqtt://a,[::1", "host 2: ']' is missing"),
        ("mqtt://a,[b]", "host 2: this is not an IPv6 address"),
        ("mqtt://a,b,A", "hosts 1 and 3 are the same"),
        ("mqtt://a:1883,b,a:1883", "hosts 1 and 3 are the same"),
        ("mqtt://[::1],[0:0::1]", "hosts 1 and 2 are the same"),
        ("mqtt://u:p@a,v:q@b", "several hosts share one user, as mqtt://user:password@a,b"),
        ("mqtt://" + ",".join(f"h{number}" for number in range(65)), "65 hosts; at most 64"),
    ],
)
def test_a_list_of_hosts_that_is_wrong_says_where(text: str, message: str) -> None:
    with pytest.raises(InvalidUrlError, match=message):
        parse_url(text)


def test_one_host_with_two_ports_is_two_hosts() -> None:
    assert len(parse_url("mqtt://a:1,a:2,a").hosts) == 3


def test_the_default_port_makes_two_spellings_of_a_host_equal() -> None:
    url = parse_url("mqtt://a,a:1883")
    check_hosts(url, 8883)
    with pytest.raises(InvalidUrlError, match="hosts 1 and 2 are the same"):
        check_hosts(url, 1883)


@given(st.builds(Host, HOSTS, PORTS))
def test_a_host_survives_the_round_trip(host: Host) -> None:
    assert parse_host(str(host)) == host


@given(st.text(max_size=30))
def test_any_text_is_a_host_or_an_invalid_url(text: str) -> None:
    with contextlib.suppress(InvalidUrlError):
        host = parse_host(text)
        assert parse_host(str(host)) == host
