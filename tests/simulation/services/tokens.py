"""Credentials that expire and are replaced: an issuer, the providers of the instances, and brokers that look.

What is promised, and checked (``docs/credentials.md``):

- the provider is asked before each connection, so a connection is made with credentials that were issued for it;
- credentials that expire are renewed before they do: the broker never sees an expired one, if nothing fails;
- where the broker takes new ones on a connection (``update-secret``, AUTH) that connection stays;
- every other change is a planned reconnect, whose state has no cause.

That nothing is lost, and nothing comes twice without a fault, the services check whose programs have credentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from messaging import Credentials
from messaging.execution import clock
from tests.simulation.plans import Fault
from tests.simulation.simulation import Role, Simulation, span
from tests.simulation.world.world import PlannedError

if TYPE_CHECKING:
    import random

    from messaging import Messaging

METHOD: Final = "TOKEN"
#: the oldest token that a connection is made with: "before each connection" (``docs/credentials.md``). The time that an
#: attempt takes, and the 5 seconds for which a token that was asked for in advance serves the next attempt, seconds
_OLDEST: Final = 20.0


@dataclass(slots=True)
class Token:
    """A password that was issued.

    Attributes:
        role: the program that has it.
        issued: when, virtual seconds.
        expires: when brokers refuse it from.
    """

    role: str
    issued: float
    expires: float


class Issuer:
    """Issues the credentials of all programs, and tells brokers which are valid.

    Args:
        simulation: whose broker it is; its option ``credentials`` says what the providers return, and how often.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._options: dict[str, Any] = simulation.plan.options["credentials"]
        self._tokens: dict[str, Token] = {}
        #: what providers do instead of their work: "raise", "slow", "garbage"
        self.failure = ""
        #: whether a promise to programs that nothing happens to holds
        self._is_calm = not simulation.plan.faults and not simulation.plan.options["hold_up"]

    # --- for programs

    def settings(self, role: Role) -> dict[str, Any]:
        """Return the settings of an instance of ``role``."""
        found: dict[str, Any] = {"credentials": self._provider(role)}
        if self._options["method"]:
            found["auth_method"] = METHOD
        return found

    def watch(self, role: Role, m: Messaging) -> None:
        """Check the states of an instance if nothing fails."""
        if self._is_calm:
            m.connection_state.subscribe(lambda state: self._changed(role, state))

    def _changed(self, role: Role, state: Any) -> None:
        simulation = self._simulation
        if state.cause is not None:
            simulation.broken(f"{role.name} is {state.name} because of {state.cause}, although nothing failed")
        stays = simulation.protocol == "amqp" or self._options["method"]
        if state.name == "reconnecting" and stays:
            simulation.broken(f"{role.name} reconnects, although its broker takes new credentials on a connection")

    def _provider(self, role: Role) -> Any:
        if self._options["is_coroutine"]:

            async def ask_soon() -> Any:
                if self.failure == "slow":
                    await clock.sleep(20.0)
                return self._issue(role)

            return ask_soon

        def ask() -> Any:
            if self.failure == "slow":
                clock.pause(20.0)
            return self._issue(role)

        return ask

    def _issue(self, role: Role) -> Any:
        if self.failure == "raise":
            raise PlannedError("as planned")
        if self.failure == "garbage":
            return 42
        lifetime: float = self._options["lifetime"]
        now = role.world.scheduler.now
        secret = f"{role.name}-{len(self._tokens)}"
        expires = inf if self._options["returns"] == "pair" else now + lifetime
        self._tokens[secret] = Token(role.name, now, expires)
        role.note(f"token {secret}")
        if expires < inf:
            role.world.scheduler.call_later(lifetime, lambda: self._end(secret))
        if self._options["returns"] == "pair":
            return role.name, secret
        if self._options["returns"] == "moment":
            return Credentials(role.name, secret, expires_at=clock.wall() + lifetime)
        return Credentials(role.name, secret, valid_for=lifetime)

    # --- for brokers

    def is_valid(self, username: str | None, secret: str) -> bool:
        """Return whether a client may log in."""
        simulation, token = self._simulation, self._tokens.get(secret)
        now = simulation.world.scheduler.now
        if token is None or token.role != username:
            simulation.broken(f"{username} logs in with {secret}, which was not issued to it")
            return False
        simulation.world.note("issuer", f"login of {username} with {secret}")
        if self._is_calm and now >= token.expires:
            simulation.broken(f"{username} logs in with {secret}, which has expired, although nothing failed")
        if self._is_calm and now > token.issued + _OLDEST:
            simulation.broken(f"{username} logs in with {secret}, which is {now - token.issued:g} s old")
        return now < token.expires

    def _end(self, secret: str) -> None:
        """End the connections with a token that is valid no more, as brokers do."""
        simulation = self._simulation
        for connection in [*simulation.broker.connections]:
            if simulation.protocol == "amqp":
                if connection.secret == secret:
                    self._ended(secret)
                    connection.close_by_error({"reply_code": 530, "reply_text": "NOT_ALLOWED - credentials expired"})
                continue
            each = simulation.broker.connections[connection]
            if each.secret == secret.encode():
                self._ended(secret)
                each.disconnect(0x87)

    def _ended(self, secret: str) -> None:
        self._simulation.world.note("issuer", f"{secret} is valid no more, and in use")
        if self._is_calm:
            self._simulation.broken(f"{secret} was not renewed before it expired, although nothing failed")

    def revoke(self, role: str | None, *, is_hard: bool) -> None:
        """Have the tokens of a role, or of all, be valid no more; end their connections if ``is_hard``."""
        now = self._simulation.world.scheduler.now
        for secret, token in [*self._tokens.items()]:
            if role in (None, token.role) and token.expires > now:
                token.expires = now
                if is_hard:
                    self._end(secret)


def draw_credentials(random: random.Random, protocol: str) -> dict[str, Any] | None:
    """Return the option ``credentials`` of a plan; ``None``: there are none that change."""
    if protocol == "memory" or random.random() < 0.6:
        return None
    return {
        "returns": random.choice(("lifetime", "lifetime", "moment", "pair")),
        "lifetime": random.choice((2.0, 5.0, 10.0, 60.0)),
        "is_coroutine": random.random() < 0.3,
        "method": protocol == "mqtt5" and random.random() < 0.5,
    }


def draw_rotations(random: random.Random, roles: list[str]) -> list[Fault]:
    """Return faults of the issuer."""
    faults = []
    for _ in range(random.choice((0, 1, 2))):
        if random.random() < 0.5:
            failure = {"seconds": span(random, 0.1, 20.0), "failure": random.choice(("raise", "slow", "garbage"))}
            faults.append(Fault(span(random, 1e-3, 10.0), "issuer", failure))
        else:
            rotation = {"role": random.choice([*roles, None]), "is_hard": random.random() < 0.5}
            faults.append(Fault(span(random, 1e-3, 10.0), "rotate", rotation))
    return faults
