"""The exception tree: as printed at the top of its module, and nothing beside it."""

from __future__ import annotations

import inspect
import pickle
import re

import messaging
from messaging import errors
from messaging.testing.tables import table


def defined() -> dict[str, type[Exception]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }


def printed() -> dict[str, tuple[str | None, str | None]]:
    """Name -> (parent, standard library base) as the module's docstring draws them."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"\s{4}([│├└─\s]*)(\w+Error)(?: \((\w+)\))?", line)
        if not found:
            continue
        depth = len(found[1])
        while path and path[-1][0] >= depth:
            path.pop()
        tree[found[2]] = (path[-1][1] if path else None, found[3])
        path.append((depth, found[2]))
    return tree


def test_the_tree_is_the_one_that_is_printed() -> None:
    tree = printed()
    assert set(tree) == set(defined())
    for name, (parent, standard) in tree.items():
        kind = defined()[name]
        bases = {base.__name__ for base in kind.__bases__}
        assert bases == {parent or "Exception"} | ({standard} if standard else set()), name


@table("name", sorted(defined()))
def test_every_error_has_one_root_and_a_docstring(name: str) -> None:
    kind = defined()[name]
    assert issubclass(kind, errors.MessagingError)
    assert kind.__doc__


def test_exported_errors_are_those_of_the_module() -> None:
    assert {name for name in messaging.__all__ if name.endswith("Error")} <= set(defined())
    assert len(set(messaging.__all__)) == len(messaging.__all__)


def test_errors_have_attributes_and_bases_for_programs() -> None:
    assert issubclass(errors.OutcomeUnknownError, TimeoutError)
    assert issubclass(errors.InvalidChannelError, ValueError)
    assert issubclass(errors.InvalidUrlError, ValueError)
    assert not issubclass(errors.ConnectFailedError, ValueError)
    assert errors.InvalidOptionError("x", "text").option == "x"
    assert errors.MissingExtraError("mqtt", "mqtt://").extra == "mqtt"
    assert "pip install 'rx-messaging[mqtt]'" in str(errors.MissingExtraError("mqtt", "mqtt://"))
    assert errors.InvalidExtensionError("qos", "text").key == "qos"
    assert str(errors.InvalidExtensionError("qos", "text")) == "extension 'qos': text"
    assert errors.InvalidFilterError("text", 3).position == 3
    unsupported = errors.UnsupportedFeatureError("f", "i", "why", supported=["b", "a"])
    assert (unsupported.feature, unsupported.instance) == ("f", "i")
    assert str(unsupported) == "'i' does not support 'f': why (supported: a, b)"
    assert str(errors.UnsupportedFeatureError("f", "i")) == "'i' does not support 'f'"


@table(
    "error",
    [
        errors.MessagingError("text"),
        errors.InvalidOptionError("url", "option 'url' is wrong"),
        errors.MissingExtraError("mqtt", "mqtt://"),
        errors.InvalidExtensionError("qos", "must be 1"),
        errors.PayloadTooLargeError(10, 5, "MQTT"),
        errors.UnsupportedFeatureError("qos", "m", supported=["a"]),
        errors.UnknownKeywordError("on", "qoss", "m", "did you mean 'qos'?"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: errors.MessagingError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
