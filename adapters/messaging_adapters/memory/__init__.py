"""The adapter of ``memory://name``: a broker inside the process, which all instances with that name share.

Exports the adapter and its settings.
"""

from messaging_adapters.memory.adapter import MemoryAdapter
from messaging_adapters.memory.settings import MemorySettings

__all__ = ["MemoryAdapter", "MemorySettings"]
