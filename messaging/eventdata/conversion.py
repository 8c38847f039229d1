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
import datetime
import enum
import functools
import numbers
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
from pydantic import ConfigDict, TypeAdapter, ValidationError

from messaging.bounded import BoundedCache
from messaging.codecs.bounds import holds_vast, is_vast
from messaging.errors import ConversionError
from messaging.eventdata.problems import SHOWN_KEY, SHOWN_TYPE, fail, located, problem_of, with_article
from messaging.eventdata.schema import (
    COMMON,
    MISSING,
    Field,
    Schema,
    bound,
    has_fields,
    hints_of,
    is_collection,
    is_simple,
    schema_of,
    sees_value,
)
from messaging.eventdata.simple import (
    SIMPLE,
    Converter,
    instance_check,
    to_data,
    to_enum,
    to_none,
    to_subclass,
    unwrapped,
)

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
    return _target(target).guarded


# --- compiling


class _Target:
    """A compiled type that values are converted to.

    Args:
        convert: converts values that are not passed on. Raises ``ConversionError``, or any error of code in data and
            types.
        family: kind of its values, which orders the members of a union; empty if unknown.
        passes: classes whose direct instances are passed on unchanged.
        schema: the schema of the type, if it has one.
    """

    __slots__ = ("convert", "family", "guarded", "passes", "schema")

    def __init__(
        self, convert: Converter, family: str, passes: frozenset[type[Any]] = frozenset(), schema: Schema | None = None
    ) -> None:
        self.convert = convert
        self.family = family
        self.passes = passes
        self.schema = schema

        def guarded(value: Any) -> Any:
            if type(value) in passes:
                return value
            try:
                return convert(value)
            except ConversionError:
                raise
            except Exception as error:  # noqa: BLE001  # code in data and types may raise anything
                raise problem_of(error) from None

        self.guarded = guarded


#: by class, or by annotation and its text: ``X | Y`` equals ``Y | X``, but converts in another order
_targets: Final[BoundedCache[Any, _Target]] = BoundedCache(4096)


def _target(type_: Any) -> _Target:
    try:
        key = type_ if isinstance(type_, type) else (type_, repr(type_))
        known = _targets.get(key)
    except Exception:  # noqa: BLE001  # metadata may have no hash
        return _compile(type_)
    if known is None:
        made = _compile(type_)
        known = _targets.get(key)
        if known is None:
            known = _targets[key] = made
    return known


def _compile(type_: Any) -> _Target:
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any or type_ is object or type_ in _QUALIFIERS or isinstance(type_, _NAMES):
        return _ANY
    if type_ is None or type_ is type(None):
        return _Target(to_none, "none", _NONE)
    if isinstance(type_, typing.TypeVar):
        return _union(type_.__constraints__) if type_.__constraints__ else _target(type_.__bound__ or Any)
    if isinstance(type_, typing.NewType):
        return _target(type_.__supertype__)
    if origin is typing.Annotated:
        return _annotated(type_, arguments[0], type_.__metadata__)
    if isinstance(type_, _ALIASES) or isinstance(origin, _ALIASES):
        return _alias(type_, arguments)
    if origin in _QUALIFIERS:
        return _target(arguments[0])
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
    return _Target(_by_pydantic(type_, None), "")


def _of_schema(schema: Schema) -> _Target:
    return _root(schema) if schema.is_root else _schema(schema)


def _incomplete(type_: Any, schema: Schema) -> _Target:
    """Compile a model with undefined names, which may be defined when the first event comes."""
    target: _Target | None = None

    def converter(value: Any) -> Any:
        nonlocal target
        if target is None:
            found = schema_of(type_)
            if found is None or not found.is_complete:
                raise ConversionError("", f"{schema.type.__name__} refers to a class that is not defined")
            target = _of_schema(found)
        return target.convert(value)

    return _Target(converter, "record", schema=schema)


