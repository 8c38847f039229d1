"""Event schemas: the fields of a class (157.2.1), its name as a topic (157.3.2), and loading it by its name (157.4.1).

A schema is a class whose instances have named public fields: a pydantic model, a dataclass, a ``NamedTuple``, a msgspec
struct, an attrs class, or any other class with annotations, with ``__slots__``, or with instances that have attributes,
like OSGi's DTOs. Methods, properties, class variables and names that begin with an underscore are not fields (157.2.1).
Classes with their own pydantic core schema, classes of the standard library, exceptions and collections are schemas
only if they are one of the first five kinds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import inspect
import keyword
import logging
import numbers
import pathlib
import re
import sys
import types
import typing
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from pydantic import AliasChoices, BaseModel, RootModel, TypeAdapter
from pydantic.dataclasses import rebuild_dataclass

from messaging.codecs.cache import BoundedCache
from messaging.dispatch import is_topic
from messaging.errors import ArgumentError, InvalidTopicError

logger = logging.getLogger(__name__)

MISSING: Final = object()

#: types of the most common values, all immutable; :func:`is_simple` knows further types
COMMON: Final[frozenset[type[Any]]] = frozenset({str, int, float, bool, type(None), bytes, datetime.datetime})
_SIMPLE: Final = (
    str,
    bytes,
    bytearray,
    numbers.Number,
    type(None),
    enum.Enum,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    uuid.UUID,
    pathlib.PurePath,
    re.Pattern,
    type,
)
_COLLECTIONS: Final = (list, tuple, set, frozenset, deque)


def is_simple(value: Any) -> bool:
    """Return whether ``value`` has no parts that are event data."""
    return type(value) in COMMON or isinstance(value, _SIMPLE)


def is_collection(value: Any) -> bool:
    """Return whether ``value`` is a collection of values without names."""
    return isinstance(value, _COLLECTIONS) and not hasattr(value, "_fields")


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaField:
    """One field of a schema."""

    name: str
    #: type of its values; ``Any`` if it cannot be resolved
    annotation: Any
    #: whether the constructor requires it
    is_required: bool
    #: keyword of the constructor that sets it; ``None`` if it is set after construction
    keyword: str | None
    #: other names of it in data that is converted to an instance
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a class, and how its instances are made and read.

    Attributes:
        type: the class.
        fields: its public fields.
        make: makes an instance from keywords.
        read: returns names and values of the fields of an instance. Raises the errors of its attributes.
        takes_more: whether instances may have additional fields.
        validate: makes an instance from unconverted data, for pydantic models with validators that see it; or ``None``.
        is_root: whether the only field is the instance itself, as in a ``RootModel``.
        is_complete: whether all names in a pydantic model are defined. An incomplete model has no instances.
    """

    type: type[Any]
    fields: tuple[SchemaField, ...]
    make: Callable[..., Any]
    read: Callable[[Any], dict[str, Any]]
    takes_more: bool = False
    validate: Callable[[Any], Any] | None = None
    is_root: bool = False
    is_complete: bool = True


_schemas: Final[BoundedCache[Any, Schema | None]] = BoundedCache(4096)


def schema_of(type_: Any) -> Schema | None:
    """Return the schema of a class, or ``None`` if its instances have no fields. Cached; thread safe.

    For a generic class with arguments (``Page[Item]``), the annotations of the fields contain the arguments.
    """
    try:
        known = _schemas.get(type_, MISSING)
    except TypeError:  # an annotation without a hash
        return _of_alias(type_)
    if known is MISSING:
        if not isinstance(type_, type):
            return _of_alias(type_)
        known = _of_type(type_)
        if known is not None and not known.is_complete:
            return known  # not cached: it may be complete the next time
        _schemas[type_] = known
    return typing.cast("Schema | None", known)


def _of_type(type_: type[Any]) -> Schema | None:
    if issubclass(type_, (*_SIMPLE, Mapping)):
        return None
    if issubclass(type_, BaseModel):
        return None if type_ is BaseModel else _of_model(type_)
    if dataclasses.is_dataclass(type_):
        if hasattr(type_, "__pydantic_fields__"):
            return _of_pydantic_dataclass(type_)
        return _of_constructor(type_, ((each.name, each.name, ()) for each in dataclasses.fields(type_)))
    if issubclass(type_, tuple):
        names = getattr(type_, "_fields", None)
        return None if names is None else _of_constructor(type_, ((name, name, ()) for name in names))
    if hasattr(type_, "__struct_fields__") and "msgspec" in sys.modules:
        return _of_struct(type_)
    if hasattr(type_, "__attrs_attrs__"):
        return _of_attrs(type_)
    if issubclass(type_, _NO_SCHEMAS) or hasattr(type_, "__get_pydantic_core_schema__"):
        return None
    if str(type_.__module__).partition(".")[0] in sys.stdlib_module_names:
        return None
    return _of_class(type_)


