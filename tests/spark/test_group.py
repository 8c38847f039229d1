"""A query finds the messages that the broker keeps for it, or fails before it receives any; one query has a group."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import messaging
from messaging.errors import TakenOverError
from messaging.testing.proxy import Proxy
from messaging.testing.tables import table
from messaging.testing.waiting import eventually
from pyspark_messaging.errors import DataLossError, JournalMismatchError
from pyspark_messaging.read import group_lock
from pyspark_messaging.read.group_lock import lock_group, started_earlier
from tests.mqtt.peer import Peer
from tests.spark.harness import make_queue, numbers, publish, unique
from tests.spark.readers import Driven, processed, refused

if TYPE_CHECKING:
    from pathlib import Path

    from messaging.testing.brokers import Mosquitto, RabbitMQ


@pytest.fixture
def group() -> str:
    return unique("group")


def failure(query: Driven) -> Exception | None:
    """Return the error that ended the receivers of ``query``, which starts unless it has."""

    def fails() -> bool:
        if not query.checkpoint:
            query.start()
        return query.micro_batch() and False

    with pytest.raises(TakenOverError) as caught:
        eventually(fails, "the query to fail")
    return caught.value


# --- a journal that was lost


def test_a_query_whose_journal_was_deleted_receives_the_messages_of_the_broker(
    url: str, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    first = processed(numbers(20), url, journal, channel=channel)
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
    first = processed(numbers(20), url, journal, channel=channel)
    left = json.loads(first.checkpoint[-1])["group"]
    shutil.rmtree(journal)
    publish(url, channel, numbers(5, 20))
    with Proxy("127.0.0.1", urlsplit(url).port or 0) as proxy:
        problem = rf"journalPath.*failOnDataLoss=false goes on .*{left}"
        refused(DataLossError, problem, _through(url, proxy), journal, first.checkpoint, channel=channel)
    assert proxy.attempts == 0
    shutil.rmtree(journal)
    with Driven(url, journal, first.checkpoint, channel=channel, failOnDataLoss="false").start() as third:
        assert third.receive(5) == numbers(5, 20)


def test_two_sessions_with_messages_are_refused(url: str, channel: str, tmp_path: Path) -> None:
    one = processed(numbers(5), url, tmp_path / "one", channel=channel)
    two = processed(numbers(5, 5), url, tmp_path / "two", channel=channel)
    left, other = (json.loads(query.checkpoint[-1])["group"] for query in (one, two))
    options = {"channel": channel, "failOnDataLoss": "false"}
    problem = rf"{left}.*{other}.*set journalPath to an empty folder"
    refused(JournalMismatchError, problem, url, tmp_path / "two", one.checkpoint, **options)
    with Driven(url, tmp_path / "empty", one.checkpoint, **options).start() as recovered:
        assert recovered.receive(5) == numbers(5, 5)


def test_another_group_is_refused_because_the_broker_keeps_messages_for_the_one_before(
    url: str, channel: str, group: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    first = processed(numbers(5), url, journal, channel=channel, group=group)
    publish(url, channel, numbers(5, 5))
    options = {"channel": channel, "group": f"{group}-2"}
    problem = rf"{group}.*set group={group} .*adoptJournal=true"
    refused(JournalMismatchError, problem, url, journal, first.checkpoint, **options)
    with Driven(url, journal, first.checkpoint, channel=channel) as same:  # without the option it is the one before
        assert same.start().receive(5) == numbers(5, 5)


def test_more_receivers_do_not_leave_the_session_of_the_only_one(
    mosquitto: Mosquitto, channel: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    one = processed(numbers(5), mosquitto.url, journal, channel=channel)
    publish(mosquitto.url, channel, numbers(5, 5))
    options = {"channel": channel, "receivers": "2"}
    refused(JournalMismatchError, "set receivers=1", mosquitto.url, journal, one.checkpoint, **options)
    # nothing was changed by the attempt
    with Driven(mosquitto.url, journal, one.checkpoint, channel=channel, receivers="1") as again:
        assert again.start().receive(5) == numbers(5, 5)


# --- two queries with one group


@pytest.mark.parametrize(
    ("server", "receivers", "machines"), [("mosquitto", "1", "one"), ("rabbitmq", "1", "one"), ("rabbitmq", "2", "two")]
)
def test_a_second_query_of_a_group_ends_and_the_first_continues(
    request: pytest.FixtureRequest, channel: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    server: str, receivers: str, machines: str,
) -> None:  # fmt: skip
    url = request.getfixturevalue(server).url
    where = ".*on this machine"
    if machines == "two":
        request.getfixturevalue("elsewhere")
        where = ""
    options = {"channel": channel, "group": group, "receivers": receivers}
    with Driven(url, tmp_path / "one", **options).start() as first:
        with monkeypatch.context() as patched:
            patched.setattr(group_lock, "LOCK_SECONDS", 0.3)
            patched.setattr(group_lock, "QUEUE_SECONDS", 0.3)
            refused(TakenOverError, rf"option 'group' \({group}\){where}", url, tmp_path / "two", **options)
        publish(url, channel, numbers(20))
        assert sorted(first.receive(20)) == sorted(numbers(20))
    with Driven(url, tmp_path / "two", **options) as second:  # it is free again
        second.start()


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_of_two_queries_that_take_a_session_from_each_other_the_later_one_ends(
    mosquitto: Mosquitto, channel: str, group: str, tmp_path: Path, elsewhere: None, version: str
) -> None:
    options = {"channel": channel, "group": group, "version": version, "reconnect_max": "0.2"}
    with (
        Driven(mosquitto.url, tmp_path / "one", **options).start() as first,
        Driven(mosquitto.url, tmp_path / "two", **options) as second,
    ):
        assert f"option 'group' ({group}): a query that started earlier" in str(failure(second))
        publish(mosquitto.url, channel, numbers(20))
        assert set(numbers(20)) <= set(first.receive(20))
        first.micro_batch()  # would raise


def test_a_query_whose_broker_says_that_its_session_was_taken_over_ends(
    channel: str, group: str, tmp_path: Path
) -> None:
    async def taken_over() -> None:
        async with Peer() as broker:
            with Driven(broker.url, tmp_path, channel=channel, group=group) as query:
                starting = asyncio.create_task(asyncio.to_thread(query.start))
                connection, _ = await broker.accept()
                connection.connack()
                await connection.suback(1)
                await starting
                connection.send(0xE0, b"\x8e\x00")  # DISCONNECT: session taken over
                error = await asyncio.to_thread(failure, query)
                assert f"option 'group' ({group}): another query connected" in str(error)
                await connection.end()  # the query leaves the session alone

    asyncio.run(taken_over())


@table("payload", [b"", b"{", b"[1]", b'[1, "a"]', b'["a", 1.0]', b"[" * 5000, b'[9e9, "a"]'])
def test_other_payloads_on_the_channel_end_no_query(payload: bytes) -> None:
    assert not started_earlier(payload, (1_700_000_000.0, "a"))


def test_a_query_that_loses_its_queue_to_another_while_it_is_disconnected_ends(
    rabbitmq: RabbitMQ, channel: str, group: str, tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_lock, "REGAIN_SECONDS", 0.3)
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        options = {"channel": channel, "group": group}
        with Driven(_through(rabbitmq.url, proxy), tmp_path / "one", reconnect_max="0.2", **options).start() as first:
            proxy.refuse()
            proxy.sever()
            with Driven(rabbitmq.url, tmp_path / "two", **options).start() as second:
                proxy.accept()
                failure(first)
                publish(rabbitmq.url, channel, numbers(20))
                assert second.receive(20) == numbers(20)


def test_a_query_that_was_disconnected_gets_its_queue_again(
    rabbitmq: RabbitMQ, channel: str, group: str, tmp_path: Path, elsewhere: None
) -> None:
    with Proxy(rabbitmq.host, rabbitmq.port) as proxy:
        url = _through(rabbitmq.url, proxy)
        with Driven(url, tmp_path / "one", channel=channel, group=group, reconnect_max="0.2").start() as query:
            proxy.sever()
            publish(rabbitmq.url, channel, numbers(20))
            assert query.receive(20) == numbers(20)
            eventually(lambda: f"{group}.owner" in rabbitmq.ctl("list_queues", "name"), "the exclusive queue")
            query.micro_batch()  # would raise


def test_queries_with_a_queue_of_the_users_own_share_it(
    rabbitmq: RabbitMQ, channel: str, group: str, tmp_path: Path
) -> None:
    with messaging.connect(rabbitmq.url) as m:
        make_queue(m, channel)
    options = {"queue": channel, "group": group}
    with (
        Driven(rabbitmq.url, tmp_path / "one", **options).start() as one,
        Driven(rabbitmq.url, tmp_path / "two", **options).start() as two,
    ):
        publish(rabbitmq.url, channel, numbers(20))

        def all_there() -> bool:
            one.micro_batch()
            two.micro_batch()
            return sorted(one.values + two.values) == sorted(numbers(20))

        eventually(all_there, "both to share the queue")


def test_the_lock_of_a_group_waits_for_a_query_that_is_stopping(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lock, "LOCK_SECONDS", 0.0)
    held = lock_group("mqtt://host", group)
    other = lock_group("mqtt://other", group)
    with pytest.raises(TakenOverError):
        lock_group("mqtt://host", group)
    held.close()
    lock_group("mqtt://host", group).close()
    other.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Queries do not see the lock files of each other, as on two machines."""
    machines = iter(range(100))

    def folder() -> Path:
        made = tmp_path / f"machine-{next(machines)}"
        made.mkdir()
        return made

    monkeypatch.setattr(group_lock, "lock_folder", folder)


def _through(url: str, proxy: Proxy) -> str:
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{credentials}{at}127.0.0.1:{proxy.port}").geturl()