def _class(type_: Any, class_: type[Any], arguments: tuple[Any, ...]) -> _Target:
    """Compile a class that is no schema."""
    if class_ in SIMPLE:
        convert_it, family = SIMPLE[class_]
        return _Target(convert_it, family, frozenset({class_}))
    if hasattr(class_, "__get_pydantic_core_schema__"):
        return _Target(_by_pydantic(type_, class_), "")
    if issubclass(class_, enum.Enum):
        return _Target(to_enum(class_), "enum", frozenset({class_}))
    for base in class_.__mro__:
        if base in SIMPLE:
            return _Target(to_subclass(class_, SIMPLE[base][0]), SIMPLE[base][1], frozenset({class_}))
    if issubclass(class_, Mapping):
        return _mapping(class_, arguments)
    if issubclass(class_, tuple):
        return _tuple(type_, class_, arguments)
    if class_ in _MADE_BY or issubclass(class_, _COLLECTIONS):
        return _collection(class_, arguments)
    return _Target(_by_pydantic(type_, class_), "")


#: qualifiers around a type in an annotation, kinds of aliases, and annotations that are not resolved
_QUALIFIERS: Final = tuple(
    getattr(module, name)
    for module in (typing, typing_extensions)
    for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if hasattr(module, name)
)
_ALIASES: Final = (typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType))
_NAMES: Final = (str, typing.ForwardRef, typing.ParamSpec, typing.TypeVarTuple)


def _alias(alias: Any, arguments: tuple[Any, ...]) -> _Target:
    """Compile ``type X = ...``, which may refer to itself."""

    def converter(value: Any) -> Any:
        meant = alias.__value__
        target = _target(meant[arguments] if arguments else meant)
        return value if type(value) in target.passes else target.convert(value)

    return _Target(converter, "")


# --- combinations


_ANY: Final = _Target(to_data, "", COMMON)


def _literal(values: tuple[Any, ...]) -> _Target:
    def converter(value: Any) -> Any:
        for each in values:
            if type(each) is type(value) and each == value:
                return each
        if value is not None:
            for each in values:
                try:
                    if _target(type(each)).guarded(value) == each:
                        return each
                except ConversionError:
                    continue
        raise fail(value, f"one of {', '.join(map(repr, values))}")

    return _Target(converter, "")


class _Attempts(threading.local):
    """Results of conversions to unions, for the duration of the outermost one.

    Without them, each member of a union that fails would repeat the attempts of all unions inside: exponential time.
    """

    #: by the ids of value and union, both kept so that their ids are not reused: the result or the error
    known: dict[tuple[int, int], tuple[Any, Any, Any, ConversionError | None]] | None = None


_attempts: Final = _Attempts()


def _union(members: tuple[Any, ...]) -> _Target:
    given = [(each, _target(each)) for each in members if each is not None and each is not type(None)]
    passes: frozenset[type[Any]] = frozenset().union(*(target.passes for _, target in given))
    if len(given) < len(members):
        passes |= _NONE
    if len(given) == 1:
        only = given[0][1]
        return _Target(only.convert, only.family, passes, only.schema)
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
                    attempt = value, candidates, None, _union_problem(errors, value, wanted)
                known[id(value), id(candidates)] = attempt
        finally:
            _attempts.known = outer
        if attempt[3] is not None:
            raise attempt[3]
        return attempt[2]

    return _Target(converter, "", passes)


def _union_problem(errors: list[tuple[str, Exception]], value: Any, wanted: str) -> ConversionError:
    """Return the error of a failed union: that of the only member of the value's family, if there is one."""
    family = _family(value)
    alike = [error for each, error in errors if each == family]
    if len(alike) != 1:
        return fail(value, wanted)
    return problem_of(alike[0])


_Candidate: TypeAlias = tuple[_Target, Callable[[Any], bool] | None]


def _sorted(candidates: list[_Candidate], value: Any) -> list[_Candidate]:
    """Return the members of a union in the order in which they are tried."""
    family = _family(value)
    names = _record(value, "").keys() if family == "record" else ()

    def distance(candidate: _Candidate) -> tuple[int, int]:
        target, is_instance = candidate
        if is_instance is not None and is_instance(value):
            return 0, 0
        if int in target.passes and family == "number" and _has_fraction(value):
            return 3, 0
        known = [each for each in target.schema.fields if each.name in names] if target.schema is not None else ()
        return 1 if family == target.family else 2, -len(known)

    return sorted(candidates, key=distance)


