"""Configuration files of a gateway: TOML or YAML to settings, each problem with its line and key.

``${NAME}`` in a text is the value of an environment variable, ``${NAME:-text}`` with a default; ``$$`` stands for
``$``. A value that is nothing but a variable may also stand for a number or a boolean. Relative paths are relative to
the folder of the file.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from pydantic import ValidationError

from messaging.codecs.cache import BoundedCache
from messaging.errors import ConfigurationError, MissingExtraError
from messaging.errors.checks import check_path
from messaging.errors.text import did_you_mean
from messaging.gateway.checks import check_into
from messaging.gateway.positions import toml_positions
from messaging.gateway.problems import KeyPath, Positions, Problem, Problems, TextPosition
from messaging.gateway.settings import PATH_OPTIONS, GatewaySettings

logger = logging.getLogger(__name__)

#: largest file, bytes
_MAX_BYTES: Final = 2**20
#: values of a document, at most: aliases of YAML multiply
_MAX_VALUES: Final = 100_000
#: warnings that were logged: a reload reads the file again
_warned: BoundedCache[str, bool] = BoundedCache(1000)
_TOML_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
#: ``$$``, a variable with its default, and what looks like one
_VARIABLE: Final = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|(\$\{[^}]*\}?)")
_WHOLE_VARIABLE: Final = re.compile(r"\$\{[^{}]*\}")
#: settings with a path that is relative to the file
_PATHS: Final = (("data",), *(("instances", None, each) for each in PATH_OPTIONS))
#: the same in the query of a URL
_URL_PATH: Final = re.compile(rf"(?<=[?&])({'|'.join(PATH_OPTIONS)})=([^&#]+)")
_KINDS: Final[Mapping[str, str]] = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a number", "string_type": "a text",
    "list_type": "an array", "dict_type": "a table", "model_type": "a table", "model_attributes_type": "a table",
    "path_type": "a path",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a file says.

    Attributes:
        settings: ``None`` if the file has errors.
        problems: errors and warnings, in the order of their lines.
    """

    settings: GatewaySettings | None
    problems: tuple[Problem, ...]


def load(path: str | Path) -> GatewaySettings:
    """Return the settings of a configuration file; log each of its warnings, once in a process.

    Functions and models that the file names may be in modules beside it: its folder is added to ``sys.path``, at the
    end, if it names any.

    Args:
        path: of a ``.toml`` file, or of a ``.yaml`` or ``.yml`` one (extra ``yaml``).

    Raises:
        GatewaySettingsError: the file has errors; the text has a line for each.
        ConfigurationError: the file cannot be read.
        MissingExtraError: YAML needs the extra.
    """
    problems, settings = _read(check_path("path", path))
    problems.raise_errors()
    for each in map(str, problems.found):
        if each not in _warned:
            _warned[each] = True
            logger.warning("%s", each)
    assert settings is not None  # noqa: S101  # without settings there are errors
    return settings


def read(path: str | Path) -> Configuration:
    """Return what a configuration file says, with all its problems.

    Raises:
        ConfigurationError: the file cannot be read.
        MissingExtraError: YAML needs the extra.
    """
    problems, settings = _read(check_path("path", path))
    return Configuration(None if problems.has_errors else settings, tuple(problems.found))


def _read(path: Path) -> tuple[Problems, GatewaySettings | None]:
    text = _text(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigurationError(f"{path}: the name of a configuration ends with {', '.join(_PARSERS)}")
    failed = Problems(str(path))
    document, positions = parse(text, failed)
    if document is None:
        return failed, None
    problems = Problems(str(path), positions)
    variables: dict[KeyPath, bool] = {}
    document = _filled(document, problems, variables, ())
    _resolve_paths(document, path.resolve().parent)
    settings = _validated(document, problems, variables)
    if settings is not None and not problems.has_errors:
        _admit_modules(settings, path.resolve().parent)
        check_into(settings, problems, variables)
    return problems, settings


def _admit_modules(settings: GatewaySettings, folder: Path) -> None:
    """Have modules beside the file found, if it names functions or models; installed ones come first."""
    named = any(step.call or step.model for route in settings.routes.values() for step in route.transform)
    if named and str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"configuration {path}: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"configuration {path}: it has more than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"configuration {path}:{line}: a byte is no UTF-8: save the file as UTF-8") from None


