"""Conversion of event data to the type that a handler wants (157.4.1), by the rules of OSGi's converter.

==================  ================================================================================================
to                  from
==================  ================================================================================================
a schema            a mapping, or an instance of any schema: field by field, by name or alias. Missing fields take
                    their defaults, unknown ones are ignored
a mapping           a mapping, or an instance of a schema; keys and values are converted
a collection        any collection, element by element; a single value becomes the only element, ``None`` no element
a single value      a collection: its first element
``bool``            a number: whether it is not 0; text: ``true false yes no on off 1 0``, and empty text for false
a number            any number (``int`` drops the fraction), text, a date (milliseconds since 1970), a timedelta
                    (seconds), an enum (its value)
``str``             any simple value except ``None`` and classes; a date as ISO 8601; an enum as its name, or as its
                    value if that is text; flags without a name as their number
``bytes``           text, as UTF-8, and the reverse; a collection of numbers from 0 to 255
an enum             its member, its value, its name in any case, its position unless its values are numbers; a member
                    of another enum by its name, or else by its value. Unknown bits of flags are an error, unless the
                    class sets a ``boundary`` that accepts them; before Python 3.11.4 ``CONFORM`` is an error, too
a date or a time    ISO 8601; a number (milliseconds since 1970, UTC). A timedelta: ISO 8601; a number (seconds)
``X | Y``           the type that fits without conversion, else the first that the value can be converted to; of
                    several schemas first the one that has most of the fields
``Annotated``       as the plain type, then validated by pydantic against the metadata; validators that see the value
                    before its conversion are called with that
``Any``             any value; instances of schemas become maps, and mutable values are copied
any other type      an instance of it, or a value that pydantic converts to it
==================  ================================================================================================

``None`` becomes ``False`` for ``bool``, 0 for numbers and an empty collection, as in OSGi. For any other type without
``None`` it counts as a missing value: a field takes its default, and a field without a default is an error.

An instance of the wanted type is passed on unchanged. Annotations that cannot be resolved stand for ``Any``. Types are
compiled once. All functions are thread safe.

**pydantic.** A ``TypeAdapter`` validates metadata of ``Annotated``, pydantic's own models, and types that the table
does not name. For the others its rules differ from the table: it refuses single values for collections, schemas for
mappings, ``None`` for numbers, and most conversions between simple types.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import threading
import types
import typing
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Reversible,
    Sequence,
    Set,
)
from typing import Any, Final, Literal, TypeAlias, Union

import typing_extensions
from pydantic import ValidationError

from messaging.codecs.cache import BoundedCache
from messaging.dispatch.eventdata.converters import (
    SHOWN_KEY,
    SHOWN_TYPE,
    SIMPLE,
    CompiledType,
    Converter,
    bounded,
    by_pydantic,
    elements_of,
    fail,
    family_of,
    has_fraction,
    instance_check,
    located,
    problem_of,
    record_of,
    to_data,
    to_enum,
    to_none,
    to_subclass,
    union_problem,
    validator_of,
    with_article,
)
from messaging.dispatch.eventdata.schema import (
    COMMON,
    MISSING,
    Schema,
    SchemaField,
    bound,
    hints_of,
    schema_of,
    sees_value,
)
from messaging.errors import ConversionError

_NONE: Final = frozenset({type(None)})


def convert(value: Any, target: Any) -> Any:
    """Convert ``value`` to ``target``.

    Args:
        value: event data: a mapping, an instance of a schema, or a part of one.
        target: a class, or any other annotation.

    Raises:
        ConversionError: the value cannot be converted. The error says where and why, and does not contain the value.
    """
    return converter_to(target)(value)


def converter_to(target: Any) -> Converter:
    """Return the function that converts to ``target``, always the same one. It raises only ``ConversionError``."""
    return _compiled(target).guarded


# --- compiling


#: by class, or by annotation and its text: ``X | Y`` equals ``Y | X``, but converts in another order
_known_types: Final[BoundedCache[Any, CompiledType]] = BoundedCache(4096)


def _compiled(type_: Any) -> CompiledType:
    try:
        key = type_ if isinstance(type_, type) else (type_, repr(type_))
        known = _known_types.get(key)
    except Exception:  # noqa: BLE001  # metadata may have no hash
        return _compile(type_)
    if known is None:
        made = _compile(type_)
        known = _known_types.get(key)
        if known is None:
            known = _known_types[key] = made
    return known


def _compile(type_: Any) -> CompiledType:
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any or type_ is object or type_ in _QUALIFIERS or isinstance(type_, _NAMES):
        return _ANY
    if type_ is None or type_ is type(None):
        return CompiledType(to_none, "none", _NONE)
    if isinstance(type_, typing.TypeVar):
        return _union(type_.__constraints__) if type_.__constraints__ else _compiled(type_.__bound__ or Any)
    if isinstance(type_, typing.NewType):
        return _compiled(type_.__supertype__)
    if origin is typing.Annotated:
        return _annotated(type_, arguments[0], type_.__metadata__)
    if isinstance(type_, _ALIASES) or isinstance(origin, _ALIASES):
        return _alias(type_, arguments)
    if origin in _QUALIFIERS:
        return _compiled(arguments[0])
    if origin is Literal:
        return _literal(arguments)
    if origin is Union or origin is types.UnionType:
        return _union(arguments)
    if typing_extensions.is_typeddict(origin or type_):
        return _typed_dict(type_)
    schema = schema_of(type_)
    if schema is not None:
        return _of_schema(schema) if schema.is_complete else _incomplete(type_, schema)
    class_ = origin or type_
    if isinstance(class_, type):
        return _class(type_, class_, arguments)
    return CompiledType(by_pydantic(type_, None), "")


def _of_schema(schema: Schema) -> CompiledType:
    return _root(schema) if schema.is_root else _schema(schema)


def _incomplete(type_: Any, schema: Schema) -> CompiledType:
    """Compile a model with undefined names, which may be defined when the first event comes."""
    target: CompiledType | None = None

    def converter(value: Any) -> Any:
        nonlocal target
        if target is None:
            found = schema_of(type_)
            if found is None or not found.is_complete:
                raise ConversionError("", f"{schema.type.__name__} refers to a class that is not defined")
            target = _of_schema(found)
        return target.convert(value)

    return CompiledType(converter, "record", schema=schema)


def _class(type_: Any, class_: type[Any], arguments: tuple[Any, ...]) -> CompiledType:
    """Compile a class that is no schema."""
    if class_ in SIMPLE:
        convert_it, family = SIMPLE[class_]
        return CompiledType(convert_it, family, frozenset({class_}))
    if hasattr(class_, "__get_pydantic_core_schema__"):
        return CompiledType(by_pydantic(type_, class_), "")
    if issubclass(class_, enum.Enum):
        return CompiledType(to_enum(class_), "enum", frozenset({class_}))
    for base in class_.__mro__:
        if base in SIMPLE:
            return CompiledType(to_subclass(class_, SIMPLE[base][0]), SIMPLE[base][1], frozenset({class_}))
    if issubclass(class_, Mapping):
        return _mapping(class_, arguments)
    if issubclass(class_, tuple):
        return _tuple(type_, class_, arguments)
    if class_ in _MADE_BY or issubclass(class_, _COLLECTIONS):
        return _each(_compiled(arguments[0] if arguments else Any), _MADE_BY.get(class_, class_))
    return CompiledType(by_pydantic(type_, class_), "")


#: qualifiers around a type in an annotation, kinds of aliases, and annotations that are not resolved
_QUALIFIERS: Final = tuple(
    getattr(module, name)
    for module in (typing, typing_extensions)
    for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if hasattr(module, name)
)
_ALIASES: Final = (typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType))
_NAMES: Final = (str, typing.ForwardRef, typing.ParamSpec, typing.TypeVarTuple)


def _alias(alias: Any, arguments: tuple[Any, ...]) -> CompiledType:
    """Compile ``type X = ...``, which may refer to itself."""

    def converter(value: Any) -> Any:
        meant = alias.__value__
        target = _compiled(meant[arguments] if arguments else meant)
        return value if type(value) in target.passes else target.convert(value)

    return CompiledType(converter, "")


# --- combinations


_ANY: Final = CompiledType(to_data, "", COMMON)


def _literal(values: tuple[Any, ...]) -> CompiledType:
    def converter(value: Any) -> Any:
        for each in values:
            if type(each) is type(value) and each == value:
                return each
        if value is not None:
            for each in values:
                try:
                    if _compiled(type(each)).guarded(value) == each:
                        return each
                except ConversionError:
                    continue
        raise fail(value, f"one of {', '.join(map(repr, values))}")

    return CompiledType(converter, "")


class _Attempts(threading.local):
    """Results of conversions to unions, for the duration of the outermost one.

    Without them, each member of a union that fails would repeat the attempts of all unions inside: exponential time.
    """

    #: by the ids of value and union, both kept so that their ids are not reused: the result or the error
    known: dict[tuple[int, int], tuple[Any, Any, Any, ConversionError | None]] | None = None


_attempts: Final = _Attempts()


def _union(members: tuple[Any, ...]) -> CompiledType:
    given = [(each, _compiled(each)) for each in members if each is not None and each is not type(None)]
    passes: frozenset[type[Any]] = frozenset().union(*(target.passes for _, target in given))
    if len(given) < len(members):
        passes |= _NONE
    if len(given) == 1:
        only = given[0][1]
        return CompiledType(only.convert, only.family, passes, only.schema)
    wanted = " or ".join(each.__name__ if isinstance(each, type) else str(each)[:SHOWN_TYPE] for each, _ in given)
    candidates = [(target, instance_check(each) if isinstance(each, type) else None) for each, target in given]

    def converter(value: Any) -> Any:
        known = outer = _attempts.known
        if known is None:
            known = _attempts.known = {}
        try:
            attempt = known.get((id(value), id(candidates)))
            if attempt is None:
                errors: list[tuple[str, Exception]] = []
                for target, _ in _sorted(candidates, value):
                    try:
                        attempt = value, candidates, target.convert(value), None
                        break
                    except Exception as error:  # noqa: BLE001  # the next member is tried
                        errors.append((target.family, error))
                else:
                    attempt = value, candidates, None, union_problem(errors, value, wanted)
                known[id(value), id(candidates)] = attempt
        finally:
            _attempts.known = outer
        if attempt[3] is not None:
            raise attempt[3]
        return attempt[2]

    return CompiledType(converter, "", passes)


_Candidate: TypeAlias = tuple[CompiledType, Callable[[Any], bool] | None]


def _sorted(candidates: list[_Candidate], value: Any) -> list[_Candidate]:
    """Return the members of a union in the order in which they are tried."""
    family = family_of(value)
    names = record_of(value, "").keys() if family == "record" else ()

    def distance(candidate: _Candidate) -> tuple[int, int]:
        target, is_instance = candidate
        if is_instance is not None and is_instance(value):
            return 0, 0
        if int in target.passes and family == "number" and has_fraction(value):
            return 3, 0
        known = [each for each in target.schema.fields if each.name in names] if target.schema is not None else ()
        return 1 if family == target.family else 2, -len(known)

    return sorted(candidates, key=distance)


def _each(element: CompiledType, make: Callable[[list[Any]], Any]) -> CompiledType:
    """Compile a collection that ``make`` makes of a list."""
    passes, convert_one = element.passes, element.convert

    def converter(value: Any) -> Any:
        made = [*elements_of(value)]
        if not passes.issuperset(map(type, made)):
            for index, each in enumerate(made):
                if type(each) in passes:
                    continue
                try:
                    made[index] = convert_one(each)
                except Exception as error:  # noqa: BLE001  # code in data and types may raise anything
                    raise located(f"[{index}]", error) from None
        if make is list:
            return made
        try:
            return make(made)
        except TypeError as error:
            if make in (set, frozenset):
                raise ConversionError("", "has elements that no set can have") from None
            raise problem_of(error) from None

    return CompiledType(converter, "collection")


_COLLECTIONS: Final = (list, set, frozenset, deque, collections.UserList)
#: functions that make a collection of a type from a list; other types are called themselves
_MADE_BY: Final[dict[type[Any], Callable[[list[Any]], Any]]] = {
    list: list,
    Collection: list,
    Container: list,
    Iterable: list,
    Iterator: iter,
    MutableSequence: list,
    Reversible: list,
    Sequence: list,
    Set: frozenset,
    MutableSet: set,
}


def _tuple(type_: Any, class_: type[Any], arguments: tuple[Any, ...]) -> CompiledType:
    if type_ is class_:
        return _each(_ANY, class_)
    flat = [part for each in arguments for part in _unpacked(each)]
    # At most one of them, an ellipsis, stands for any number of elements.
    at = flat.index(...) - 1 if ... in flat else len(flat)
    targets = [_compiled(each) for each in flat if each is not ...]
    first, last = targets[:at], targets[at + 1 :]
    more = targets[at : at + 1]
    if more and not first and not last:
        return _each(more[0], class_)

    def converter(value: Any) -> Any:
        values = [*elements_of(value)]
        wanted = [*first, *more * (len(values) - len(first) - len(last)), *last]
        if len(values) != len(wanted):
            raise ConversionError("", f"{len(values)} elements where {len(wanted)} are wanted")
        for index, target in enumerate(wanted):
            try:
                values[index] = target.guarded(values[index])
            except ConversionError as error:
                raise located(f"[{index}]", error) from None
        return class_(values)

    return CompiledType(converter, "collection")


def _unpacked(argument: Any) -> tuple[Any, ...]:
    """Return the arguments that ``*tuple[int, ...]`` or ``Unpack[tuple[int, ...]]`` stands for."""
    if typing.get_origin(argument) is typing_extensions.Unpack:
        return typing.get_args(typing.get_args(argument)[0])
    return typing.get_args(argument) if getattr(argument, "__unpacked__", False) else (argument,)


def _mapping(class_: type[Any], arguments: tuple[Any, ...]) -> CompiledType:
    if class_ is collections.Counter:
        arguments = (*arguments[:1], int)
    key_type, value_type = arguments if len(arguments) == 2 else (Any, Any)
    keys, values = _compiled(key_type), _compiled(value_type)
    make: Callable[[Any], Any] = dict if class_ in (dict, Mapping, MutableMapping) else class_
    if class_ is collections.defaultdict:
        factory = typing.get_origin(value_type) or value_type
        make = functools.partial(class_, factory if factory in _FACTORIES else None)

    def converter(value: Any) -> Any:
        given = record_of(value, "a mapping")
        if not (keys.passes.issuperset(map(type, given)) and values.passes.issuperset(map(type, given.values()))):
            found = {}
            for key, each in given.items():
                try:
                    found[keys.guarded(key)] = values.guarded(each)
                except (ConversionError, TypeError) as error:  # TypeError: the converted key has no hash
                    place = f"[{key[:SHOWN_KEY]!r}]" if isinstance(key, str) else "[...]"
                    raise located(place, error) from None
            given = found
        return given if make is dict else make(given)

    return CompiledType(converter, "record")


_FACTORIES: Final = (int, float, str, bool, list, dict, set)


def _typed_dict(type_: Any) -> CompiledType:
    """Compile a ``TypedDict`` with its first value: it may refer to classes that are defined later."""
    class_ = typing.get_origin(type_) or type_
    given = dict(zip(getattr(class_, "__parameters__", ()), typing.get_args(type_), strict=False))
    target: CompiledType | None = None

    def converter(value: Any) -> Any:
        nonlocal target
        if target is None:
            keys = class_.__required_keys__
            hints = hints_of(class_).items()
            fields = (SchemaField(name, bound(each, given), _must_be(each, name in keys), name) for name, each in hints)
            target = _schema(Schema(class_, tuple(fields), dict, dict))
        return target.convert(value)

    return CompiledType(converter, "record")


def _must_be(annotation: Any, is_required: bool) -> bool:
    """Return whether a key is required, from its annotation: the class does not evaluate string annotations."""
    while typing.get_origin(annotation) in _QUALIFIERS:
        if typing.get_origin(annotation) is typing.NotRequired:
            return False
        is_required = is_required or typing.get_origin(annotation) is typing.Required
        annotation = typing.get_args(annotation)[0]
    return is_required


# --- schemas


#: of each field: name, aliases, keyword, classes that are passed on, converter, whether it is required
_FieldPlan: TypeAlias = list[tuple[str, tuple[str, ...], str, frozenset[type[Any]], Converter, bool]]


def _planned(fields: Iterable[SchemaField]) -> _FieldPlan:
    return [
        (each.name, each.aliases[::-1], each.keyword or each.name, target.passes, target.convert, each.is_required)
        for each in fields
        for target in (_compiled(each.annotation),)
    ]


def _schema(schema: Schema) -> CompiledType:
    type_, make, validate = schema.type, schema.make, schema.validate
    wanted = with_article(type_)
    names = frozenset(name for each in schema.fields for name in (each.name, *each.aliases))
    set_afterwards = [each.name for each in schema.fields if each.keyword is None]
    is_instance = instance_check(type_)
    plan: _FieldPlan | None = None

    # One function, so that each level of an event needs one frame: this bounds the depth of events.
    def converter(value: Any) -> Any:
        nonlocal plan
        if type(value) is dict:
            given = value
        elif is_instance(value):
            return value
        else:
            of_value = schema_of(type(value))
            given = record_of(value, wanted) if of_value is None or of_value.is_root else of_value.read(value)
        if plan is None:  # compiled late: a class may contain itself
            plan = _planned(schema.fields)
        if validate is not None:
            with contextlib.suppress(Exception):  # refused: the fields are converted first
                return validate(bounded(to_data(given)))
        values: dict[str, Any] = {}
        get = given.get
        for name, aliases, keyword, passes, convert_it, is_required in plan:
            part = get(name, MISSING)
            if type(part) in passes:
                values[keyword] = part
                continue
            if part is MISSING:
                for alias in aliases:
                    part = get(alias, part)
            if part is not MISSING:
                try:
                    values[keyword] = part if type(part) in passes else convert_it(part)
                    continue
                except Exception as error:  # noqa: BLE001  # code in data and types may raise anything
                    if part is None and not is_required:
                        continue
                    raise located(name, error) from None
            if is_required:
                raise ConversionError(name, "is missing" if make is dict else "is missing, and has no default")
        if schema.takes_more:
            values |= {
                key: to_data(each)
                for key, each in given.items()
                if isinstance(key, str) and key not in names and not key.startswith("_")
            }
        afterwards = {name: values.pop(name, MISSING) for name in set_afterwards} if set_afterwards else None
        try:
            made = make(**values)
        except (ValidationError, RecursionError) as error:
            raise problem_of(error) from None
        except Exception as error:  # noqa: BLE001  # a constructor may raise anything
            raise ConversionError("", f"{type_.__name__}() raised {type(error).__name__}") from None
        if afterwards is not None:
            _set(made, afterwards)
        return made

    return CompiledType(converter, "record", frozenset({type_}), schema)


def _set(made: Any, values: Mapping[str, Any]) -> None:
    """Set the fields that the constructor does not set."""
    for name, value in values.items():
        try:
            if value is not MISSING:
                setattr(made, name, value)
            elif not hasattr(made, name):  # fields of a DTO are null by default
                setattr(made, name, None)
        except AttributeError:  # a computed field: a property, or one of a frozen dataclass
            continue
        except Exception as error:  # noqa: BLE001  # a setter may raise anything
            raise ConversionError(name, f"setting it raised {type(error).__name__}") from None


def _root(schema: Schema) -> CompiledType:
    """Compile a ``RootModel``: it is made of its content."""
    is_instance = instance_check(schema.type)

    def converter(value: Any) -> Any:
        if is_instance(value):
            return value
        if schema.validate is not None:
            with contextlib.suppress(Exception):  # refused: the content is converted first
                return schema.validate(bounded(to_data(value)))
        return schema.make(root=_compiled(schema.fields[0].annotation).guarded(value))

    return CompiledType(converter, "", frozenset({schema.type}))


# --- pydantic


def _annotated(type_: Any, plain: Any, metadata: tuple[Any, ...]) -> CompiledType:
    """Compile ``Annotated``: values are converted to the plain type, then validated against the metadata."""
    target = _compiled(plain)
    check = None if all(isinstance(each, str) for each in metadata) else validator_of(type_)
    if check is None:
        return target
    convert_it = target.guarded

    def converter(value: Any) -> Any:
        return check(convert_it(value))

    def after_raw(value: Any) -> Any:
        with contextlib.suppress(Exception):  # refused: the value is converted first
            return check(bounded(value))
        return converter(value)

    return CompiledType(after_raw if sees_value(metadata) else converter, target.family)
