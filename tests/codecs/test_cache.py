"""The bounded cache."""

from __future__ import annotations

from messaging.codecs.cache import BoundedCache


def test_a_full_cache_starts_anew_with_a_further_entry_and_keeps_the_others_when_one_is_replaced() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache["a"], cache["b"] = 1, 2
    cache["a"] = 3
    assert cache == {"a": 3, "b": 2}
    cache["c"] = 4
    assert cache == {"c": 4}