def _has_fraction(value: Any) -> bool:
    """Return whether a number would lose a part if it became an ``int``."""
    try:
        return is_vast(value) or bool(int(value) != value)
    except (ValueError, TypeError, ArithmeticError):
        return True


def _family(value: Any) -> str:
    """Return the kind of a value; see ``_Target``."""
    value = unwrapped(value)
    for types_, family in _FAMILIES:
        if isinstance(value, types_):
            return family
    if has_fields(value):
        return "record"
    return "collection" if is_collection(value) else ""


_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (bool, "bool"),
    (enum.Enum, "enum"),
    (numbers.Number, "number"),
    (str, "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    ((datetime.date, datetime.time, datetime.timedelta), "time"),
    (Mapping, "record"),
)


def _elements(value: Any) -> Iterable[Any]:
    """Return the elements that a collection is made of."""
    if value is None:
        return ()
    found: Iterable[Any] = value if is_collection(value) else unwrapped(value)
    if is_collection(found):
        return found
    if isinstance(found, (Sequence, Set)) and not is_simple(found) and not has_fields(found):
        return found
    return (found,)


def _each(element: _Target, make: Callable[[list[Any]], Any]) -> _Target:
    """Compile a collection that ``make`` makes of a list."""
    passes, convert_one = element.passes, element.convert

    def converter(value: Any) -> Any:
        made = [*_elements(value)]
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

    return _Target(converter, "collection")


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


def _collection(class_: type[Any], arguments: tuple[Any, ...]) -> _Target:
    return _each(_target(arguments[0] if arguments else Any), _MADE_BY.get(class_, class_))


def _tuple(type_: Any, class_: type[Any], arguments: tuple[Any, ...]) -> _Target:
    if type_ is class_:
        return _each(_ANY, class_)
    flat = [part for each in arguments for part in _unpacked(each)]
    # At most one of them, an ellipsis, stands for any number of elements.
    at = flat.index(...) - 1 if ... in flat else len(flat)
    targets = [_target(each) for each in flat if each is not ...]
    first, last = targets[:at], targets[at + 1 :]
    more = targets[at : at + 1]
    if more and not first and not last:
        return _each(more[0], class_)

    def converter(value: Any) -> Any:
        values = [*_elements(value)]
        wanted = [*first, *more * (len(values) - len(first) - len(last)), *last]
        if len(values) != len(wanted):
            raise ConversionError("", f"{len(values)} elements where {len(wanted)} are wanted")
        for index, target in enumerate(wanted):
            try:
                values[index] = target.guarded(values[index])
            except ConversionError as error:
                raise located(f"[{index}]", error) from None
        return class_(values)

    return _Target(converter, "collection")


def _unpacked(argument: Any) -> tuple[Any, ...]:
    """Return the arguments that ``*tuple[int, ...]`` or ``Unpack[tuple[int, ...]]`` stands for."""
    if typing.get_origin(argument) is typing_extensions.Unpack:
        return typing.get_args(typing.get_args(argument)[0])
    return typing.get_args(argument) if getattr(argument, "__unpacked__", False) else (argument,)


def _record(value: Any, wanted: str) -> dict[Any, Any]:
    """Return the keys and values of a mapping, or the names and values of fields."""
    if isinstance(value, Mapping):
        return dict(value)
    schema = None if is_simple(value) else schema_of(type(value))
    if schema is not None:
        return _record(value.root, wanted) if schema.is_root else schema.read(value)
    if is_collection(value):
        first = next(iter(value), None)
        if isinstance(first, Mapping) or has_fields(first):
            return _record(first, wanted)
    raise fail(value, wanted)


def _mapping(class_: type[Any], arguments: tuple[Any, ...]) -> _Target:
    if class_ is collections.Counter:
        arguments = (*arguments[:1], int)
    key_type, value_type = arguments if len(arguments) == 2 else (Any, Any)
    keys, values = _target(key_type), _target(value_type)
    make: Callable[[Any], Any] = dict if class_ in (dict, Mapping, MutableMapping) else class_
    if class_ is collections.defaultdict:
        factory = typing.get_origin(value_type) or value_type
        make = functools.partial(class_, factory if factory in _FACTORIES else None)

    def converter(value: Any) -> Any:
        given = _record(value, "a mapping")
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

    return _Target(converter, "record")


