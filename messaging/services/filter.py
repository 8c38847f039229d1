r"""LDAP filters (RFC 1960, as OSGi core 3.2.7 uses them) over mappings of properties.

::

    filter    ::= '(' ( '&' filter+ | '|' filter+ | '!' filter | operation ) ')'
    operation ::= attribute ( '=' | '~=' | '>=' | '<=' ) value      compare
                | attribute '=*'                                    present
                | attribute '=' [value] ('*' [value])+              substring

White space around parentheses and around attribute names is ignored; in values it counts. A backslash takes the
next character literally: ``\*``, ``\(``, ``\)`` and ``\\`` are how these stand in a value. An attribute name is
anything without ``= ~ < > ( )``, inner spaces included; ``(!a=b)`` therefore asks for an attribute called ``!a``,
as the grammar has it: negation is written ``(!(a=b))``.

How a value compares depends on the type of the property, not on the filter:

========================  =============================================================================
``str``                   code point order; ``~=`` ignores case and all white space
``bool``                  any operator but substring asks for equality with ``true`` or ``false``, in any case
``int float Decimal`` …   as numbers, exactly; a value that is no number does not match, NaN never matches
``Enum``                  as the str or number it also is, otherwise its name
``Version``               as versions: ``1.0`` equals ``1.0.0`` and comes before ``1.0.0.beta`` and ``1.10``
``datetime date UUID``    the value is read as ISO 8601 or a UUID; naive and aware times are never equal or ordered
list, array, set, …       matches if one element does; collections within collections do not match
anything else             only presence (``=*``) matches
========================  =============================================================================

Substrings match text only. A missing property and ``None`` are the same: nothing matches them, not even ``=*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError
from messaging.services.parsing import Parser
from messaging.services.parsing import escaped as escaped
from messaging.services.properties import ServiceProperties
from messaging.text import tolerant

if TYPE_CHECKING:
    from messaging.services.matching import Lookup


class LdapFilter:
    """A parsed filter; immutable, safe to share between threads. ``str()`` is its normalised text.

    Two filters are equal if their normalised texts and their case sensitivity are.

    Args:
        text: the filter, at most 65,536 characters, 100 levels and 2,000 operations.
        case_sensitive: whether attribute names are case-sensitive. If not, the exact spelling is preferred; of several
            other spellings the first counts. Values are case-sensitive except for ``~=``.

    Raises:
        InvalidFilterError: ``text`` is no filter; names the expected text and its index.
    """

    __slots__ = ("_case_sensitive", "_match", "_text")

    def __init__(self, text: str, *, case_sensitive: bool = False) -> None:
        self._text, self._match = Parser(text).parse()
        self._case_sensitive = case_sensitive

    @classmethod
    def parse(cls, text: str, case_sensitive: bool = False) -> LdapFilter:
        """Parse ``text``; parameters and errors as for the class."""
        return cls(text, case_sensitive=case_sensitive)

    def matches(self, properties: Mapping[str, Any]) -> bool:
        """Return whether ``properties`` match. A value that cannot be compared does not match; it never raises.

        Raises:
            ArgumentError: ``properties`` is no mapping.
        """
        lookup: Lookup
        folded: dict[str, Any]
        if type(properties) is not dict and isinstance(properties, ServiceProperties):  # the slower check comes second
            lookup, folded = properties.get_exact, properties.folded
        else:
            lookup, folded = _lookup_of(properties), {}
        return self._match(lookup, properties, None if self._case_sensitive else folded)

    def match_case(self, properties: Mapping[str, Any]) -> bool:
        """Return whether ``properties`` match, always with case-sensitive names (RFC 97 5.7.1)."""
        lookup = properties.get_exact if isinstance(properties, ServiceProperties) else _lookup_of(properties)
        return self._match(lookup, properties, None)

    @property
    def case_sensitive(self) -> bool:
        """Whether attribute names are case-sensitive."""
        return self._case_sensitive

    def __str__(self) -> str:
        return self._text

    @tolerant
    def __repr__(self) -> str:
        return f"LdapFilter({self._text!r}{', case_sensitive=True' if self._case_sensitive else ''})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LdapFilter):
            return NotImplemented
        return self._text == other._text and self._case_sensitive == other._case_sensitive

    def __hash__(self) -> int:
        return hash((self._text, self._case_sensitive))


def _lookup_of(properties: Mapping[str, Any]) -> Lookup:
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise ArgumentError(f"properties must be a mapping, not {type(properties).__name__}")
    return properties.get


@lru_cache(maxsize=256)
def _cached_filter(text: str) -> LdapFilter:
    """Return ``LdapFilter(text)``, remembered."""
    return LdapFilter(text)


def as_filter(given: str | LdapFilter | None) -> LdapFilter | None:
    """Return the filter that a caller gave as a text or compiled, or ``None``; equal texts are compiled once.

    Raises:
        InvalidFilterError: ``given`` is no filter.
    """
    if given is None or isinstance(given, LdapFilter):
        return given
    return _cached_filter(given) if isinstance(given, str) else LdapFilter(given)  # raises the error
