"""The pipeline of a route: filter, transforms, deadband, sampling, batches and compression, in this order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from messaging.errors import ConfigurationError, MessagingError
from messaging.gateway.pipeline.batches import Batcher, compressed
from messaging.gateway.pipeline.patterns import ChannelTemplate
from messaging.gateway.pipeline.steps import condition, filled, transform
from messaging.gateway.pipeline.thinning import Deadband, FirstSample, LastSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from messaging.gateway.pipeline.draft import Draft
    from messaging.gateway.pipeline.steps import Step
    from messaging.gateway.settings import RouteSettings

#: messages that one message can become
MAX_FAN_OUT: Final = 10_000


class PipelineError(MessagingError):
    """A message fails in a step of the pipeline of its route.

    Attributes:
        step: the key of the step in the settings of the route.
        reason: what went wrong.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason


class Outcome(NamedTuple):
    """What comes out of a pipeline.

    Attributes:
        ready: the messages to store, in order.
        released: tokens of the source whose messages need no storing.
    """

    ready: list[Draft]
    released: list[Any]


class Pipeline:
    """The steps of one route. For one thread at a time; functions of the configuration are called by it.

    Made by :meth:`compile`.

    Attributes:
        is_plain: whether every message comes out as it is.
    """

    def __init__(
        self, route: RouteSettings, gateway: str, passes: Callable[[Draft], bool] | None,
        steps: Iterable[tuple[str, Step]],
    ) -> None:  # fmt: skip
        self._passes = passes
        self._steps = [*steps]
        self._gateway = gateway
        self._key = route.key
        self._template = ChannelTemplate(route.target.channel)
        self._compression = route.compress
        self._deadband = None if route.deadband is None else Deadband(route.deadband)
        self._first: FirstSample | None = None
        self._last: LastSample | None = None
        if route.sample is not None:
            if route.sample.keep == "first":
                self._first = FirstSample(route.sample.every)
            else:
                self._last = LastSample(route.sample.every, max(1, route.source.prefetch // 2))
        self._batcher = None if route.batch is None else Batcher(route.batch, route.compress)
        self.is_plain = not (
            self._steps or passes or self._deadband or self._first or self._last or self._batcher or route.compress
        )

    @classmethod
    def compile(cls, route: RouteSettings, *, gateway: str, name: str) -> Pipeline:
        """Return the pipeline of a route.

        Args:
            route: its settings.
            gateway: name of the gateway.
            name: of the route, for errors.

        Raises:
            ConfigurationError: a step cannot be made; the error names its key.
        """
        try:
            passes = None if route.where is None else condition(route.where)
        except MessagingError as error:
            raise ConfigurationError(f"routes.{name}.where: {error}") from error
        steps = [
            (f"transform[{number}]", transform(each, f"routes.{name}.transform[{number}]"))
            for number, each in enumerate(route.transform)
        ]
        try:
            return cls(route, gateway, passes, steps)
        except MessagingError as error:
            raise ConfigurationError(f"routes.{name}: {error}") from error

    # --- messages

    def process(self, draft: Draft, now: float) -> Outcome:
        """Pass a message through.

        Args:
            draft: the message; it may be changed, also if it fails.
            now: monotonic seconds.

        Raises:
            PipelineError: the message fails: nothing of it is kept.
        """
        sources = draft.sources
        passed = self._transformed(draft)
        try:
            kept = [each for each in passed if self._is_kept(each, now)]
            targets = [self._target(each) for each in kept] if self._batcher is not None else []
            if self._batcher is None and self._last is None and self._compression is not None:
                kept = [compressed(each, self._compression) for each in kept]
            for each in kept:
                _ = each.payload  # what cannot be encoded fails before anything is remembered
        except PipelineError:
            raise
        except MessagingError as error:
            raise PipelineError("payload", str(error)) from error
        ready, replaced = self._hold(kept, targets, now)
        for each in kept:
            self._note(each, now)
        # a source of which nothing is left is released
        held = {id(source) for each in kept for source in each.sources}
        released = [source for source in sources if id(source) not in held]
        for each in replaced:
            released += each.sources
        return Outcome(ready, released)

    def _transformed(self, draft: Draft) -> list[Draft]:
        passed: list[Draft] = [draft]
        step = "where"
        try:
            if self._passes is not None and not self._passes(draft):
                return []
            for step, change in self._steps:
                passed = [made for each in passed for made in change(each)]
                if len(passed) > MAX_FAN_OUT:
                    raise PipelineError(step, f"a message became {len(passed)} messages; at most {MAX_FAN_OUT}")
        except PipelineError:
            raise
        except (MessagingError, RecursionError, ArithmeticError) as error:
            raise PipelineError(step, str(error) or type(error).__name__) from error
        return passed

    def _is_kept(self, draft: Draft, now: float) -> bool:
        if self._deadband is None and self._first is None:
            return True
        key = self._key_of(draft)
        if self._deadband is not None and not self._deadband.passes(draft, key, now):
            return False
        return self._first is None or self._first.passes(key, now)

    def _note(self, draft: Draft, now: float) -> None:
        if self._deadband is not None:
            self._deadband.note(draft, self._key_of(draft), now)
        if self._first is not None:
            self._first.note(self._key_of(draft), now)

    def _hold(self, kept: list[Draft], targets: list[str], now: float) -> tuple[list[Draft], list[Draft]]:
        """Return what is ready to store, and the held messages that others replace."""
        if self._last is not None:
            ready, replaced = [], []
            for each in kept:
                before, early = self._last.put(each, self._key_of(each), now)
                if before is not None:
                    replaced.append(before)
                if early is not None:
                    ready.append(early)
            return self._batched(ready, now), replaced
        if self._batcher is None:
            return kept, []
        ready = []
        for each, target in zip(kept, targets, strict=True):
            ready += self._put(each, target, now)
        return ready, []

    def _batched(self, drafts: list[Draft], now: float) -> list[Draft]:
        """Return what is ready of messages that were held."""
        if self._batcher is None:
            if self._compression is None:
                return drafts
            return [compressed(each, self._compression) for each in drafts]
        ready: list[Draft] = []
        for each in drafts:
            ready += self._put(each, self._target(each), now)
        return ready

    def _put(self, draft: Draft, target: str, now: float) -> list[Draft]:
        assert self._batcher is not None  # noqa: S101  # its callers have checked it
        try:
            return self._batcher.put(draft, target, now)
        except MessagingError as error:
            raise PipelineError("batch", str(error)) from error

    def _target(self, draft: Draft) -> str:
        if draft.target is not None:
            return draft.target
        values = {"channel": draft.channel, "gateway": self._gateway, **draft.captures}
        return self._template.render(values)

    def _key_of(self, draft: Draft) -> str:
        if self._key is None:
            return draft.channel
        return filled(self._key, {"channel": draft.channel, "gateway": self._gateway, **draft.captures})

    # --- time

    @property
    def next_due(self) -> float | None:
        """Return when :meth:`due` has something, in monotonic seconds; ``None``: nothing is held."""
        dues = [each.next_due for each in (self._last, self._batcher) if each is not None]
        return min((due for due in dues if due is not None), default=None)

    def due(self, now: float) -> Outcome:
        """Return the messages and batches that were held long enough."""
        ready = [] if self._last is None else self._batched(self._last.due(now), now)
        if self._batcher is not None:
            ready += self._batcher.due(now)
        return Outcome(ready, [])

    def flush(self) -> Outcome:
        """Return all messages and batches that are held."""
        ready = [] if self._last is None else self._batched(self._last.flush(), 0.0)
        if self._batcher is not None:
            ready += self._batcher.flush()
        return Outcome(ready, [])
