"""``memory://name``: a broker inside the process. Instances with the same name meet."""

from adapters.memory.adapter import MemoryAdapter, MemorySettings

__all__ = ["MemoryAdapter", "MemorySettings"]