# --- TOML and YAML


def _parse_toml(text: str, problems: Problems) -> tuple[dict[str, Any] | None, Positions]:
    try:
        return tomllib.loads(text), toml_positions(text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        what = str(error)[: place.start()] if place is not None else str(error)
        if place is None or place.group(1) is None:
            position = TextPosition(text.count("\n") + 1, 1)
        else:
            position = TextPosition(int(place.group(1)), int(place.group(2)))
        problems.at(position, f"this is no TOML: {what}")
    except RecursionError:
        problems.at(TextPosition(1, 1), "arrays or tables are nested too deep")
    return None, {}


def _parse_yaml(text: str, problems: Problems) -> tuple[dict[str, Any] | None, Positions]:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("yaml", "a configuration in YAML") from None
    positions: dict[KeyPath, TextPosition] = {}
    position = TextPosition(1, 1)
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, {}
            _note_yaml(node, (), positions, problems, [0])
            if problems.has_errors:
                return None, {}
            document = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            position = TextPosition(mark.line + 1, mark.column + 1)
        wrong = f"this is no YAML: {error.problem or error.context}"
    except yaml.YAMLError as error:
        wrong = f"this is no YAML: {error}".splitlines()[0]
    except RecursionError:
        wrong = "values are nested too deep"
    except ValueError as error:  # of a date that does not exist, say
        wrong = f"a value is not valid YAML: {error}"
    else:
        if isinstance(document, dict):
            return document, positions
        wrong = "the document must be a mapping with the keys name, data, instances and routes"
    problems.at(position, wrong)
    return None, {}


def _note_yaml(
    node: Any, path: KeyPath, positions: dict[KeyPath, TextPosition], problems: Problems, count: list[int]
) -> None:
    """Note where keys and elements stand; record keys that are no texts, and keys that are there twice."""
    count[0] += 1
    if count[0] > _MAX_VALUES:
        problems.at(TextPosition(1, 1), f"the document has more than {_MAX_VALUES} values")
        raise RecursionError
    if node.id == "mapping":
        seen: set[str] = set()
        for key, value in node.value:
            position = TextPosition(key.start_mark.line + 1, key.start_mark.column + 1)
            if key.id != "scalar" or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                problems.at(position, "a key must be a text: put it in quotes")
                continue
            if key.value in seen:
                problems.at(position, f"the key {key.value!r} is there twice in one mapping")
            seen.add(key.value)
            inner = path if key.tag.endswith("merge") else (*path, key.value)
            positions.setdefault(inner, position)
            _note_yaml(value, inner, positions, problems, count)
    elif node.id == "sequence":
        for number, value in enumerate(node.value):
            element = (*path, number)
            positions[element] = TextPosition(value.start_mark.line + 1, value.start_mark.column + 1)
            _note_yaml(value, element, positions, problems, count)


_PARSERS: Final = {".toml": _parse_toml, ".yaml": _parse_yaml, ".yml": _parse_yaml}


# --- environment variables and paths


def _filled(value: Any, problems: Problems, variables: dict[KeyPath, bool], path: KeyPath) -> Any:
    """Return a value with the variables of its texts put in; note each, and whether it is nothing but a variable."""
    if isinstance(value, dict):
        return {key: _filled(each, problems, variables, (*path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, problems, variables, (*path, number)) for number, each in enumerate(value)]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replaced(found: re.Match[str]) -> str:
        name, default, wrong = found[1], found[2], found[3]
        if wrong is not None:
            problems.error(path, "a variable is written ${NAME} or ${NAME:-default}; $$ stands for $")
            return ""
        if name is None:
            return "$"
        variables[path] = _WHOLE_VARIABLE.fullmatch(value) is not None
        given: str | None = os.environ.get(name, default)
        if given is None:
            problems.error(path, f"the environment variable {name} is not set; ${{{name}:-text}} gives a default")
            return ""
        return given

    return _VARIABLE.sub(replaced, value)


def _resolve_paths(document: dict[str, Any], folder: Path) -> None:
    for pattern in _PATHS:
        tables: list[Any] = [document]
        for part in pattern[:-1]:
            tables = [
                inner
                for table in tables
                if isinstance(table, dict)
                for inner in (table.values() if part is None else [table.get(part)])
            ]
        for table in tables:
            if isinstance(table, dict) and isinstance(table.get(pattern[-1]), str) and table[pattern[-1]]:
                table[pattern[-1]] = _resolved(table[pattern[-1]], folder)
    instances = document.get("instances")
    for instance in instances.values() if isinstance(instances, dict) else ():
        if isinstance(instance, dict) and isinstance(instance.get("url"), str):
            instance["url"] = _URL_PATH.sub(
                lambda found: f"{found[1]}={quote(_resolved(unquote(found[2]), folder), safe='/')}", instance["url"]
            )


def _resolved(path: str, folder: Path) -> str:
    """Return a path of a configuration in ``folder``; ``~`` is the home of the user."""
    return str(folder / Path(path).expanduser())


# --- validation


def _validated(
    document: dict[str, Any], problems: Problems, variables: Mapping[KeyPath, bool]
) -> GatewaySettings | None:  # fmt: skip
    for attempt in range(2):
        try:
            return GatewaySettings.model_validate(document)
        except ValidationError as error:
            found = error.errors(include_input=False, include_url=False)
            if attempt == 0 and _convert(document, found, variables):
                continue
            for each in found:
                path, text = _described(each)
                problems.error(path, text)
    return None


def _convert(document: dict[str, Any], found: list[Any], variables: Mapping[KeyPath, bool]) -> bool:
    """Convert variables that stand for a number or a boolean; return whether there was one."""
    converted = False
    for each in found:
        path = tuple(each["loc"])
        if variables.get(path) and each["type"] in ("int_type", "float_type", "bool_type", "literal_error"):
            table: Any = document
            for part in path[:-1]:
                table = table[part]
            value = _scalar(table[path[-1]])
            if value is not None:
                table[path[-1]] = value
                converted = True
    return converted


def _scalar(text: str) -> int | float | bool | None:
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(lowered)
        except ValueError:
            continue
    return None


def _described(error: Any) -> tuple[KeyPath, str]:
    """Return the place of an error of pydantic, and what is wrong and what would be right."""
    path: KeyPath = tuple(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if path and path[-1] == "[key]":  # of a table whose keys are names
        return path[:-1], (
            f"{path[-2]!r} is no name: a name has letters, digits and the characters '_.-', begins with a letter or "
            "digit, and has at most 63 characters"
        )
    known = _table_at(path[:-1])
    if kind == "extra_forbidden":
        hint = did_you_mean(str(path[-1]), known) or f"known keys: {', '.join(known)}"
        return path, f"unknown key {path[-1]!r}; {hint}"
    if kind == "missing":
        return path, f"is missing{_meaning(known, path[-1])}"
    if kind in _KINDS:
        return path, f"must be {_KINDS[kind]}{_meaning(known, path[-1])}"
    if kind == "literal_error":
        return path, f"must be {context['expected']}"
    if kind == "string_pattern_mismatch":
        if str(context.get("pattern", "")).startswith("^[A-Za-z_]"):
            return path, "must name an object as 'package.module:name'"
        return path, "must have letters, digits and the characters '_.-', 63 at most, and begin with a letter or digit"
    if kind in ("string_too_short", "too_short"):
        return path, f"must not be empty{_meaning(known, path[-1])}"
    text = str(error["msg"]).removeprefix("Value error, ")
    text = text.replace("Input should be", "must be").replace("Value should have", "must have")
    return path, text[:1].lower() + text[1:]


def _meaning(table: Mapping[Any, Any], key: str | int) -> str:
    """Return the description of a key, for the end of a sentence."""
    text = table.get(key, {}).get("description")
    return f": {text}" if text else ""


_schema: Final = cache(GatewaySettings.model_json_schema)


def _table_at(path: KeyPath) -> Mapping[Any, Any]:
    """Return the JSON schemas of the keys of the table at a path; nothing if no keys are known there."""
    schema = _schema()
    found: Any = schema
    for part in path:
        inner = [*found.get("patternProperties", {}).values(), found.get("items")]  # of a table with names, an array
        found = found.get("properties", {}).get(part) or inner[0]
        if found is None:
            return {}
        found = next((each for each in found.get("anyOf", ()) if "$ref" in each), found)  # of an optional table
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    keys: Mapping[Any, Any] = found.get("properties", {})
    return keys
