"""``messaging events``: follow, publish and look up the events of an event network, and read past events."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from messaging.cli import options
from messaging.cli.connecting import BrokerOptions, identity, split, warn_of_memory
from messaging.cli.options import Grammar, NetworkOptions, argument, flag, option
from messaging.cli.output import LOOK, ExitCode, ReaderGoneError, is_reader_gone, write
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from messaging.cli.events_lines import Form
    from messaging.cli.events_network import Watcher

logger = logging.getLogger(__name__)

events = options.CommandGroup("events")


#: which events are written: those with data, or also the ends of sessions
EventType = Literal["data", "all"]

_Filters = Annotated[list[str] | None, argument("FILTER", "Topic filters, such as orders/**; default: every topic.")]
_Json = Annotated[bool, flag("--json", "Write each event as a JSON object on one line.")]
_Format = Annotated[
    str | None,
    option(
        "--format -F",
        "FORMAT",
        "text (the default), json, payload, or a format of sub: %t topic, %p data, %P sender and time, …",
        autocompletion=lambda: ("text", "json", "payload"),
    ),
]


def _qos_names() -> Iterable[str]:
    from messaging.distributedeventing.qos import STANDARD

    return STANDARD


@events.command()
def watch(
    broker: BrokerOptions,
    network: NetworkOptions,
    filters: _Filters = None,
    type_: Annotated[
        EventType, option("--type", "data|all", "data (the default), or all: session ends, too.", show_default=False)
    ] = "data",
    count: Annotated[int | None, options.count("End after N events.")] = None,
    timeout: Annotated[float | None, options.timeout("End that long after subscribing (see exit codes).")] = None,
    json: _Json = False,
    format_: _Format = None,
) -> int:
    """Write every event that arrives to stdout: time, topic, sender and data.

    Reports on stderr when the broker has subscribed it, and the other members know of it. Then no event is missed.
    Runs until interrupted, or until --count or --timeout is reached.

    Example: messaging events watch mqtt://localhost 'orders/**' --type all --json
    """
    from messaging.cli.events_lines import form_of
    from messaging.cli.events_network import Watcher, announce, grammar_of, joined, settings_of

    broker, topics = split(broker, filters or [])
    topics = topics or [network.everything]
    options.check_timeout(timeout)
    form = form_of(format_, json=json)
    watcher = Watcher(topics, network, grammar_of(network), with_ends=type_ == "all")
    settings_of(network)
    with broker.connect("events-watch") as m, joined(m, network, watcher) as node:
        watcher.node = node
        try:
            announce(node)
            logger.info("watching %s at %s", ", ".join(topics), identity(m))
            warn_of_memory(m)
            return _write_events(watcher, form, count, timeout)
        finally:
            watcher.close()


def _write_events(watcher: Watcher, form: Form, count: int | None, timeout: float | None) -> ExitCode:
    """Write events as they arrive; return the exit code.

    Raises:
        ReaderGoneError: the reader of stdout has closed it.
    """
    from messaging.cli.formats import UnformattableError

    deadline = None if timeout is None else time.monotonic() + timeout
    written = 0
    while count is None or written < count:
        left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
        if left <= 0:
            if count is None:
                return ExitCode.OK
            logger.warning("timeout: %d of %d events within %g s", written, count, timeout)
            return ExitCode.TIMED_OUT
        line = watcher.take(left)
        if line is None:
            if is_reader_gone():
                raise ReaderGoneError
            continue
        try:
            write(form(line))
            written += 1
        except UnformattableError as error:
            logger.warning("%s", error)
        if line.arrival is not None and line.arrival.notified is not None:
            line.arrival.notified()  # not before: a watcher that fails has not seen the event
    return ExitCode.OK


@events.command()
def publish(
    broker: BrokerOptions,
    network: NetworkOptions,
    topic: Annotated[str | None, argument("TOPIC", "Topic, without wildcards.")] = None,
    payload: Annotated[
        str | None, argument("PAYLOAD", "JSON, or text that does not begin like JSON; - for stdin.")
    ] = None,
    file: Annotated[Path | None, option("--file -f", "PATH", "Publish the content of a file.")] = None,
    text: Annotated[bool, flag("--text", "Publish the payload as text, even if it is JSON.")] = False,
    correlation_id: Annotated[str | None, option("--correlation-id", "ID", "Correlation id.")] = None,
    reply_to: Annotated[str | None, option("--reply-to", "TOPIC", "Topic for replies.")] = None,
    qos_names: Annotated[
        list[str] | None,
        option(
            "--qos -q", "NAME", "Such as AT_LEAST_ONCE or PERSISTENT (RFC 214). Repeatable.", autocompletion=_qos_names
        ),
    ] = None,
    notify: Annotated[bool, flag("--notify", "Wait until every consumer is notified, and name the members.")] = False,
    timeout: Annotated[float | None, options.timeout("How long --notify waits; default: 30.")] = None,
) -> int:
    """Publish an event, and wait for the broker's confirmation.

    Example: messaging events publish mqtt://localhost orders/placed '{"id": 7}' --notify
    """
    from messaging.cli.events_network import NOTIFYING, check_qos, data_of, grammar_of, publish_event, read_payload
    from messaging.dispatch.eventdata import WireEvent

    broker, words = split(broker, [each for each in (topic, payload) if each is not None])
    if not words:
        raise ArgumentError("no topic: messaging events publish URL TOPIC [PAYLOAD]")
    if len(words) > 2:
        raise ArgumentError("one argument more than TOPIC and PAYLOAD; quote a payload that has spaces")
    if timeout is not None and not notify:
        raise ArgumentError("--timeout goes with --notify: the setting timeout bounds the rest")
    options.check_timeout(timeout, most=86_400.0)
    grammar = grammar_of(network)
    grammar.check_topic(words[0])
    if reply_to is not None:
        grammar.check_topic(reply_to)
    qos = check_qos(qos_names or ())
    _ = broker.target  # a missing URL is an error before a file is opened
    data = data_of(read_payload(words[1] if len(words) > 1 else None, file), network.grammar, is_text=text)
    event = WireEvent(words[0], data, correlation_id=correlation_id, reply_to=reply_to)
    limit = (NOTIFYING if timeout is None else timeout) if notify else None
    return publish_event(broker, network, event, qos, limit)


@events.command()
def topics(broker: BrokerOptions, network: NetworkOptions, json: options.Json = False) -> int:
    """List the topics and topic filters of all members, with their publishers and consumers.

    Members list a topic after they published to it for the first time. Hidden topics are left out.

    Example: messaging events topics mqtt://localhost
    """
    from messaging.cli.events_network import show_topics

    return show_topics(broker, network, json=json)


@events.command()
def members(
    broker: BrokerOptions,
    network: NetworkOptions,
    json: options.Json = False,
    watch: Annotated[bool, flag("--watch", "Write a line for each change of a member, until interrupted.")] = False,
) -> int:
    """List the members of an event network: name, id, whether they are lost, what they want and publish.

    Example: messaging events members mqtt://localhost --watch
    """
    from messaging.cli.events_network import show_members, watch_members

    return (watch_members if watch else show_members)(broker, network, json=json)


@events.command()
def history(
    path: Annotated[str, argument("PATH", "Folder with the durable history of a typed event bus.")],
    filters: _Filters = None,
    since: Annotated[
        str | None, option("--since", "TIME|SEQUENCE", "From this time (ISO 8601) or sequence on, inclusive.")
    ] = None,
    limit: Annotated[int | None, option("--limit -n", "N", "Write at most N events.", min=1)] = None,
    follow: Annotated[bool, flag("--follow -f", "Go on with the events that are stored, until interrupted.")] = False,
    grammar: Annotated[
        Grammar,
        option(
            "--grammar",
            "typed|distributed",
            "Grammar of the filters: of Typed Event (the default), or of RFC 214.",
            show_default=False,
        ),
    ] = "typed",
    json: _Json = False,
    format_: _Format = None,
) -> int:
    """Write past events, also while another process stores more: sequence, time, topic and data.

    Example: messaging events history /var/lib/shop/history 'orders/*' --since 2025-10-09T08:00:00Z --json
    """
    from messaging.cli.events_lines import form_of, past_events, since_of
    from messaging.cli.events_network import grammar_of
    from messaging.cli.formats import write_formatted

    form = form_of(format_, json=json)
    found = past_events(
        path, filters or [], grammar_of(NetworkOptions(grammar=grammar)), since_of(since), follow=follow
    )
    write_formatted(itertools.islice(found, limit), form)
    return ExitCode.OK
