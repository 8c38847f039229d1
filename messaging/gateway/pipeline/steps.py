"""The steps of a pipeline that look at one message: filters and transforms, compiled from the settings of a route."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from messaging.codecs.encodings import Encodings, decompress, parse_encodings
from messaging.codecs.models import reason_of
from messaging.errors import ArgumentError, ConfigurationError, DecodeError, MessagingError
from messaging.errors.checks import plain_function
from messaging.gateway.patterns import filled
from messaging.gateway.pipeline.draft import Draft
from messaging.gateway.pipeline.paths import MISSING, FieldPath, remove_all
from messaging.gateway.pipeline.units import converter
from messaging.gateway.settings import TransformSettings, UnitSettings
from messaging.services import LdapFilter

if TYPE_CHECKING:
    from messaging.sparkplug import Reading

#: a step: returns what a draft becomes, which may be no draft or several
Step = Callable[[Draft], Iterable[Draft]]

#: messages that one message can become
MAX_FAN_OUT: Final = 100_000
#: values of templates that the step ``sparkplug`` adds
SPARKPLUG_NAMES: Final = frozenset({"group", "edge_node", "device", "metric"})
#: metrics that control an edge node, and tell nothing about the plant
_CONTROL: Final = ("Node Control/", "Device Control/")
_BDSEQ: Final = "bdSeq"
#: bytes of a payload that was compressed as a whole
_MAX_PAYLOAD: Final = 4 * 2**20
#: what is no name of a channel
_FORBIDDEN: Final = str.maketrans(dict.fromkeys("+#\0", "_"))
#: the device of a metric of an edge node, in channels
NO_DEVICE: Final = "-"
#: nesting of objects whose fields a filter sees
_MAX_DEPTH: Final = 16


def imported(path: str) -> Any:
    """Return the object at ``package.module:name``.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a foreign module does when it is imported
        raise ConfigurationError(f"{path!r}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigurationError(f"{path!r}: the module {module!r} has no {name!r}") from None
    return found


# --- filters


def condition(text: str) -> Callable[[Draft], bool]:
    """Return whether a draft passes an LDAP filter over its fields, ``header.NAME``, ``channel`` and captures.

    Raises:
        InvalidFilterError: the text is no filter.
    """
    matches = LdapFilter.parse(text).matches
    return lambda draft: matches(properties(draft))


def properties(draft: Draft) -> dict[str, Any]:
    """Return what a filter sees of a draft; fields of objects within objects have dotted names."""
    found: dict[str, Any] = {}
    _add_fields(found, "", draft.fields, 0)
    found |= {f"header.{name}": value for name, value in draft.headers.items()}
    found |= draft.captures
    found["channel"] = draft.channel
    if draft.content_type is not None:
        found["content_type"] = draft.content_type
    return found


def _add_fields(found: dict[str, Any], prefix: str, fields: Mapping[str, Any], depth: int) -> None:
    for name, value in fields.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                _add_fields(found, f"{prefix}{name}.", value, depth + 1)
        elif isinstance(value, list):
            found[prefix + name] = [each for each in value if isinstance(each, (str, int, float))]
        elif value is not None:
            found[prefix + name] = value


# --- transforms


def transform(settings: TransformSettings, where: str) -> Step:
    """Return the step of one transform.

    Args:
        settings: have exactly one key.
        where: the key path of the transform, for errors.

    Raises:
        ConfigurationError: the step cannot be made; the error names the key.
    """
    (kind,) = settings.model_fields_set
    try:
        return _MAKERS[kind](getattr(settings, kind))
    except MessagingError as error:
        raise ConfigurationError(f"{where}.{kind}: {error}") from error


def _changing(change: Callable[[Any, Draft], Any]) -> Step:
    def step(draft: Draft) -> Iterable[Draft]:
        draft.set_value(change(draft.value, draft))
        return (draft,)

    return step


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DecodeError(f"the payload is no JSON object, but {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), "a number")


def _rename(names: Mapping[str, str]) -> Step:
    pairs = [(FieldPath(old), FieldPath(new)) for old, new in names.items()]

    def change(value: Any, _: Draft) -> Any:
        _object(value)
        found = [(new, old.get(value)) for old, new in pairs]
        value = remove_all(value, [old for old, _ in pairs])
        for new, each in found:
            if each is not MISSING:
                value = new.put(value, each)
        return value

    return _changing(change)


def _select(names: Iterable[str]) -> Step:
    paths = [_target_path(name) for name in names]

    def change(value: Any, _: Draft) -> Any:
        _object(value)
        made: Any = {}
        for path in paths:
            found = path.get(value)
            if found is not MISSING:
                made = path.put(made, found)
        return made

    return _changing(change)


def _drop(names: Iterable[str]) -> Step:
    paths = [FieldPath(name) for name in names]

    for path in paths:
        if not path.steps:
            raise ArgumentError(f"{path.text!r} is the whole payload; name fields of it")
    return _changing(lambda value, _: remove_all(value, paths))


def _target_path(name: str) -> FieldPath:
    """Return the path of a field in a new object."""
    path = FieldPath(name)
    if path.has_index:
        raise ArgumentError(f"{name!r} leads through an array, and a new payload has none; use map: {{name: {name!r}}}")
    return path


def _set(values: Mapping[str, Any]) -> Step:
    pairs = [(FieldPath(name), value) for name, value in values.items()]

    def change(value: Any, draft: Draft) -> Any:
        _object(value)
        for path, given in pairs:
            value = path.put(value, filled(given, draft.captures) if isinstance(given, str) else given)
        return value

    return _changing(change)


def _map(values: Mapping[str, str]) -> Step:
    pairs = [(_target_path(new), FieldPath(old)) for new, old in values.items()]

    def change(value: Any, _: Draft) -> Any:
        made: Any = {}
        for new, old in pairs:
            found = old.get(value)
            if found is not MISSING:
                made = new.put(made, found)
            elif not old.is_optional:
                raise DecodeError(f"the payload has no {old.text!r}; write {old.text + '?'!r} if it may be missing")
        return made

    return _changing(change)


def _unit(settings: UnitSettings) -> Step:
    path, convert = FieldPath(settings.field), converter(settings.source, settings.target)

    def change(value: Any, _: Draft) -> Any:
        found = path.get(value)
        if found is MISSING and path.is_optional:
            return value
        number = number_of(found)
        if number is None:
            raise DecodeError(f"{settings.field!r} is no number")
        converted = convert(number)
        if not math.isfinite(converted):
            raise DecodeError(f"{settings.field!r} is too large to convert")
        return path.put(value, converted)

    return _changing(change)


def number_of(value: Any) -> float | None:
    """Return a JSON number as a finite float; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _model(path: str) -> Step:
    kind = imported(path)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
    except (PydanticUserError, TypeError, AttributeError, NameError, ValueError) as error:
        raise ArgumentError(f"{path!r} is no type that pydantic can validate: {reason_of(error)}") from None

    def change(value: Any, _: Draft) -> Any:
        try:
            return adapter.dump_python(adapter.validate_python(value), mode="json")
        except MessagingError:
            raise
        except ValidationError as error:
            first = error.errors(include_input=False, include_context=False, include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the payload"
            raise DecodeError(f"the payload is no {path}: {place}: {first['msg']}") from None
        except Exception as error:  # of the application's model
            raise DecodeError(f"{path}: {type(error).__name__}: {error}") from error

    return _changing(change)


def _call(path: str) -> Step:
    function = plain_function(imported(path), repr(path), is_iterated=True)

    def step(draft: Draft) -> Iterable[Draft]:
        try:
            found = function(draft)
            if found is None:
                return ()
            if isinstance(found, (Draft, str, bytes, bytearray, Mapping, BaseModel)):
                return (_returned(draft, found),)
            # a generator may be endless: the pipeline refuses one message more than it allows
            return [_returned(draft.copy(), each) for each in itertools.islice(found, MAX_FAN_OUT + 1)]
        except MessagingError:
            raise
        except Exception as error:  # of the application's function
            raise DecodeError(f"{path}: {type(error).__name__}: {error}") from error

    return step


def _returned(draft: Draft, found: Any) -> Draft:
    if isinstance(found, Draft):
        if not found.sources:  # a new one stands for the message that it was made of
            found.sources = draft.sources
            found.message_id = found.message_id or draft.message_id
        return found
    if isinstance(found, (bytes, bytearray)):
        draft.set_payload(bytes(found), draft.content_type)
    elif isinstance(found, str):
        draft.set_payload(found.encode(), "text/plain")
    else:
        if isinstance(found, BaseModel):
            found = found.model_dump(mode="json")
        draft.set_value(dict(found) if isinstance(found, Mapping) else found)
    return draft


# --- Sparkplug B payloads to readings


class SparkplugStep:
    """Turns a Sparkplug message into a message for each reading. For one thread at a time.

    The births of a route are kept in memory. After a restart edge nodes are asked for a rebirth when they send data.
    Data that cannot be read until then fails, and becomes a dead letter: nothing is lost, and nothing is guessed. A
    replay of dead letters reads them by the births that are known then.

    Attributes:
        request_rebirth: publishes a command to the source, given its channel and payload; ``None``: nothing is asked.

    Raises:
        MissingExtraError: the extra ``sparkplug`` is not installed.
    """

    def __init__(self) -> None:
        from messaging.sparkplug import SparkplugDecoder  # needs an extra, which other routes do without

        self.request_rebirth: Callable[[str, bytes], object] | None = None
        self._decoder = SparkplugDecoder(self._ask)
        self._read: Callable[[str, bytes], list[Reading]] = self._decoder.read

    def _ask(self, channel: str, payload: bytes) -> None:
        if self.request_rebirth is not None:
            self.request_rebirth(channel, payload)

    def inherit(self, other: SparkplugStep) -> None:
        """Go on with the births of a step that this one replaces."""
        self.request_rebirth = self.request_rebirth or other.request_rebirth
        self._decoder = other._decoder
        self._read = self._decoder.read

    def reread(self, other: SparkplugStep) -> None:
        """Read messages of the past by the births that another step knows, whose state stays as it is."""
        self._decoder = other._decoder
        self._read = self._decoder.reread

    def __call__(self, draft: Draft) -> Iterable[Draft]:
        """Return a message for each reading.

        Raises: as :meth:`messaging.sparkplug.SparkplugDecoder.read`.
        """
        payload = draft.payload
        if draft.content_encoding is not None:
            compressions = parse_encodings(draft.content_encoding).compressions
            payload = decompress(payload, Encodings(None, compressions), _MAX_PAYLOAD)
        return [_message(draft, reading) for reading in self._read(draft.channel, payload) if not _is_control(reading)]


def _is_control(reading: Reading) -> bool:
    return reading.metric.startswith(_CONTROL) or (reading.metric == _BDSEQ and reading.device is None)


def _message(draft: Draft, reading: Reading) -> Draft:
    names: dict[str, Any] = {
        "group": reading.group,
        "edge_node": reading.edge_node,
        "device": NO_DEVICE if reading.device is None else reading.device,
        "metric": reading.metric.translate(_FORBIDDEN),
    }
    made = draft.copy(captures={**draft.captures, **names})
    made.set_value(reading.to_json())
    return made


_MAKERS: Final[Mapping[str, Callable[[Any], Step]]] = {
    "rename": _rename,
    "select": _select,
    "drop": _drop,
    "set": _set,
    "map": _map,
    "unit": _unit,
    "model": _model,
    "call": _call,
    "sparkplug": lambda _: SparkplugStep(),
}
