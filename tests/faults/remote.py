"""Remote events under random kills: generator, agent, mailbox and owner, each in a process of its own.

``python -m tests.faults.remote --protocol mqtt --kills 300 --seed 7`` (or ``make remote-events``). The processes (see
``remote_party.py``) share a private broker. Each kill is a SIGKILL at a random moment; the process is started again at
once. Then the ledgers are compared: each event that the generator had on its disk reached the owner; the numbers of
each kind never go back, apart from duplicates, which are numbers that came before. Ends with status 1, and says why, if
not.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import messaging
from messaging.remoteevent import RemoteMailbox
from messaging.testing.brokers import Broker, Mosquitto, RabbitMQ
from messaging.testing.waiting import PATIENCE, eventually
from tests.faults import command
from tests.faults.remote_party import KINDS, MAILBOX, PROGRAM, ROLES, STOP
from tests.faults.scenario import Lives

PROTOCOLS: Final = ("mqtt", "amqp")
#: pause before a kill, seconds: a process needs about one to start
_PAUSE: Final = (0.0, 1.2)
#: time for all events to arrive, seconds
_SETTLING: Final = 5 * PATIENCE


@dataclass
class Outcome:
    """What the ledgers say."""

    kills: dict[str, int] = field(default_factory=dict)
    confirmed: int = 0
    received: int = 0
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} of {role}" for role, count in sorted(self.kills.items()))
        return (
            f"{sum(self.kills.values())} kills ({kills}); {self.confirmed} events confirmed, {self.received} received, "
            f"{self.duplicates} duplicates, {len(self.problems)} problems"
        )


class Party(Lives):
    """One process of the chain."""

    def __init__(self, role: str, url: str, folder: Path, registration: str) -> None:
        super().__init__(PROGRAM, folder / f"{role}.log")
        self.role = role
        self._arguments = role, url, str(folder), registration

    def begin(self) -> None:
        """Begin the next life."""
        self.start(*self._arguments, str(self.count + 1))


class Run:
    """One run against one broker.

    Args:
        protocol: ``mqtt`` or ``amqp``.
        folder: for the journals and the ledgers; empty.
        seed: of the random numbers.
        say: gets lines about the progress.
    """

    def __init__(self, protocol: str, folder: Path, seed: int, say: Callable[[str], object] = lambda _: None) -> None:
        self._protocol = protocol
        self._folder = folder
        self._random = random.Random(f"{protocol}{seed}")
        self._say = say

    def run(self, kills: int) -> Outcome:
        """Run the chain under so many kills; return what the ledgers say."""
        outcome = Outcome()
        broker: Broker = Mosquitto() if self._protocol == "mqtt" else RabbitMQ()
        with ExitStack() as stack:
            stack.enter_context(broker)
            url = broker.url + ("?version=5" if self._protocol == "mqtt" else "")
            parties: dict[str, Party] = {}

            def end() -> None:
                for party in parties.values():
                    party.kill()

            stack.callback(end)
            mailbox = parties["mailbox"] = Party("mailbox", url, self._folder, "")
            mailbox.begin()
            mailbox.wait_up()
            with messaging.connect(url) as m:
                registration = RemoteMailbox(m, MAILBOX).register(86_400.0).result(30)
            for role in ("owner", "agent", "generator"):
                party = parties[role] = Party(role, url, self._folder, registration.id)
                party.begin()
            for party in parties.values():
                party.wait_up()
            for number in range(kills):
                time.sleep(self._random.uniform(*_PAUSE))  # sleeps: a random moment
                party = parties[self._random.choice([*ROLES])]
                party.kill()
                party.begin()
                outcome.kills[party.role] = outcome.kills.get(party.role, 0) + 1
                if number % 20 == 19:
                    self._say(f"{number + 1} kills, {len(self._lines('received'))} events received")
            (self._folder / STOP).touch()
            eventually(lambda: ("end", 0) in self._lines("generated"), "the generator stops", patience=_SETTLING)
            wanted = {each for each in self._lines("generated") if each[0] != "end"}
            try:
                eventually(lambda: wanted <= set(self._lines("received")), "all events arrive", patience=_SETTLING)
            except AssertionError:
                outcome.problems += [f"{each.role}: {errors}" for each in parties.values() if (errors := each.errors())]
        self._check(outcome)
        return outcome

    def _check(self, outcome: Outcome) -> None:
        generated = [each for each in self._lines("generated") if each[0] != "end"]
        received = self._lines("received")
        outcome.confirmed, outcome.received = len(generated), len(received)
        if len(set(generated)) != len(generated):
            outcome.problems.append("a sequence number was given twice")
        for kind, number in sorted(set(generated) - set(received))[:20]:
            outcome.problems.append(f"lost: {kind} {number}")
        for kind in KINDS:
            seen: set[int] = set()
            for number in (number for each, number in received if each == kind):
                if number in seen:
                    outcome.duplicates += 1
                elif seen and number < max(seen):
                    outcome.problems.append(f"out of order: {kind} {number} after {max(seen)}")
                seen.add(number)
            missing = set(range(1, max(seen, default=0) + 1)) - seen
            if missing:
                outcome.problems.append(f"gaps of {kind}: {sorted(missing)[:20]}")

    def _lines(self, name: str) -> list[tuple[str, int]]:
        try:
            text = (self._folder / name).read_text()
        except FileNotFoundError:
            return []
        return [(kind, int(number)) for kind, number in (line.split() for line in text.splitlines())]


def main() -> int:
    """The command; see the module."""
    parser = command.parser(__doc__, PROTOCOLS)
    parser.add_argument("--kills", type=int, default=300)
    given = parser.parse_args()
    return command.run_all(
        given, lambda protocol, folder: Run(protocol, folder, given.seed, command.progress).run(given.kills)
    )


if __name__ == "__main__":
    sys.exit(main())
