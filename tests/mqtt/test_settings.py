"""Options of MQTT URLs, and an adapter without a connection."""

from __future__ import annotations

from typing import Any

import pytest

from messaging.errors import ConfigurationError, InvalidOptionError, InvalidUrlError
from messaging.model import Features, parse_url
from messaging.model.settings import load_settings
from messaging.testing.tables import table
from messaging_adapters.mqtt import MqttAdapter
from messaging_adapters.mqtt import settings as module


def make(url: str, **keywords: Any) -> MqttAdapter:
    parsed = parse_url(url)
    return MqttAdapter(parsed, load_settings(MqttAdapter.settings_type, parsed, keywords), "my name-1")


@table(
    "given, meant",
    [*[(given, "5") for given in ("5", "5.0", 5, "v5")], *[(given, "3.1.1") for given in ("3.1.1", "4", 4, "311")]],
)
def test_versions_as_people_write_them(given: Any, meant: str) -> None:
    settings = make("mqtt://h", version=given).settings
    assert settings.version == meant
    assert settings.v5 is (meant == "5")


@table(
    "url, option",
    [
        ("mqtt://h?version=3", "version"),
        ("mqtt://h?version=mqtt5", "version"),
        ("mqtt://h?keepalive=-1", "keepalive"),
        ("mqtt://h?keepalive=65536", "keepalive"),
        ("mqtt://h?receive_maximum=0", "receive_maximum"),
        ("mqtt://h?session_expiry=4294967296", "session_expiry"),
        ("mqtt://h?max_inflight=0", "max_inflight"),
        ("mqtt://h?clean_start=maybe", "clean_start"),
        ("mqtt://h?clean_start=false", "clean_start"),
        ("mqtt://h?clean_start=false&client_id=", "clean_start"),
        ("mqtt://h?name=x&keep_session=true&session_expiry=0", "session_expiry"),
        ("mqtt://h?name=x&keep_session=true&version=3.1.1&clean_start=true", "clean_start"),
        ("mqtts://h?allow_insecure=true&cafile=x.pem", "allow_insecure"),
        ("mqtt://h?envelope=true", "envelope"),
        ("mqtt://h?version=3.1.1&session_expiry=5", "session_expiry"),
        ("mqtt://h?cafile=x.pem", "cafile"),
        ("mqtt://h?certfile=x.pem", "certfile"),
        ("mqtt://h?allow_insecure=true", "allow_insecure"),
        ("mqtts://h?keyfile=x.pem", "keyfile"),
        ("mqtt://h?password=hush", "password"),
        ("mqtt://h?keepaliv=1", "keepaliv"),
    ],
)
def test_options_that_do_not_fit_are_named(url: str, option: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        make(url)
    assert caught.value.option == option
    assert "hush" not in str(caught.value)


def test_a_path_is_refused() -> None:
    with pytest.raises(InvalidUrlError, match="no path") as refusal:
        make("mqtt://h/topic")
    assert isinstance(refusal.value, ConfigurationError)
    make("mqtt://h/")


def test_defaults() -> None:
    adapter = make("mqtt://h")
    target = adapter.session.target
    assert (target.host, target.port, target.tls, target.settings.v5) == ("h", 1883, None, True)
    assert (target.settings.keepalive, target.settings.connect_expiry, target.settings.receive_maximum) == (60, 0, 1024)
    assert adapter.settings.clean_start
    assert not adapter.settings.persistent
    assert make("mqtts://h").session.target.port == 8883
    assert make("mqtts://h:99").session.target.port == 99
    assert make("mqtts://h").session.target.tls is not None
    assert make("mqtt://[::1]").session.target.host == "::1"


def test_credentials_come_from_the_url_first() -> None:
    target = make("mqtt://u:p@h", username="other", password="else").session.target
    assert target.username == "u"
    assert target.password is not None
    assert target.password.get_secret_value() == "p"
    target = make("mqtt://u@h", password="else").session.target
    assert target.password is not None
    assert target.password.get_secret_value() == "else"
    assert "else" not in repr(target)
    assert make("mqtt://h").session.target.username is None


def test_a_generated_client_id_is_unique_and_fits_every_broker() -> None:
    settings = make("mqtt://h").settings
    ids = {module.client_id(settings, "my näme-1/2") for _ in range(100)}
    assert len(ids) == 100
    for each in ids:
        assert each.startswith("mynme12")
        assert each.isascii()
        assert each.isalnum()
        assert len(each) <= 23
    assert make("mqtt://h?client_id=me").session.target.client_id == "me"


@table(
    "url, persistent",
    [
        ("mqtt://h", False),
        ("mqtt://h?session_expiry=5", True),
        ("mqtt://h?client_id=x&clean_start=false", False),
        ("mqtt://h?version=3.1.1", False),
        ("mqtt://h?version=3.1.1&client_id=x&clean_start=false", True),
    ],
)
def test_when_a_session_outlives_its_connection(url: str, persistent: bool) -> None:
    assert make(url).settings.persistent is persistent


def test_features_are_what_the_version_can_do() -> None:
    five, three = make("mqtt://h"), make("mqtt://h?version=3.1.1")
    enveloped = make("mqtt://h?version=3.1.1&envelope=true")
    assert five.capabilities.protocols == ("mqtt", "mqtt5")
    assert three.capabilities.protocols == ("mqtt", "mqtt3.1.1")
    own = {"willDelay", "retainHandling", "retainAsPublished", "noLocal"}
    assert five.capabilities.features == enveloped.capabilities.features | own | {Features.EXTENSION_MANDATORY}
    assert not enveloped.capabilities.features & own
    assert "packetId" in five.capabilities.features & three.capabilities.features & enveloped.capabilities.features
    assert five.capabilities.features - three.capabilities.features == {
        Features.MESSAGE_PROPERTIES, Features.EXTENSION_HEADERS, Features.EXTENSION_TIME_TO_LIVE,
        Features.EXTENSION_MESSAGE_ID, Features.EXTENSION_DEDUPLICATE, Features.EXTENSION_MANDATORY, *own,
    }  # fmt: skip
    for absent in (
        Features.EXTENSION_PRIORITY, Features.ROUTING_KEY, Features.EXTENSION_AUTOCREATE, Features.BROKER_REDELIVERY,
        Features.QUEUE_RETENTION, Features.REPLY_TO,
    ):  # fmt: skip
        assert absent not in five.capabilities.features
    assert five.capabilities.qos_levels == ("0", "1", "2")
    assert five.capabilities.default_qos == "0"


@table(
    "url, given, expected",
    {
        "MQTT 5": ("mqtt://h", {"name": "plant"}, ("plant", False, 604_800)),
        "MQTT 3.1.1": ("mqtt://h?version=3.1.1", {"name": "plant"}, ("plant", False, 0)),
        "given options are left as they are":
            ("mqtt://h?client_id=me&session_expiry=60&clean_start=true", {"name": "n"}, ("me", True, 60)),
    },
)  # fmt: skip
def test_keep_session_sets_what_a_lasting_session_needs(
    url: str, given: dict[str, Any], expected: tuple[str, bool, int]
) -> None:
    settings = make(url, keep_session=True, **given).settings
    assert (settings.client_id, settings.clean_start, settings.session_expiry) == expected
    assert settings.persistent


@table(
    "url, words",
    {
        "resumed, not kept": ("mqtt://h?name=x&client_id=y&clean_start=false", "'x': option 'clean_start' false"),
        "kept, not resumed": ("mqtt://h?name=x&keep_session=true&clean_start=true", "'x': option 'clean_start' true"),
        "kept": ("mqtt://h?name=x&keep_session=true", ""),
        "kept by MQTT 3.1.1": ("mqtt://h?client_id=x&version=3.1.1&clean_start=false", ""),
        "kept over reconnects": ("mqtt://h?session_expiry=60", ""),
    },
)
def test_a_session_that_is_kept_for_a_part_of_the_time_is_a_warning(
    caplog: pytest.LogCaptureFixture, url: str, words: str
) -> None:
    make(url)
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


@table("options", [{}, {"client_id": ""}])
def test_keep_session_needs_a_name_that_lasts(options: dict[str, str]) -> None:
    with pytest.raises(InvalidOptionError, match="set 'name' or 'client_id'") as refusal:
        make("mqtt://h", keep_session=True, **options)
    assert refusal.value.option == "keep_session"