_NO_SCHEMAS: Final = (Collection, Iterator, BaseException, types.ModuleType)


def _public(name: str) -> bool:
    return not name.startswith("_")


# --- annotations


def hints_of(type_: Any) -> dict[str, Any]:
    """Return the annotations of a class or function, with ``Any`` where one cannot be resolved."""
    try:
        return typing.get_type_hints(type_, include_extras=True)
    except Exception as error:  # noqa: BLE001  # evaluating an annotation may raise anything
        logger.debug("%r: annotations cannot be resolved: %s; resolving each of them", type_, type(error).__name__)
        return dict(_hints_one_by_one(type_))


def _hints_one_by_one(type_: Any) -> Iterator[tuple[str, Any]]:
    for owner in reversed(type_.__mro__) if isinstance(type_, type) else (type_,):
        module = sys.modules.get(getattr(owner, "__module__", None) or "", typing)
        scope = {
            **getattr(owner, "__dict__", {}),
            **vars(module),
            **{each.__name__: each for each in getattr(owner, "__type_params__", ())},
            getattr(owner, "__name__", ""): owner,
        }
        for name, annotation in _annotations(owner).items():
            found: Any = ClassVar if _CLASS_VAR.match(str(annotation)) else Any
            # The owner is a class, since ClassVar is valid in classes only.
            alone = type("alone", (), {"__annotations__": {name: annotation}})
            with contextlib.suppress(Exception):
                found = typing.get_type_hints(alone, scope, scope, include_extras=True)[name]
            yield name, found


#: how dataclasses recognise ClassVar in a string
_CLASS_VAR: Final = re.compile(r"(\w+\.)?ClassVar\b")


def _annotations(owner: Any) -> dict[str, Any]:
    """Return the unevaluated annotations of ``owner`` itself, if it has any that can be read."""
    with contextlib.suppress(Exception):
        return inspect.get_annotations(owner)
    return {}


def _of_alias(alias: Any) -> Schema | None:
    origin = typing.get_origin(alias)
    schema = schema_of(origin) if isinstance(origin, type) else None
    if schema is None:
        return None
    parameters = getattr(origin, "__parameters__", ())
    given = dict(zip(parameters, typing.get_args(alias), strict=False))
    if not given:
        return schema
    # A type variable of the same name in a base class was replaced before, if it is a different one.
    fields = (dataclasses.replace(each, annotation=bound(each.annotation, given)) for each in schema.fields)
    return dataclasses.replace(schema, fields=tuple(fields))


