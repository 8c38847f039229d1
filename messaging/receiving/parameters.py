"""Reads the annotation of a handler's only parameter: the model that its argument is decoded to."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from messaging.codecs import check_model
from messaging.errors import ArgumentError
from messaging.model import Message, maker

#: the parameter has no annotation
NOT_ANNOTATED: Final[Any] = inspect.Parameter.empty


class MessageParameter(NamedTuple):
    """The annotation ``Message`` or ``Message[model]``: the handler takes the message itself."""

    model: Any = None

    def argument(self, message: Message) -> Message:
        """Return the message with its model.

        Raises:
            CodecError: the payload does not fit the model.
        """
        if self.model is not None:
            message = maker(message.default_content_type)(message.payload, message.context, self.model)
            message.value()
        return message


def parameter_of(function: Callable[..., Any], role: str, argument: str) -> Any:
    """Return the evaluated annotation of a handler's only parameter.

    Args:
        function: the handler.
        role, argument: names of the handler and of its argument, for the error message.

    Returns:
        ``None`` if the handler takes no argument, ``NOT_ANNOTATED`` if its parameter has no annotation, and a
        :class:`MessageParameter` if it takes the message.

    Raises:
        ArgumentError: the handler needs other arguments, or its annotation is not a type that pydantic can validate.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in that does not say
        return NOT_ANNOTATED
    parameters = signature.parameters.values()
    positional = [each for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    needs_keyword = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in parameters)
    name = getattr(function, "__qualname__", type(function).__name__)
    if len(needed) > 1 or needs_keyword:
        raise ArgumentError(f"{role} takes one argument, {argument}; {name}{signature} needs others")
    if not positional:
        return None
    parameter = (needed or positional)[0]
    if parameter.annotation is parameter.empty:
        return NOT_ANNOTATED
    try:
        annotation = evaluated(function, parameter.name, parameter.annotation)
    except Exception as error:
        raise ArgumentError(f"the annotation of {parameter.name!r} in {name} cannot be evaluated: {error}") from error
    if annotation is NOT_ANNOTATED:
        return annotation
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, Message):
        (model,) = get_args(annotation) or (None,)
        if model is None or model is Any:
            return MessageParameter()
        check_model(model)
        return MessageParameter(model)
    check_model(annotation)
    return annotation


def evaluated(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Return one annotation of a function, evaluated; its other annotations may name what does not exist."""
    plain = inspect.unwrap(function if inspect.isroutine(function) else function.__call__)  # type: ignore[operator]
    plain = getattr(plain, "__func__", plain)
    stub = SimpleNamespace(__annotations__={name: annotation})
    return get_type_hints(stub, getattr(plain, "__globals__", {}), _closure(plain), include_extras=True)[name]


def _closure(function: Any) -> dict[str, Any]:
    """Return the variables of the enclosing functions; variables without a value are left out."""
    found = {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # assigned later, such as the registration of the handler itself
            found[name] = cell.cell_contents
    return found
