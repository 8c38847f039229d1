"""One module for each library that is measured: ``python -m benchmarks.peers.<name> publish|subscribe|consume ...``.

Each role is a process of its own, so that no library shares an interpreter with another, or its publisher with its
subscriber. All are told what to do, and answer, in the same way: see :mod:`benchmarks.peers.job`. Each library is used
as its own documentation shows, with what it takes by default.
"""
