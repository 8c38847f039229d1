"""``messaging queue``: declaring, peeking at, purging and deleting queues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

import messaging
from messaging import Messaging
from messaging.testing.brokers import RabbitMQ
from messaging.testing.tables import table
from messaging.testing.waiting import PATIENCE
from tests.cli.conftest import Run, refused


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitMQ) -> str:
    return rabbitmq.url


@pytest.fixture
def name(m: Messaging) -> Iterator[str]:
    """The name of a queue, which is deleted after the test."""
    made = f"queue-{uuid4().hex[:8]}"
    yield made
    m.queues.declare(made, declare="passive").exception(PATIENCE)
    m.queues.delete(made).exception(PATIENCE)


def test_a_queue_is_declared_peeked_at_purged_and_deleted(
    run: Run, url: str, m: Messaging, topic: str, name: str
) -> None:
    code, out, err = run("queue", "declare", url, name, "-t", topic, "-t", f"{topic}/+", "-x", "maxLength=9")
    assert (code, out) == (0, "")
    assert f"queue '{name}' is declared at amqp://" in err
    m.publish(topic, {"n": 1}).result(PATIENCE)
    m.publish(f"{topic}/2", "two").result(PATIENCE)

    code, out, err = run("queue", "peek", url, name)
    assert (code, out) == (0, '{"n":1}\ntwo\n')
    assert f"2 messages of queue '{name}' were peeked at: they are marked as redelivered now" in err
    assert run("queue", "peek", url, name, "--max", "1", "-N", "-F", "%t %p")[1] == f'{topic} {{"n":1}}'
    assert run("queue", "peek", url, name, "-v")[1].splitlines()[1] == f"{topic}/2 two"
    code, out, _ = run("queue", "peek", url, name, "--json", "--quiet")
    first, second = map(json.loads, out.splitlines())
    assert (first["channel"], first["value"], second["payload"]) == (topic, {"n": 1}, "two")
    assert first["extensions"]["redelivered"] is True

    assert run("queue", "purge", url, name)[:2] == (0, "")
    assert json.loads(run("queue", "purge", url, name, "--json")[1]) == {"queue": name, "removed": 0}
    assert run("queue", "peek", url, name) == (0, "", "")
    m.publish(topic, "3").result(PATIENCE)
    assert json.loads(run("queue", "delete", url, name, "--if-unused", "--json")[1]) == {"queue": name, "deleted": 1}


def test_a_declared_queue_is_the_one_of_sub(run: Run, url: str, m: Messaging, topic: str, name: str) -> None:
    """With the same options, and a URL that sets the declaration, too."""
    with_priority = f"{url}{'&' if '?' in url else '?'}max_priority=3"
    options = ("-t", topic, "-x", "durable=false", "-x", "maxLength=9")
    assert run("queue", "declare", with_priority, name, *options)[0] == 0
    m.publish(topic, "kept").result(PATIENCE)
    assert run("sub", with_priority, "--queue", name, *options, "-C", "1")[:2] == (0, "kept\n")
    assert run("queue", "declare", with_priority, name, *options)[0] == 0
    assert "406 PRECONDITION_FAILED" in refused(run, "queue", "declare", url, name, *options, code=1)


def test_a_queue_that_is_in_use_or_not_empty_is_not_deleted_with_the_options(
    run: Run, url: str, m: Messaging, topic: str, name: str
) -> None:
    m.queues.declare(name, topic).result(PATIENCE)
    m.publish(topic, "x").result(PATIENCE)
    assert "not empty" in refused(run, "queue", "delete", url, name, "--if-empty", code=1)
    with m.subscribe(topic, queue=name):
        assert "in use" in refused(run, "queue", "delete", url, name, "--if-unused", code=1)


@table("command", ["peek", "purge", "delete"])
def test_an_unknown_or_exclusive_queue_is_1(run: Run, url: str, m: Messaging, topic: str, command: str) -> None:
    error = refused(run, "queue", command, url, "nonesuch", code=1)
    assert "queue 'nonesuch'" in error
    assert "404 NOT_FOUND" in error
    exclusive = f"exclusive-{topic[4:]}-{command}"
    with m.subscribe(topic, queue=exclusive, exclusive=True):
        assert "405 RESOURCE_LOCKED" in refused(run, "queue", command, url, exclusive, code=1)


@table(
    "arguments, expected",
    [
        (("purge",), "arguments are missing: URL NAME"),
        (("purge", "q"), "arguments are missing: URL NAME"),
        (("purge", "q", "q"), "has no '://'"),
        (("purge", "memory://queues"), "arguments are missing: URL NAME"),
        (("purge", "memory://queues", "a", "b"), "one argument more than URL NAME: 'b'"),
        (("delete", "memory://queues", "a/b"), "extension 'queue': must have no '/'"),
        (("peek", "memory://queues", "#"), "extension 'queue'"),
        (("declare", "memory://queues", ""), "extension 'queue'"),
        (("declare", "memory://queues", "q", "-t", "a/#/b"), "'#' must be the whole of the last level"),
        (("declare", "memory://queues", "q", "-x", "queue=p"), "queue is given twice"),
        (("declare", "memory://queues", "q", "-x", "priority=3"), "is for publishing"),
        (("declare", "memory://queues", "q", "-x", "nonesuch=3"), "declare() has no keyword 'nonesuch'"),
        (("declare", "memory://queues", "q", "-x", "maxPriorty=3"), "did you mean 'max_priority'"),
        (("peek", "memory://queues", "q", "--max", "0"), "--max"),
        (("peek", "memory://queues", "q", "--max", "1001"), "--max"),
        (("peek", "memory://queues", "q", "--json", "-v"), "--json and --verbose: give one of them"),
        (("peek", "memory://queues", "q", "-F", "%y"), "unknown sequence"),
        (("peek", "nonesuch://queues", "q"), "no adapter for nonesuch:// is installed"),
        (("purge", "memory://queues?like=mqtt5", "q"), "does not support 'queueAdministration'"),
        (("nonesuch", "memory://queues", "q"), "nonesuch"),
    ],
)
def test_wrong_command_lines_about_queues_are_one_line(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    found, out, err = run("queue", *arguments)
    assert (found, out) == (2, "")
    assert expected in err
    assert err.splitlines()[-1].startswith("messaging: error: ")


@table("command", ["declare", "peek", "purge", "delete"])
def test_mqtt_refuses_them_with_the_name_of_the_feature(run: Run, mosquitto_url: str, command: str) -> None:
    assert "does not support 'queueAdministration'" in refused(run, "queue", command, mosquitto_url, "q")


@pytest.fixture(scope="module")
def mosquitto_url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue("mosquitto").url
    return found


def test_no_broker_is_1(run: Run) -> None:
    assert "cannot connect" in refused(run, "queue", "purge", "amqp://127.0.0.1:1", "q", code=1)


def test_a_queue_in_memory_is_named_and_warned_of(run: Run) -> None:
    with messaging.connect("memory://queues") as m:
        assert run("queue", "declare", "memory://queues", "q", "-t", "a")[0] == 0
        m.publish("a", "x").result(PATIENCE)
        code, out, err = run("queue", "peek", "memory://queues", "q")
        assert (code, out) == (0, "x\n")
        assert "is a broker inside this process" in err
