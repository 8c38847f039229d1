"""Put faults into the product, one at a time, and see that the fast tests notice each: ``python -m tests.mutations``.

Each fault changes one place of a copy of the project, and the tests of its room run there until the first failure. A
fault that no test notices is named, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.house import ROOT, say

#: of one run of tests, seconds; tests that hang have noticed the fault, too
LIMIT = 600.0
#: a line of pytest's summary that names a test; "ERROR" without one is a module that cannot be collected, or a log line
FAILED = re.compile(r"^(?:FAILED|ERROR) \S+\.py::.*", re.MULTILINE)
COPIED = (
    *("messaging", "adapters", "tests", "docs", "examples", "benchmarks", "docker"),
    *("pyproject.toml", "README.md", "Makefile", ".ci"),
)


class Fault(NamedTuple):
    """A change of the product, and the tests that have to notice it.

    Attributes:
        name: what goes wrong.
        file: of the product.
        before, after: the text to replace, which stands there once, and its replacement.
        tests: arguments of pytest.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


MEMORY = "messaging/testing/conformance --backend memory"

FAULTS = (
    # receiving
    Fault(
        "an acknowledgement is lost",
        "messaging/receiving/settlement.py",
        "self._adapter.acknowledge([incoming.token for incoming in accepted])",
        "self._adapter.acknowledge([incoming.token for incoming in accepted][1:])",
        "tests/receiving",
    ),
    Fault(
        "a message can be settled twice",
        "messaging/receiving/settlement.py",
        "                if incoming.state is not _RECEIVED:\n"
        "                    return False\n"
        "                verdicts.append(incoming)",
        "                verdicts.append(incoming)",
        "tests/receiving",
    ),
    Fault(
        "dropped messages are not counted",
        "messaging/receiving/buffer.py",
        "        self._counters.dropped += 1\n        if victim.token is not None:",
        "        if victim.token is not None:",
        "tests/receiving",
    ),
    Fault(
        "a caller that begins to wait is not told of a message",
        "messaging/receiving/subscription.py",
        "        buffer.add(batch)\n"
        "        if not settlement.is_gathering:\n"
        "            settlement.gather()\n"
        "        # after the messages: one that is set meanwhile, on another thread, has looked for them before\n"
        "        if (consumer := self.consumer) is not None:",
        "        consumer = self.consumer\n"
        "        buffer.add(batch)\n"
        "        if not settlement.is_gathering:\n"
        "            settlement.gather()\n"
        "        if consumer is not None:",
        "tests/receiving/test_stream.py",
    ),
    Fault(
        "a rejected message goes behind the others although the order is guaranteed",
        "messaging/receiving/buffer.py",
        "            self.messages.appendleft(incoming)",
        "            self.messages.append(incoming)",
        f"tests/receiving {MEMORY}",
    ),
    Fault(
        "a dead letter is acknowledged without being published",
        "messaging/receiving/redelivery.py",
        "        publish()\n\n    def _is_held",
        "        self._acknowledge(incoming)\n\n    def _is_held",
        f"tests/receiving {MEMORY}",
    ),
    Fault(
        "a redelivered message is not marked",
        "messaging/receiving/redelivery.py",
        '{**incoming.extensions, "redelivered": True}',
        "{**incoming.extensions}",
        f"tests/receiving {MEMORY}",
    ),
    Fault(
        "the inbox forgets no id",
        "messaging/receiving/deduplication.py",
        "while ids and (len(ids) > self._most or next(iter(ids.values())) <= oldest):",
        "while False:",
        "tests/receiving",
    ),
    # publishing
    Fault(
        "the outbox has no bound of messages",
        "messaging/publishing/sending.py",
        "        return self._accepted - self.settled < self._max_messages and (",
        "        return True or (",
        "tests/publishing",
    ),
    Fault(
        "an unknown outcome is told as a definite one",
        "messaging/publishing/outbox.py",
        '                self.fail(entry, OutcomeUnknownError(f"{entry.what}: {why}"))',
        '                self.fail(entry, DeadlineError(f"{entry.what}: {why}"))',
        f"tests/publishing {MEMORY}",
    ),
    Fault(
        "closing leaves promises pending",
        "messaging/publishing/outbox.py",
        '            self.fail(entry, entry.unfinished("the instance was closed"))',
        "            pass",
        "tests/publishing tests/instance",
    ),
    Fault(
        "a dead letter of the durable outbox is not kept",
        "messaging/publishing/dead_letters.py",
        "            if self._journal.add_dead_letter(record, reason, most=_DEAD_LETTERS):",
        "            if False:",
        "tests/publishing",
    ),
    # requests and replies
    Fault(
        "requests have no bound",
        "messaging/replyto/requests.py",
        "                if len(self.open) >= self._limit:",
        "                if False:",
        f"tests/replyto {MEMORY}",
    ),
    Fault(
        "two requests share a correlation id",
        "messaging/replyto/requests.py",
        "            if self.awaited.setdefault(request.key, request) is not request:\n",
        "            self.awaited[request.key] = request\n            if False:\n",
        f"tests/replyto {MEMORY}",
    ),
    # memory
    Fault(
        "an expired message is delivered",
        "adapters/messaging_adapters/memory/queues.py",
        "            if entry[5] is None or not is_expired(entry):\n                take(entry)",
        "            take(entry)",
        f"tests/memory {MEMORY}",
    ),
    Fault(
        "unsettled messages are lost with their consumer",
        "adapters/messaging_adapters/memory/broker.py",
        "            for entry in reversed(consumer.unsettled.values()):\n                queue.push_again(entry)\n",
        "",
        f"tests/memory {MEMORY}",
    ),
    Fault(
        "a retained message cannot be removed",
        "adapters/messaging_adapters/memory/broker.py",
        "            self._retained.pop(key, None)",
        "            pass",
        f"tests/memory {MEMORY}",
    ),
    # MQTT
    Fault(
        "the broker's copy of a message is delivered twice",
        "adapters/messaging_adapters/mqtt/answers.py",
        "        receipt = self._open.get(publish.id) or self._held.get(publish.id)\n"
        "        if receipt is None:\n"
        "            return False",
        "        receipt = None\n        if receipt is None:\n            return False",
        "tests/mqtt",
    ),
    Fault(
        "a PUBREL is not answered",
        "adapters/messaging_adapters/mqtt/answers.py",
        "            self._transport.answer(packets.acknowledgement(packets.PUBCOMP, packet_id))",
        "            pass",
        "tests/mqtt",
    ),
    Fault(
        "a message is answered while a copy is unsettled",
        "adapters/messaging_adapters/mqtt/answers.py",
        "        if not receipt.copies:\n            self.settled(receipt)",
        "        self.settled(receipt)",
        "tests/mqtt",
    ),
    # AMQP
    Fault(
        "a refused message counts as confirmed",
        "adapters/messaging_adapters/amqp/publish_channels.py",
        "                if method == frames.BASIC_ACK:",
        "                if True:",
        "tests/amqp",
    ),
    Fault(
        "a confirm of several messages settles one",
        "adapters/messaging_adapters/amqp/publish_channels.py",
        "            tags: Iterable[int] = range(self._lowest, last + 1)",
        "            tags: Iterable[int] = range(last, last + 1)",
        "tests/amqp",
    ),
    Fault(
        "the prefetch is not sent",
        "adapters/messaging_adapters/amqp/consumer.py",
        "        await wire.command(channel.set_qos(self._spec.options.prefetch), methods.Basic.Qos)\n",
        "",
        "tests/amqp messaging/testing/conformance/test_subscriptions.py "
        "messaging/testing/conformance/test_acknowledge.py --backend amqp",
    ),
    # journal
    Fault(
        "a commit does not sync",
        "messaging/journal/commit.py",
        '        sync = self._fsync == "always"',
        "        sync = False",
        "tests/journal",
    ),
    Fault(
        "a full journal drops records silently",
        "messaging/journal/commit.py",
        "        self._refuse([entry for entry in batch if len(entry.record) >= needed], error)",
        "        [entry.note_stored(0) for entry in batch if len(entry.record) >= needed]\n        self._note_batch()",
        "tests/journal",
    ),
    # values
    Fault(
        "a decompressed payload has no bound",
        "messaging/codecs/encodings.py",
        "            if len(expanded) > limit:",
        "            if False:",
        "tests/codecs",
    ),
    Fault(
        "credentials show their password",
        "messaging/model/credentials.py",
        "return f\"Credentials({self.username!r}, '***'{expiry})\"",
        'return f"Credentials({self.username!r}, {self.password.get_secret_value()!r}{expiry})"',
        "tests/model tests/instance",
    ),
    Fault(
        "a URL shows its password",
        "messaging/model/url.py",
        '(":***" if self.password is not None else "")',
        '(f":{self.password}" if self.password is not None else "")',
        "tests/model tests/instance",
    ),
    # events
    Fault(
        "the history exceeds its capacity",
        "messaging/typedevent/history.py",
        "        while self._count > self.capacity and self._spare:",
        "        while False:",
        "tests/typedevent",
    ),
    Fault(
        "a guaranteed event of the history is dropped",
        "messaging/typedevent/history.py",
        "self.policy = policy",
        "self.policy = RangePolicy(0, policy.maximum)",
        "tests/typedevent",
    ),
    Fault(
        "a posted event reaches a handler that lost its permission",
        "messaging/eventadmin/admin_handler.py",
        "            dispatcher.policy is None or "
        "dispatcher.may(self.terms.principal, TopicPermission.SUBSCRIBE, event.topic)",
        "            True",
        "tests/eventadmin",
    ),
    Fault(
        "a filter of one level matches several",
        "messaging/dispatch/topics.py",
        '_EXPRESSIONS: Final = {SINGLE_LEVEL: "[^/]+"',
        '_EXPRESSIONS: Final = {SINGLE_LEVEL: ".+"',
        "tests/dispatch",
    ),
    Fault(
        "events without acknowledgement pile up without a bound",
        "messaging/dispatch/eventnetwork/intake.py",
        "        if self._admitted - self._taken >= MAX_UNACKNOWLEDGED or size > MAX_UNACKNOWLEDGED_BYTES:",
        "        if False:",
        "tests/dispatch/eventnetwork tests/distributedeventing",
    ),
    # remote events and leases
    Fault(
        "a failing event is dropped at once",
        "messaging/remoteevent/delivery.py",
        "        if self._policy.is_exhausted(self._failures, now - self._failing_since):",
        "        if True:",
        "tests/remoteevent",
    ),
    Fault(
        "an expired lease is renewed",
        "messaging/leases/landlord.py",
        "                if lease is None or lease.is_expired:\n"
        "                    outcomes.append(self._unknown(lease_id))\n"
        "                    continue\n"
        "                lease.note_granted(asked, granted)",
        "                if lease is None:\n"
        "                    outcomes.append(self._unknown(lease_id))\n"
        "                    continue\n"
        "                lease.note_granted(asked, granted)",
        "tests/leases",
    ),
    Fault(
        "a suspended lease counts as gone",
        "messaging/leases/landlord.py",
        "        if self.is_closed or self._suspended.get(lease_id, -math.inf) > lease_time():",
        "        if self.is_closed:",
        "tests/leases tests/remoteevent",
    ),
    # gateway and outbox
    Fault(
        "a stored message is not acknowledged at its source",
        "messaging/gateway/buffer.py",
        "                source.settle(True)\n        stored.sources",
        "                pass\n        stored.sources",
        "tests/gateway",
    ),
    Fault(
        "messages that were not taken are lost",
        "messaging/gateway/drain.py",
        "        self._queue.put_back(again)",
        "        pass",
        "tests/gateway",
    ),
    Fault(
        "an expired message leaves the buffer of a gateway",
        "messaging/gateway/buffer.py",
        "                self._max_age is not None and journal.ages.age_of(",
        "                False and journal.ages.age_of(",
        "tests/gateway",
    ),
    Fault(
        "two relays claim a row of the outbox",
        "messaging/outbox/sql/claims.py",
        "        is_free = or_(lease.c.owner.is_(None), lease.c.until <= now)",
        "        is_free = or_(lease.c.owner.is_(None), lease.c.until <= now, lease.c.until > now)",
        "tests/outbox",
    ),
    # tools
    Fault(
        "a value of Sparkplug counts although a message before it is missing",
        "messaging/sparkplug/decoder.py",
        "        elif reason is not None:",
        "        elif False:",
        "tests/sparkplug",
    ),
    Fault(
        "attributes of a CloudEvent have no bound",
        "messaging/cloudevents/attributes.py",
        "    if len(attributes) > MAX_ATTRIBUTES:",
        "    if False:",
        "tests/cloudevents",
    ),
    Fault(
        "a request of the command line that fails exits with 0",
        "messaging/cli/app.py",
        "            return ExitCode.USAGE if isinstance(error, _BAD_INPUT) else ExitCode.FAILED",
        "            return ExitCode.OK",
        "tests/cli",
    ),
    Fault(
        "a transaction commits although a participant voted to abort",
        "messaging/remoteevent/transactions/two_phases.py",
        "        elif enlisted.vote is Vote.ABORTED:",
        "        elif False:",
        "tests/remoteevent/test_transactions.py",
    ),
    Fault(
        "a replayed message is taken in again",
        "messaging/dispatch/eventnetwork/seals.py",
        '            return "replayed"',
        "            return None",
        "tests/dispatch/eventnetwork tests/distributedeventing",
    ),
    Fault(
        "a program whose engine hangs is healthy",
        "messaging/observability/endpoint.py",
        "    if flag.wait(limit):",
        "    if flag.wait(limit) or True:",
        "tests/observability",
    ),
    Fault(
        "a row that was not confirmed counts as written",
        "adapters/pyspark_messaging/write.py",
        "        if error is not None:\n            self._fail(self._settled, error)",
        "        if False:\n            self._fail(self._settled, error)",
        "tests/spark/test_write.py",
    ),
    Fault(
        "a worker's job that raises ends its thread",
        "messaging/environment/signals.py",
        "    except BaseException as error:  # noqa: BLE001  # for the caller",
        "    except ZeroDivisionError as error:",
        "tests/execution",
    ),
)