_FACTORIES: Final = (int, float, str, bool, list, dict, set)


def _typed_dict(type_: Any) -> _Target:
    """Compile a ``TypedDict`` with its first value: it may refer to classes that are defined later."""
    class_ = typing.get_origin(type_) or type_
    given = dict(zip(getattr(class_, "__parameters__", ()), typing.get_args(type_), strict=False))
    target: _Target | None = None

    def converter(value: Any) -> Any:
        nonlocal target
        if target is None:
            keys = class_.__required_keys__
            hints = hints_of(class_).items()
            fields = (Field(name, bound(each, given), _must_be(each, name in keys), name) for name, each in hints)
            target = _schema(Schema(class_, tuple(fields), dict, dict))
        return target.convert(value)

    return _Target(converter, "record")


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


def _planned(fields: Iterable[Field]) -> _FieldPlan:
    return [
        (each.name, each.aliases[::-1], each.keyword or each.name, target.passes, target.convert, each.is_required)
        for each in fields
        for target in (_target(each.annotation),)
    ]


def _schema(schema: Schema) -> _Target:
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
            given = _record(value, wanted) if of_value is None or of_value.is_root else of_value.read(value)
        if plan is None:  # compiled late: a class may contain itself
            plan = _planned(schema.fields)
        if validate is not None:
            with contextlib.suppress(Exception):  # refused: the fields are converted first
                return validate(_bounded(to_data(given)))
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

    return _Target(converter, "record", frozenset({type_}), schema)


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


def _root(schema: Schema) -> _Target:
    """Compile a ``RootModel``: it is made of its content."""
    is_instance = instance_check(schema.type)

    def converter(value: Any) -> Any:
        if is_instance(value):
            return value
        if schema.validate is not None:
            with contextlib.suppress(Exception):  # refused: the content is converted first
                return schema.validate(_bounded(to_data(value)))
        return schema.make(root=_target(schema.fields[0].annotation).guarded(value))

    return _Target(converter, "", frozenset({schema.type}))


# --- pydantic


def _validator(type_: Any) -> Converter | None:
    """Return pydantic's validation of a type, or ``None`` if it has none."""
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        with contextlib.suppress(Exception):  # pydantic raises many kinds
            adapter: TypeAdapter[Any] = TypeAdapter(type_, config=config)
            if not adapter.pydantic_complete:
                adapter.rebuild(raise_errors=True)
            return adapter.validate_python
    return None


def _annotated(type_: Any, plain: Any, metadata: tuple[Any, ...]) -> _Target:
    """Compile ``Annotated``: values are converted to the plain type, then validated against the metadata."""
    target = _target(plain)
    check = None if all(isinstance(each, str) for each in metadata) else _validator(type_)
    if check is None:
        return target
    convert_it = target.guarded

    def converter(value: Any) -> Any:
        return check(convert_it(value))

    def after_raw(value: Any) -> Any:
        with contextlib.suppress(Exception):  # refused: the value is converted first
            return check(_bounded(value))
        return converter(value)

    return _Target(after_raw if sees_value(metadata) else converter, target.family)


def _by_pydantic(type_: Any, class_: type[Any] | None) -> Converter:
    """Return a converter for types that the table does not name."""
    is_instance = None if class_ is None else instance_check(class_)
    validate = _validator(type_)
    wanted = with_article(class_) if class_ is not None else str(type_)[:SHOWN_TYPE]

    def converter(value: Any) -> Any:
        if is_instance is not None and is_instance(value):
            return value
        if validate is None:
            raise fail(value, wanted)
        return validate(_bounded(value))

    return converter


def _bounded(value: Any) -> Any:
    """Return ``value`` unless it contains a number that takes pydantic very long to convert."""
    if holds_vast(value):
        raise ConversionError("", "has a number in it whose exponent or number of digits is out of bounds")
    return value
