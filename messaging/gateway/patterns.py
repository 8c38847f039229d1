"""Channel patterns with captures, and channels and texts made of captured values.

A pattern such as ``site/{site}/+/telemetry`` captures a level under a name; ``{rest#}`` as last level captures all last
levels, which may be none. A template such as ``uplink/{site}`` puts values in. ``{channel}`` is the channel of the
source, ``{gateway}`` the name of the gateway; ``{{`` and ``}}`` stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from messaging.errors import InvalidChannelError
from messaging.errors.text import tolerant
from messaging.model import ANY_LEVEL, ANY_LEVELS, SEPARATOR, check_name, check_pattern

#: names that templates have in addition to the captures
GIVEN_NAMES: Final = frozenset({"channel", "gateway"})
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: a value in a text that is no channel
_VALUE: Final = re.compile(rf"\{{({_NAME.pattern})\}}")
#: what a template consists of: escaped braces, values, wrong braces, and text
_PIECES: Final = re.compile(r"(\{\{|\}\})|\{([^{}]*)\}|([{}])|([^{}]+)")


class ChannelPattern:
    """A channel pattern with captures. Immutable, thread safe.

    Args:
        text: the pattern.

    Attributes:
        text: the pattern as it was given.
        pattern: the plain pattern to subscribe to: wildcards in place of the captures.
        names: of the captures.

    Raises:
        InvalidChannelError: the pattern is malformed.
    """

    __slots__ = ("_match", "names", "pattern", "text")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidChannelError(f"channel pattern must be a str, not {type(text).__name__}")
        levels = text.split(SEPARATOR)
        plain: list[str] = []
        expressions: list[str] = []
        names: list[str] = []
        for number, level in enumerate(levels, 1):
            is_last = number == len(levels)
            if level.startswith("{") and level.endswith("}") and len(level) > 2:
                name, is_open = (level[1:-2], True) if level.endswith("#}") else (level[1:-1], False)
                _check_capture(text, number, name, names, is_open=is_open, is_last=is_last)
                names.append(name)
                plain.append(ANY_LEVELS if is_open else ANY_LEVEL)
                expressions.append(f"(?P<{name}>{'.*' if is_open else '[^/]*'})")
            elif "{" in level or "}" in level:
                raise InvalidChannelError(
                    f"channel pattern {text!a:.90}: level {number} has a brace; a capture is a whole level such as "
                    "'{site}', or '{rest#}' as the last one"
                )
            else:
                plain.append(level)
                wildcards = {ANY_LEVEL: "[^/]*", ANY_LEVELS: ".*"}
                expressions.append(wildcards.get(level) or re.escape(level))
        self.text = text
        self.pattern = check_pattern(SEPARATOR.join(plain))
        self.names = frozenset(names)
        self._match = re.compile(_expression(plain, expressions), re.DOTALL).fullmatch

    def match(self, channel: str) -> Mapping[str, str] | None:
        """Return the captures of a channel by name; ``None`` if the channel does not match."""
        found = self._match(channel)
        if found is None:
            return None
        return {name: value or "" for name, value in found.groupdict().items()}

    @tolerant
    def __repr__(self) -> str:
        return f"ChannelPattern({self.text!r})"


def _check_capture(
    text: str, number: int, name: str, names: list[str], *, is_open: bool, is_last: bool
) -> None:  # fmt: skip
    where = f"channel pattern {text!a:.90}: level {number}"
    if _NAME.fullmatch(name) is None:
        raise InvalidChannelError(
            f"{where}: a capture is named by letters, digits and '_', such as '{{site}}', not {name!a:.40}"
        )
    if name in names:
        raise InvalidChannelError(f"{where}: {{{name}}} is there twice; give each capture a name of its own")
    if name in GIVEN_NAMES:
        raise InvalidChannelError(f"{where}: {{{name}}} has a meaning of its own in templates; choose another name")
    if is_open and not is_last:
        raise InvalidChannelError(f"{where}: {{{name}#}} stands for all last levels, so it must be the last one")


def _expression(plain: list[str], expressions: list[str]) -> str:
    # wildcards of the first level do not match names that begin with '$'; '#' also matches the level above
    guard = r"(?!\$)" if plain[0] in (ANY_LEVEL, ANY_LEVELS) else ""
    if plain[-1] != ANY_LEVELS or len(plain) == 1:
        return guard + SEPARATOR.join(expressions)
    return f"{guard}{SEPARATOR.join(expressions[:-1])}(?:/{expressions[-1]})?"


class ChannelTemplate:
    """A channel with the values of captures. Immutable, thread safe.

    Attributes:
        text: the template as it was given.
        names: of the values that it needs.

    Raises:
        InvalidChannelError: the template is malformed.
    """

    __slots__ = ("_pieces", "names", "text")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise InvalidChannelError("a channel template must be a text such as 'uplink/{site}'")
        #: texts, and names of values in tuples
        pieces: list[str | tuple[str]] = []
        for found in _PIECES.finditer(text):
            escaped, name, wrong, plain = found.groups()
            if wrong is not None or (name is not None and _NAME.fullmatch(name) is None):
                raise InvalidChannelError(
                    f"channel template {text!a:.90}: {found.group()!r} at index {found.start()}; a value is written as "
                    "'{site}', a brace as '{{' or '}}'"
                )
            pieces.append((name,) if name is not None else plain if plain is not None else escaped[0])
        self.text = text
        self._pieces = tuple(pieces)
        self.names = frozenset(each[0] for each in pieces if isinstance(each, tuple))
        if not self.names:
            check_name(self.render({}))
        elif any(wildcard in each for each in pieces if isinstance(each, str) for wildcard in "+#"):
            raise InvalidChannelError(
                f"channel template {text!a:.90}: a channel to publish to has no wildcards; capture levels in the "
                "pattern of the source, and name them here"
            )

    def render(self, values: Mapping[str, str]) -> str:
        """Return the channel.

        Raises:
            InvalidChannelError: a value is missing, or what comes out is no channel.
        """
        try:
            made = "".join(each if isinstance(each, str) else values[each[0]] for each in self._pieces)
        except KeyError as error:
            raise InvalidChannelError(
                f"channel template {self.text!a:.90}: there is no value {{{error.args[0]}}}; there are "
                + (", ".join(sorted(values)) or "none")
            ) from None
        return check_name(made)

    def as_pattern(self) -> str:
        """Return the pattern of the channels that can come out; ``channel`` may have several levels, or none."""
        levels = "".join(
            each if isinstance(each, str) else "\0#" if each == ("channel",) else "\0" for each in self._pieces
        ).split(SEPARATOR)
        for number, level in enumerate(levels):
            if "\0#" in level:  # any channel: it may have levels of its own
                return SEPARATOR.join([*levels[:number], ANY_LEVELS])
            if "\0" in level:
                levels[number] = ANY_LEVEL
        return SEPARATOR.join(levels)

    @tolerant
    def __repr__(self) -> str:
        return f"ChannelTemplate({self.text!r})"


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with the values of captures put in; unknown names stay as they are."""
    return _VALUE.sub(lambda found: values.get(found.group(1), found.group()), text)


def template_names(text: str) -> frozenset[str]:
    """Return the names of the values that :func:`filled` puts in."""
    return frozenset(_VALUE.findall(text))