def bound(annotation: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return ``annotation`` with its type variables replaced by ``arguments``."""
    if isinstance(annotation, typing.TypeVar):
        return arguments.get(annotation, annotation)
    parameters = () if isinstance(annotation, type) else getattr(annotation, "__parameters__", ())
    if not any(each in arguments for each in parameters):
        return annotation
    try:
        return annotation[tuple(arguments.get(each, each) for each in parameters)]
    except TypeError:  # its arguments are of another form
        return annotation


def _arguments_of_bases(type_: Any) -> dict[Any, dict[Any, Any]]:
    """Return the arguments of the type variables of each base class."""
    found: dict[Any, dict[Any, Any]] = {}
    todo: list[tuple[Any, dict[Any, Any]]] = [(type_, {})]
    while todo:
        owner, given = todo.pop()
        for base in owner.__dict__.get("__orig_bases__", owner.__bases__):
            origin = typing.get_origin(base) or base
            if origin in (typing.Generic, typing.Protocol) or not isinstance(origin, type) or origin in found:
                continue
            parameters = getattr(origin, "__parameters__", ())
            arguments = [bound(each, given) for each in typing.get_args(base)]
            found[origin] = dict.fromkeys(parameters, Any) | dict(zip(parameters, arguments, strict=False))
            todo.append((origin, found[origin]))
    return found


def _bound_hints(type_: Any) -> dict[str, Any]:
    """Return the annotations of a class, with the type variables of its bases replaced."""
    hints = hints_of(type_)
    of_bases = _arguments_of_bases(type_)
    if any(of_bases.values()):
        owners = {name: owner for owner in reversed(type_.__mro__) for name in _annotations(owner)}
        hints = {name: bound(each, of_bases.get(owners.get(name), {})) for name, each in hints.items()}
    return hints


# --- kinds of schemas


def _of_model(type_: type[BaseModel]) -> Schema:
    if not type_.__pydantic_complete__:
        type_.model_rebuild(raise_errors=False, _types_namespace=_names_of(type_))
    fields = tuple(_model_fields(type_.model_fields))
    read_fields = _reader(fields)

    takes_more = type_.model_config.get("extra") == "allow"
    is_root = issubclass(type_, RootModel)
    is_complete = type_.__pydantic_complete__

    def read_all(instance: Any) -> dict[str, Any]:
        more = getattr(instance, "__pydantic_extra__", None) or {}
        return read_fields(instance) | {name: value for name, value in more.items() if _public(name)}

    return Schema(
        type_,
        fields,
        type_ if is_root or not is_complete else _by_validator(type_.__pydantic_validator__.validate_python, fields),
        read_all if takes_more else read_fields,
        takes_more=takes_more,
        validate=functools.partial(type_.model_validate, by_name=True) if _sees_data(type_) else None,
        is_root=is_root,
        is_complete=is_complete,
    )


def _names_of(type_: Any) -> dict[str, Any]:
    """Return the names that the annotations of a class may refer to."""
    return vars(sys.modules.get(str(type_.__module__), typing))


def _model_fields(infos: Mapping[str, Any]) -> Iterator[SchemaField]:
    for name, info in infos.items():
        if _public(name):
            alias = info.validation_alias
            choices = alias.choices if isinstance(alias, AliasChoices) else (alias,)
            yield SchemaField(
                name,
                # the model itself checks other metadata
                info.rebuild_annotation() if sees_value(info.metadata) else info.annotation,
                info.is_required(),
                name if info.init is not False else None,
                tuple(each for each in choices if isinstance(each, str)),
            )


def _by_validator(validate: Callable[..., Any], fields: Iterable[SchemaField]) -> Callable[..., Any]:
    """Return a function that makes instances of a model from its fields by name."""
    options = {"by_name": True, "by_alias": False} if any(each.aliases for each in fields) else {}

    def make(**values: Any) -> Any:
        return validate(values, **options)

    return make


def sees_value(metadata: Iterable[Any]) -> bool:
    """Return whether a validator in ``metadata`` sees the value before its conversion."""
    return any(type(each).__name__ in ("BeforeValidator", "WrapValidator", "PlainValidator") for each in metadata)


def _sees_data(type_: Any) -> bool:
    """Return whether a validator of a model sees the data before its conversion."""
    found = getattr(type_, "__pydantic_decorators__", None)
    return any(
        each.info.mode in ("before", "wrap", "plain")
        for group in ("field_validators", "model_validators")
        for each in getattr(found, group, {}).values()
    )


def _of_pydantic_dataclass(type_: Any) -> Schema:
    if not type_.__pydantic_complete__:
        rebuild_dataclass(type_, raise_errors=False, _types_namespace=_names_of(type_))
    fields = tuple(_model_fields(type_.__pydantic_fields__))
    validate = TypeAdapter(type_).validate_python
    return Schema(
        type_,
        fields,
        _by_validator(validate, fields),
        _reader(fields),
        validate=functools.partial(validate, by_name=True) if _sees_data(type_) else None,
        is_complete=type_.__pydantic_complete__,
    )


#: of each field: name, keyword of the constructor, aliases
_FieldNames: TypeAlias = Iterable[tuple[str, str, tuple[str, ...]]]


def _of_constructor(type_: Any, names: _FieldNames, annotations: Mapping[str, Any] | None = None) -> Schema:
    """Return the schema of a class whose fields are keywords of its constructor, unless they are set afterwards."""
    hints = {**(annotations or {}), **_bound_hints(type_)}
    parameters = _parameters(type_)
    fields = tuple(
        SchemaField(
            name,
            hints.get(name, Any),
            _is_required(parameters.get(keyword)),
            keyword if keyword in parameters else None,
            aliases,
        )
        for name, keyword, aliases in names
        if _public(name)
    )
    return Schema(type_, fields, type_, _reader(fields))


def _of_struct(type_: Any) -> Schema:
    names = zip(type_.__struct_fields__, type_.__struct_encode_fields__, strict=True)
    return _of_constructor(type_, ((name, name, () if name == alias else (alias,)) for name, alias in names))


def _of_attrs(type_: Any) -> Schema:
    known = type_.__attrs_attrs__
    annotations = {each.name: each.type or Any for each in known}
    return _of_constructor(type_, ((each.name, each.alias if each.init else "", ()) for each in known), annotations)


def _of_class(type_: type[Any]) -> Schema | None:
    """Return the schema of a class like OSGi's DTOs: fields are set by the constructor, or after construction."""
    hints = {
        name: annotation
        for name, annotation in _bound_hints(type_).items()
        if typing.get_origin(annotation) is not ClassVar and annotation is not ClassVar
    }
    for owner in type_.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        hints = dict.fromkeys((slots,) if isinstance(slots, str) else slots, Any) | hints
    parameters = _parameters(type_)
    if parameters:
        annotated = hints_of(type_.__new__ if type_.__init__ is object.__init__ else type_.__init__)
        hints = {name: annotated.get(name, Any) for name in parameters} | hints
    fields = [
        SchemaField(name, annotation, _is_required(parameters.get(name)), name if name in parameters else None)
        for name, annotation in hints.items()
        if _public(name)
    ]
    has_attributes = type_.__dictoffset__ != 0
    if not fields and not has_attributes:
        return None
    read_fields = _reader(fields)

    def read(instance: Any) -> dict[str, Any]:
        data = read_fields(instance)
        for name, value in vars(instance).items():
            if (
                name not in data
                and _public(name)
                and not isinstance(getattr(type_, name, None), functools.cached_property)
            ):
                data[name] = value
        return data

    return Schema(type_, tuple(fields), type_, read if has_attributes else read_fields)


def _parameters(type_: Any) -> dict[str, inspect.Parameter]:
    """Return the keywords of a constructor, if its signature can be read."""
    found: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(Exception):
        found = inspect.signature(type_).parameters
    return {name: each for name, each in found.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def _is_required(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is parameter.empty


def _reader(fields: Iterable[SchemaField]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads the fields of an instance that are set."""
    names = [each.name for each in fields]

    def read_one_by_one(instance: Any) -> dict[str, Any]:
        found = ((name, getattr(instance, name, MISSING)) for name in names)
        return {name: value for name, value in found if value is not MISSING}

    if not all(name.isidentifier() and name.isascii() and not keyword.iskeyword(name) for name in names):
        return read_one_by_one
    # Dataclasses make their constructors this way. It is three times as fast as any other.
    items = ", ".join(f"{name!r}: it.{name}" for name in names)
    read_all: Callable[[Any], dict[str, Any]] = eval(f"lambda it: {{{items}}}", {})  # noqa: S307

    def read(instance: Any) -> dict[str, Any]:
        try:
            return read_all(instance)
        except AttributeError:
            return read_one_by_one(instance)

    return read


# --- instances


def has_fields(value: Any) -> bool:
    """Return whether ``value`` is an instance of a schema."""
    return schema_of(type(value)) is not None


_topics: Final[BoundedCache[type[Any], str]] = BoundedCache(4096)


def topic_of(type_: type[Any]) -> str:
    """Return the topic made of the name of a class: ``package/module/ClassName`` (157.3.2). Cached.

    Raises:
        ArgumentError: ``type_`` is no class.
        InvalidTopicError: the name of the class is no topic, for example because it is defined in a function.
    """
    known = _topics.get(type_) if isinstance(type_, type) else None
    if known is not None:
        return known
    if not isinstance(type_, type):
        raise ArgumentError(f"a topic can be made of a class, not of {type_!r:.80}")
    name = f"{type_.__module__}.{type_.__qualname__}"
    topic = name.replace(".", "/")
    if not is_topic(topic):
        raise InvalidTopicError(topic, f"no topic can be made of the name of {name!r}: give a topic")
    _topics[type_] = topic
    return topic


def load_type(name: Any) -> Any:
    """Return the class that ``event.type`` gives or names; raise ``ArgumentError`` if it does not exist."""
    if not isinstance(name, str):
        if is_reified(name) and _is_type(name):
            return name
        raise ArgumentError(f"event.type must be a class or its qualified name, not {name!r:.80}")
    parts = name.replace(":", ".").split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module)
            for part in parts[end:]:
                found = getattr(found, part, None)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # the module is probably a class that encloses the named one
            raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: {error}") from error
        except (Exception, SystemExit) as error:  # importing a module may raise anything
            raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: {type(error).__name__}") from error
        if isinstance(found, type):
            return found
        break
    raise ArgumentError(f"event.type {name!r:.80} cannot be loaded: there is no such class")


def _is_type(type_: Any) -> bool:
    """Return whether ``type_`` is a class or made of classes: ``X | Y``, ``list[X]``, ``Page[X]``."""
    return (
        isinstance(type_, (type, typing.NewType))
        or typing.get_origin(type_) is not None
        or hasattr(type_, "__value__")  # type X = ...
    )


def is_reified(type_: Any) -> bool:
    """Return whether ``type_`` is a type that events can be converted to."""
    return not isinstance(type_, (str, TypeVar, typing.ForwardRef)) and not any(type_ is each for each in _OPEN)


_OPEN: Final = (None, Any, object, inspect.Parameter.empty)


def is_untyped(type_: Any) -> bool:
    """Return whether ``type_`` stands for data in map form."""
    origin = typing.get_origin(type_) or type_
    return origin is dict or origin is Mapping or origin is typing.Mapping or not is_reified(type_)
