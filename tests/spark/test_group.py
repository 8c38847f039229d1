"""What the broker keeps for a query is found again, or the query fails before it receives anything."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from adapters.spark.errors import DataLossError, JournalMismatchError
from tests.brokers import Mosquitto, RabbitMQ
from tests.proxy import Proxy
from tests.spark.harness import numbers, publish
from tests.spark.readers import Driven

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["mqtt", "amqp"])
def url(request: pytest.FixtureRequest) -> str:
    """A broker of each kind."""
    broker: Mosquitto | RabbitMQ = request.getfixturevalue("mosquitto" if request.param == "mqtt" else "rabbitmq")
    return broker.url


@pytest.fixture
def channel() -> str:
    return f"channel-{uuid4().hex[:8]}"


@pytest.fixture
def group() -> str:
    return f"group-{uuid4().hex[:8]}"


# --- a journal that was lost


def test_a_query_whose_journal_was_deleted_receives_what_the_broker_keeps(
    url: str, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with Driven(url, journal, channel=channel).start() as first:
        publish(url, channel, numbers(20))
        assert first.receive(20) == numbers(20)
    publish(url, channel, numbers(30, 20))
    for times in range(1, 3):  # the session is found again however often the journal is lost
        shutil.rmtree(journal)
        with Driven(url, journal, first.checkpoint, channel=channel, failOnDataLoss="false").start() as second:
            assert second.receive(30) == numbers(30, 20 * times)
        publish(url, channel, numbers(30, 20 * (times + 1)))
    with Driven(url, journal, first.checkpoint, channel=channel) as third:  # and stays that of the new journal
        assert third.start().receive(30) == numbers(30, 60)


def test_a_query_whose_journal_was_deleted_fails_before_it_touches_the_broker(
    url: str, channel: str, tmp_path: Path, rabbitmq: RabbitMQ
) -> None:
    journal = tmp_path / "journal"
    with Driven(url, journal, channel=channel).start() as first:
        publish(url, channel, numbers(20))
        first.receive(20)
    left = json.loads(first.checkpoint[-1])["group"]
    shutil.rmtree(journal)
    publish(url, channel, numbers(5, 20))
    with (
        Proxy("127.0.0.1", rabbitmq.port if url.startswith("amqp") else int(url.rpartition(":")[2])) as proxy,
        Driven(_through(url, proxy), journal, first.checkpoint, channel=channel) as second,
        pytest.raises(DataLossError, match=rf"journalPath.*failOnDataLoss=false goes on .*{left}"),
    ):
        second.start()
    assert proxy.attempts == 0
    shutil.rmtree(journal)
    with Driven(url, journal, first.checkpoint, channel=channel, failOnDataLoss="false").start() as third:
        assert third.receive(5) == numbers(5, 20)


def test_two_sessions_with_messages_are_not_taken_for_one(url: str, channel: str, tmp_path: Path) -> None:
    with Driven(url, tmp_path / "one", channel=channel).start() as one:
        publish(url, channel, numbers(5))
        one.receive(5)
    with Driven(url, tmp_path / "two", channel=channel).start() as two:
        publish(url, channel, numbers(5, 5))
        two.receive(5)
    left, other = (json.loads(query.checkpoint[-1])["group"] for query in (one, two))
    options = {"channel": channel, "failOnDataLoss": "false"}
    with (
        Driven(url, tmp_path / "two", one.checkpoint, **options) as mixed,
        pytest.raises(JournalMismatchError, match=rf"{left}.*{other}.*set journalPath to an empty folder"),
    ):
        mixed.start()
    with Driven(url, tmp_path / "empty", one.checkpoint, **options).start() as recovered:
        assert recovered.receive(5) == numbers(5, 5)


def test_another_group_is_refused_because_the_broker_keeps_messages_for_the_one_before(
    url: str, channel: str, group: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with Driven(url, journal, channel=channel, group=group).start() as first:
        publish(url, channel, numbers(5))
        first.receive(5)
    publish(url, channel, numbers(5, 5))
    with (
        Driven(url, journal, first.checkpoint, channel=channel, group=f"{group}-2") as other,
        pytest.raises(JournalMismatchError, match=rf"{group}.*set group={group} .*adoptJournal=true"),
    ):
        other.start()
    with Driven(url, journal, first.checkpoint, channel=channel) as same:  # without the option it is the one before
        assert same.start().receive(5) == numbers(5, 5)


def test_more_receivers_do_not_leave_the_session_of_the_only_one(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    with Driven(mosquitto.url, journal, channel=channel).start() as one:
        publish(mosquitto.url, channel, numbers(5))
        one.receive(5)
    publish(mosquitto.url, channel, numbers(5, 5))
    with (
        Driven(mosquitto.url, journal, one.checkpoint, channel=channel, receivers="2") as two,
        pytest.raises(JournalMismatchError, match=r"set receivers=1"),
    ):
        two.start()
    # nothing was changed by the attempt
    with Driven(mosquitto.url, journal, one.checkpoint, channel=channel, receivers="1") as again:
        assert again.start().receive(5) == numbers(5, 5)


def _through(url: str, proxy: Proxy) -> str:
    scheme = url.partition("://")[0]
    login = "guest:guest@" if scheme == "amqp" else ""
    return f"{scheme}://{login}127.0.0.1:{proxy.port}"