def put(fault: Fault, root: Path) -> None:
    """Put ``fault`` into the copy at ``root``.

    Raises:
        ValueError: its text does not stand in its file exactly once.
    """
    file = root / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(
            f"{fault.file}: the text of the fault {fault.name!r} stands there {text.count(fault.before)} times"
        )
    file.write_text(text.replace(fault.before, fault.after), encoding="utf-8")


def copy(folder: Path) -> Path:
    """Return a copy of the project in ``folder``."""
    root = folder / "project"
    root.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    return root


def noticed(fault: Fault, processes: int) -> str | None:
    """Return the first test that fails with ``fault``, or ``None``."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        put(fault, root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "not slow"]
        command += ["--numprocesses", str(processes), *fault.tests.split()]
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'adapters'}"}
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return f"a test that hangs: the run took longer than {LIMIT:g} s"
        if done.returncode == 0:
            return None
        failed = sorted(FAILED.findall(done.stdout), key=lambda line: line.startswith("ERROR"))
        if done.returncode not in (1, 2) or not failed:  # 2: stopped after the first failure
            raise RuntimeError(
                f"pytest did not run: exit status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
            )
        return str(failed[0])[:160]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="faults with this text in their name or file")
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="of pytest (2)")
    arguments = parser.parse_args()
    chosen = [each for each in FAULTS if arguments.only in each.name or arguments.only in each.file]
    missed: list[Fault] = []
    for number, fault in enumerate(chosen, 1):
        if arguments.list:
            say(f"{fault.file}: {fault.name}")
            continue
        begin = time.monotonic()
        found = noticed(fault, arguments.processes)
        say(
            f"{number}/{len(chosen)} {fault.file}: {fault.name}: "
            f"{found or 'NOT NOTICED'} ({time.monotonic() - begin:.0f} s)"
        )
        sys.stdout.flush()
        if found is None:
            missed.append(fault)
    if not arguments.list:
        say(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
