"""The pipeline of a route: filter, transforms, deadband, sampling, batches and compression, in this order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

from messaging.errors import ConfigurationError, MessagingError
from messaging.gateway.patterns import GIVEN_NAMES, ChannelPattern, ChannelTemplate, filled, template_names
from messaging.gateway.pipeline.batches import Batcher, compressed
from messaging.gateway.pipeline.draft import Draft, divide
from messaging.gateway.pipeline.steps import (
    MAX_FAN_OUT,
    SPARKPLUG_NAMES,
    SparkplugStep,
    Step,
    condition,
    transform,
)
from messaging.gateway.pipeline.thinning import LastSample, Thinning
from messaging.gateway.recognition import Recognition
from messaging.gateway.settings import RouteSettings

T = TypeVar("T")

#: key of deadband and sample after the step ``sparkplug``: a channel has many metrics there
_SPARKPLUG_KEY: Final = "{group}/{edge_node}/{device}/{metric}"


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


class Passed(NamedTuple):
    """What comes out of a pipeline.

    Attributes:
        ready: the messages to store, in order.
        released: tokens of the source whose messages need no storing.
        filtered: number of messages of the source that did not pass.
        repeated: number of those that were delivered again, and of which all that passes is in a batch already.
    """

    ready: list[Draft]
    released: list[Any]
    filtered: int = 0
    repeated: int = 0


class Pipeline:
    """The steps of one route. For one thread at a time; functions of the configuration are called by it.

    Args:
        route: its settings.
        gateway: name of the gateway.
        name: of the route, for errors.
        request_rebirth: publishes a command to the source, given its channel and payload; for Sparkplug.

    Raises:
        ConfigurationError: a step cannot be made; the error names its key.

    Attributes:
        is_plain: whether every message comes out as it is.
        recognition: knows the messages of batches that are stored, or about to be; ``None``: they are not recognised.
    """

    recognition: Recognition | None = None

    def __init__(
        self,
        route: RouteSettings,
        *,
        gateway: str,
        name: str,
        request_rebirth: Callable[[str, bytes], object] | None = None,
    ) -> None:
        where = f"routes.{name}."
        self._passes = None if route.where is None else _located(f"{where}where", lambda: condition(str(route.where)))
        self._steps: list[tuple[str, Step]] = [
            (f"transform[{number}]", transform(each, f"{where}transform[{number}]"))
            for number, each in enumerate(route.transform)
        ]
        for step in self._sparkplug_steps():
            step.request_rebirth = request_rebirth
        self._gateway = gateway
        self._key = route.key
        has_readings = any(each.sparkplug for each in route.transform)
        if self._key is None and has_readings:
            self._key = _SPARKPLUG_KEY
        self._template = _located(f"{where}to.channel", lambda: ChannelTemplate(route.target.channel))
        self._check_names(route, where, has_readings=has_readings)
        self._compression = route.compress
        if route.compress is not None:
            # a missing package is found now, and not with the first message
            _located(f"{where}compress", lambda: compressed(Draft("check", b""), str(route.compress)))
        sample, interval = route.sample, 0.0
        self._last: LastSample | None = None
        if sample is not None and sample.keep == "first":
            interval = sample.every
        elif sample is not None:
            self._last = LastSample(sample.every, max(1, route.source.prefetch // 2))
        self._thinning: Thinning | None = None
        if route.deadband is not None or interval:
            self._thinning = _located(f"{where}deadband.field", lambda: Thinning(route.deadband, interval))
        self._batcher = None if route.batch is None else Batcher(route.batch, route.compress)
        self._holds = self._last is not None or self._batcher is not None
        self.is_plain = not (self._steps or self._passes or self._thinning or self._holds or route.compress)

    def _check_names(self, route: RouteSettings, where: str, *, has_readings: bool) -> None:
        pattern = _located(f"{where}from.channel", lambda: ChannelPattern(route.source.channel))
        names = pattern.names | GIVEN_NAMES | (SPARKPLUG_NAMES if has_readings else frozenset())
        wanted = {"to.channel": self._template.names, "key": template_names(self._key or "")}
        for place, found in wanted.items():
            for name in sorted(found - names):
                raise ConfigurationError(
                    f"{where}{place}: there is no capture {{{name}}}; there are {', '.join(sorted(names))}"
                )

    # --- Sparkplug

    def _sparkplug_steps(self) -> Iterator[SparkplugStep]:
        """Yield the steps that read Sparkplug payloads."""
        for _, step in self._steps:
            if isinstance(step, SparkplugStep):
                yield step

    def inherit(self, other: Pipeline) -> None:
        """Go on with the births that the pipeline knows which this one replaces."""
        for step, known in zip(self._sparkplug_steps(), other._sparkplug_steps(), strict=False):
            step.inherit(known)

    def reread(self, other: Pipeline) -> None:
        """Read messages of the past by the births that another pipeline knows; from another thread than that one's."""
        for step, known in zip(self._sparkplug_steps(), other._sparkplug_steps(), strict=False):
            step.reread(known)

    # --- messages

    def process(self, draft: Draft, now: float) -> Passed:
        """Pass a message through.

        Args:
            draft: the message; it may be changed, also if it fails.
            now: monotonic seconds.

        Raises:
            PipelineError: the message fails: nothing of it is kept.
        """
        sources = draft.sources
        passed = self._transformed(draft)
        kept: list[Draft] = []
        undo: list[Callable[[], None]] = []
        try:
            kept += (each for each in passed if self._is_kept(each, now, undo))
            # what cannot be published or batched fails before it is held
            targets = [self._target(each) for each in kept]
            items = [b"" if self._batcher is None else self._batcher.item(each) for each in kept]
            for each in kept:
                _ = each.payload
            if not self._holds and self._compression is not None:
                kept = [compressed(each, self._compression) for each in kept]
        except MessagingError as error:
            for restore in reversed(undo):
                restore()
            raise error if isinstance(error, PipelineError) else PipelineError("payload", str(error)) from error
        # a source of which nothing is left is released
        held = {id(source) for each in kept for source in each.sources}
        released = [source for source in sources if id(source) not in held]
        filtered = len(released)
        if len(kept) > 1:
            divide(kept)
        is_new = [self._is_new(each, target, released) for each, target in zip(kept, targets, strict=True)]
        repeated = len(sources) if kept and not any(is_new) else 0
        if not all(is_new):
            kept = [*itertools.compress(kept, is_new)]
            items = [*itertools.compress(items, is_new)]
            targets = [*itertools.compress(targets, is_new)]
        ready, replaced = self._hold(kept, items, targets, now)
        for each in replaced:
            released += each.sources
            filtered += len(each.sources)
        return Passed(ready, released, filtered, repeated)

    def _is_new(self, draft: Draft, target: str, released: list[Any]) -> bool:
        """Return whether a message is in no batch; note what recognises it.

        The sources of one that is in a batch, and was delivered again, are acknowledged with the batch: those that the
        batch has are of a connection that is lost. If it is stored already, ``released`` gets them.
        """
        recognition, batcher = self.recognition, self._batcher
        if batcher is None or recognition is None or draft.message_id is None:
            return True
        key = recognition.key(draft.message_id, target, draft.payload)
        if not key:
            return True
        draft.members = (key,)
        if not draft.is_redelivered:
            return True
        if batcher.joins(key, draft) or recognition.joins(key, [each.context for each in draft.sources]):
            return False
        if not recognition.is_stored(key):
            return True
        released += draft.sources
        return False

    def _transformed(self, draft: Draft) -> list[Draft]:
        passed: list[Draft] = [draft]
        message_id = draft.message_id
        step = "where"
        try:
            if self._passes is not None and not self._passes(draft):
                return []
            for step, change in self._steps:
                passed = [made for each in passed for made in change(each)]
                if len(passed) > MAX_FAN_OUT:
                    raise PipelineError(step, f"a message became more than {MAX_FAN_OUT} messages")
        except PipelineError:
            raise
        except (MessagingError, RecursionError, ArithmeticError) as error:
            raise PipelineError(step, str(error) or type(error).__name__) from error
        if len(passed) > 1 and message_id is not None:
            # receivers recognise repeated messages by their id: each needs one of its own, the same in each run
            for number, each in enumerate(passed):
                if each.message_id == message_id:
                    each.message_id = f"{message_id}-{number}"
        return passed

    def _is_kept(self, draft: Draft, now: float, undo: list[Callable[[], None]]) -> bool:
        """Return whether a message passes deadband and sampling, and remember that; ``undo`` gets what forgets it."""
        if self._thinning is None:
            return True
        key = self._key_of(draft)
        # the first copy has passed, and is acknowledged later than the message that comes now would be: after a
        # crash in between it would be lost
        if self._thinning.repeats(draft, key):
            return True
        if not self._thinning.passes(draft, key, now):
            return False
        undo.append(self._thinning.note(draft, key, now))
        return True

    def _hold(
        self, kept: list[Draft], items: list[bytes], targets: list[str], now: float
    ) -> tuple[list[Draft], list[Draft]]:
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
        for each, item, target in zip(kept, items, targets, strict=True):
            ready += self._batcher.put(each, item, target, now)
        return ready, []

    def _batched(self, drafts: list[Draft], now: float) -> list[Draft]:
        """Return what is ready of messages that were held; :meth:`process` has seen that each can be batched."""
        if self._batcher is None:
            if self._compression is None:
                return drafts
            return [compressed(each, self._compression) for each in drafts]
        ready: list[Draft] = []
        for each in drafts:
            ready += self._batcher.put(each, self._batcher.item(each), self._target(each), now)
        return ready

    def _target(self, draft: Draft) -> str:
        if draft.target is not None:
            return draft.target
        return self._template.render(self._values(draft))

    def _key_of(self, draft: Draft) -> str:
        return draft.channel if self._key is None else filled(self._key, self._values(draft))

    def _values(self, draft: Draft) -> dict[str, str]:
        return {"channel": draft.channel, "gateway": self._gateway, **draft.captures}

    # --- time

    @property
    def next_due(self) -> float | None:
        """Return when :meth:`due` has something, in monotonic seconds; ``None``: nothing is held."""
        dues = [each.next_due for each in (self._last, self._batcher) if each is not None]
        return min((due for due in dues if due is not None), default=None)

    def due(self, now: float = math.inf) -> Passed:
        """Return the messages and batches that were held long enough; all of them by default."""
        ready = [] if self._last is None else self._batched(self._last.due(now), now)
        if self._batcher is not None:
            ready += self._batcher.due(now)
        return Passed(ready, [])


def _located(place: str, make: Callable[[], T]) -> T:
    """Return what ``make`` makes; name the key of the settings if it fails.

    Raises:
        ConfigurationError: see above.
    """
    try:
        return make()
    except MessagingError as error:
        raise ConfigurationError(f"{place}: {error}") from error
