"""Who is measured, and how each is used: the usual way, per its own documentation.

``how`` is printed and saved with the results. Contenders that are not ``usual`` are other ways of using the same
library; they run with ``--peers all``, or when named.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Final

from benchmarks.peers import c_mqtt


@dataclass(frozen=True, slots=True)
class Contender:
    """A library, and a way of using it."""

    #: in ``--peers``, tables and results
    name: str
    #: of ``benchmarks.peers``
    module: str
    #: top-level package that must be installed
    package: str
    #: in words
    how: str
    #: how to publish, where there are several ways; see the peer's module
    style: str = ""
    #: event loop
    loop: str = "asyncio"
    #: whether it takes part unless others are named
    usual: bool = True

    @property
    def missing(self) -> str | None:
        """What has to be installed before it can run, if something has."""
        if self.module == "c_mqtt":
            try:
                c_mqtt.build()
            except RuntimeError as error:
                return str(error)
            return None
        for package in (self.package, "uvloop") if self.loop == "uvloop" else (self.package,):
            # kombu, once it is imported, is a module without a spec
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        if self.package == "pyspark" and shutil.which("java") is None and "JAVA_HOME" not in os.environ:
            return "Java is not installed"
        return None

    @property
    def command(self) -> list[str]:
        """The command line, up to the role."""
        if self.module == "c_mqtt":
            return [str(c_mqtt.build())]
        return [sys.executable, "-m", f"benchmarks.peers.{self.module}"]

    @property
    def options(self) -> list[str]:
        """What this contender adds to the command line."""
        return ["--style", self.style, "--loop", self.loop]


#: the one the others are compared with
OURS: Final = "ours"

MQTT: Final = (
    Contender(OURS, "ours", "messaging", "publisher.publish, a window of promises; an observer", "mqtt"),
    Contender("paho", "paho", "paho", "loop_start, a window of publishes, on_message"),
    Contender("aiomqtt", "aiomqtt", "aiomqtt", "each publish awaited, async for over the messages"),
    Contender("gmqtt", "gmqtt", "gmqtt", "publish in a loop, on_message; uvloop, as in its README", loop="uvloop"),
    Contender(
        "faststream",
        "faststream_mqtt",
        "zmqtt",
        "each publish awaited, a handler; uvloop, as its command",
        loop="uvloop",
    ),
    Contender("c", "c_mqtt", "", "libmosquitto, one thread, a window of publishes: the limit"),
    Contender("ours-awaited", "ours", "messaging", "asyncio, each publish awaited", "mqtt-awaited", usual=False),
    Contender(
        "ours-buffered", "ours", "messaging", "as ours, with a buffer of 64 Ki messages", "mqtt-buffered", usual=False
    ),
    Contender("paho-awaited", "paho", "paho", "loop_start, wait_for_publish each", "awaited", usual=False),
    Contender("aiomqtt-gathered", "aiomqtt", "aiomqtt", "publishes gathered by ten", "gathered", usual=False),
    Contender("aiomqtt-uvloop", "aiomqtt", "aiomqtt", "as aiomqtt, on uvloop", loop="uvloop", usual=False),
    Contender("gmqtt-asyncio", "gmqtt", "gmqtt", "publish in a loop, on_message; asyncio's loop", usual=False),
    Contender(
        "faststream-gathered",
        "faststream_mqtt",
        "zmqtt",
        "publishes gathered by the window; uvloop",
        "gathered",
        "uvloop",
        usual=False,
    ),
    Contender("faststream-asyncio", "faststream_mqtt", "zmqtt", "as faststream, on asyncio's loop", usual=False),
)

AMQP: Final = (
    Contender(OURS, "ours", "messaging", "publisher.publish, a window of promises; an observer", "amqp"),
    Contender("aio-pika", "aio_pika", "aio_pika", "publishes gathered by the window; a callback that acknowledges"),
    Contender("pika", "pika_select", "pika", "SelectConnection, a window of publishes; on_message, basic_ack"),
    Contender("kombu", "kombu", "kombu", "py-amqp, confirm_publish; a consumer that acknowledges"),
    Contender(
        "faststream",
        "faststream_rabbit",
        "faststream",
        "each publish awaited, a handler; uvloop, as its command",
        loop="uvloop",
    ),
    Contender("ours-awaited", "ours", "messaging", "asyncio, each publish awaited", "amqp-awaited", usual=False),
    Contender("aio-pika-awaited", "aio_pika", "aio_pika", "each publish awaited", "awaited", usual=False),
    Contender("aio-pika-uvloop", "aio_pika", "aio_pika", "as aio-pika, on uvloop", loop="uvloop", usual=False),
    Contender(
        "faststream-gathered",
        "faststream_rabbit",
        "faststream",
        "publishes gathered by the window; uvloop",
        "gathered",
        "uvloop",
        usual=False,
    ),
    Contender("faststream-asyncio", "faststream_rabbit", "faststream", "as faststream, on asyncio's loop", usual=False),
)

#: who asks and answers; without those that have no way of doing it but what is written by hand for another already
REQUESTS_MQTT: Final = (
    Contender(OURS, "ours", "messaging", "publish_with_reply awaited by as many tasks; m.reply", "mqtt"),
    Contender("ours-threads", "ours", "messaging", "promises with callbacks, from one thread; m.reply", "mqtt-threads"),
    Contender("paho", "paho", "paho", "by hand: response topic, correlation data, callbacks from one thread"),
    Contender("paho-nodelay", "paho", "paho", "the same, with TCP_NODELAY set on the socket", "nodelay"),
    Contender("faststream", "faststream_mqtt", "zmqtt", "broker.request by as many tasks; uvloop", loop="uvloop"),
    Contender("faststream-asyncio", "faststream_mqtt", "zmqtt", "as faststream, on asyncio's loop", usual=False),
)

REQUESTS_AMQP: Final = (
    Contender(OURS, "ours", "messaging", "publish_with_reply awaited by as many tasks; m.reply", "amqp"),
    Contender("ours-threads", "ours", "messaging", "promises with callbacks, from one thread; m.reply", "amqp-threads"),
    Contender("aio-pika-direct", "aio_pika", "aio_pika", "by hand: direct reply-to, futures, as many tasks", "direct"),
    Contender(
        "aio-pika-queue", "aio_pika", "aio_pika", "by hand: a queue for replies, futures, as many tasks", "queue"
    ),
    Contender(
        "faststream", "faststream_rabbit", "faststream", "broker.request by as many tasks; uvloop", loop="uvloop"
    ),
    Contender(
        "aio-pika-unconfirmed",
        "aio_pika",
        "aio_pika",
        "as aio-pika-direct, without publisher confirms",
        "direct-unconfirmed",
        usual=False,
    ),
    Contender(
        "aio-pika-uvloop", "aio_pika", "aio_pika", "as aio-pika-direct, on uvloop", "direct", "uvloop", usual=False
    ),
    Contender("faststream-asyncio", "faststream_rabbit", "faststream", "as faststream, on asyncio's loop", usual=False),
)


#: event buses within a process
EVENTS: Final = (
    Contender(OURS, "events", "messaging", "TypedEventBus.deliver: asynchronous, ordered", "typed"),
    Contender("ours-post", "events", "messaging", "EventAdmin.post_event: asynchronous, ordered", "post"),
    Contender("ours-send", "events", "messaging", "EventAdmin.send_event: synchronous", "send"),
    Contender("blinker", "events", "blinker", "a signal for each topic: synchronous", "blinker"),
    Contender("pypubsub", "events", "pubsub", "pub.sendMessage: synchronous", "pypubsub"),
    Contender("pyee", "events", "pyee", "EventEmitter.emit: synchronous", "pyee"),
    Contender("subject", "events", "reactivex", "a bare Subject for each topic: synchronous", "subject"),
    Contender("bubus", "events", "bubus", "EventBus.dispatch, awaited: asynchronous, ordered", "bubus"),
    Contender("ipopo-post", "events", "pelix", "EventAdmin.post, one thread: asynchronous, ordered", "ipopo-post"),
    Contender("ipopo-send", "events", "pelix", "EventAdmin.send: synchronous", "ipopo-send"),
)

#: events between two processes
_RAW: Final = "publisher.publish and an observer: messages, no events"
DISTRIBUTED_MQTT: Final = (
    Contender(OURS, "distributed", "messaging", "DistributedEventAdmin.publish_event; a consumer", "admin-mqtt"),
    Contender("bus", "distributed", "messaging", "TypedEventBus.connect, deliver; a handler", "bus-mqtt"),
    Contender("raw", "ours", "messaging", _RAW, "mqtt"),
    Contender("ipopo", "distributed", "pelix", "EventAdmin.send, its MQTT bridge; a handler", "ipopo"),
)
DISTRIBUTED_AMQP: Final = (
    Contender(OURS, "distributed", "messaging", "DistributedEventAdmin.publish_event; a consumer", "admin-amqp"),
    Contender("bus", "distributed", "messaging", "TypedEventBus.connect, deliver; a handler", "bus-amqp"),
    Contender("raw", "ours", "messaging", _RAW, "amqp"),
)

#: remote events, within a process and between two
REMOTE: Final = (
    Contender(OURS, "remote", "messaging", "EventGenerator.generate, and a listener", "events"),
    Contender("requests", "remote", "messaging", "promises with callbacks, from one thread; m.reply", "requests"),
)
REMOTE_DURABLE: Final = (
    *REMOTE,
    Contender("journal", "remote", "messaging", "Journal.append from 64 threads, fsync always", "journal"),
)

#: durable appends
JOURNAL: Final = (
    Contender(OURS, "journal", "messaging", "Journal.append, fsync always: group commit", "ours"),
    Contender("sqlite", "journal", "sqlite3", "WAL, synchronous=FULL, one connection, a lock", "sqlite"),
    Contender("persist-queue", "journal", "persistqueue", "SQLiteQueue.put, auto_commit: WAL, FULL", "persist-queue"),
    Contender(
        "sqlite-connections", "journal", "sqlite3", "as sqlite, a connection for each thread", "sqlite-connections",
        usual=False,
    ),
)  # fmt: skip

#: Spark reads what a journal holds
SPARK_BATCH: Final = (
    Contender(OURS, "spark", "pyspark", "spark.read of the journal, 8 tasks", "messaging"),
    Contender("arrow", "spark", "pyspark", "Python data source: one record batch of 16,384, over and over", "arrow"),
    Contender("tuples", "spark", "pyspark", "Python data source: tuples, over and over", "tuples"),
    Contender("rate", "spark", "pyspark", "Spark's rate-micro-batch source, the same columns: no Python", "rate"),
)
_SPARK: Final = Contender(OURS, "spark", "pyspark", "a streaming query; a row counts when committed", "messaging")
_ADAPTER: Final = Contender("adapter", "spark", "messaging", "without Spark: subscribe, an observer", "adapter")
_SIMPLE: Final = Contender(
    "simple", "spark", "pyspark", "SimpleDataSourceStreamReader over paho: a deque, tuples of six", "simple"
)
#: and what comes from a broker: by whom it can be read
SPARK_MQTT: Final = (_SPARK, _ADAPTER, _SIMPLE)
SPARK_AMQP: Final = (_SPARK, _ADAPTER)
SPARK_LATENCY: Final = (_SPARK, _SIMPLE)


def names() -> set[str]:
    """Of everybody."""
    spark = (*SPARK_BATCH, *SPARK_MQTT)
    return {
        each.name
        for part in (MQTT, AMQP, REQUESTS_MQTT, REQUESTS_AMQP, EVENTS, DISTRIBUTED_MQTT, REMOTE_DURABLE, JOURNAL, spark)
        for each in part
    }


def choose(known: tuple[Contender, ...], names: list[str] | None) -> list[Contender]:
    """Those named; all for ``all``, the usual ones for ``None``. Names that are not known here are left out."""
    if names is None:
        return [each for each in known if each.usual]
    return [each for each in known if each.name in names or "all" in names]
