"""The JSON schema of configurations, for editors: completion, descriptions, and marks at wrong keys."""

from __future__ import annotations

from typing import Any, Final

from messaging.gateway.settings import GatewaySettings

#: where editors find it once it is published
SCHEMA_ID: Final = "https://rx-messaging.github.io/gateway.schema.json"
#: a value that is an environment variable
_VARIABLE: Final = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration."""
    found = GatewaySettings.model_json_schema(by_alias=True)
    _admit_texts(found)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **found}


def _admit_texts(node: Any) -> None:
    """Admit variables for numbers and booleans, in place."""
    if isinstance(node, list):
        for each in node:
            _admit_texts(each)
        return
    if not isinstance(node, dict):
        return
    for name, each in node.items():
        if name in ("properties", "$defs"):
            for inner in each.values():
                _admit_texts(inner)
        elif name not in ("default", "enum", "const"):
            _admit_texts(each)
    if node.get("type") in ("number", "integer", "boolean"):
        rules = {key: node.pop(key) for key in [*node] if key in _RULES}
        node["anyOf"] = [rules, _VARIABLE]


_RULES: Final = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"})
