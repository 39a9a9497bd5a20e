"""Penstock's own engine: 8-bit encoders in some hundred lines of C, for short rows above all.

A library's engine walks through some ninety nodes for a row of eight tokens, each with its own overhead, where the
arithmetic takes half a millisecond. Here a model is a dozen kinds of steps in one loop, on one thread or on several
(docs/decisions/native-engine.md). `c/` is the arithmetic, `graph_file` what a graph looks like on disk, `library` the
way into C, `compiler` how it is compiled when the project is installed.
"""

from penstock_runtime.engines.native.engine import NativeEngine, load
from penstock_runtime.engines.native.library import library_path

__all__ = ["NativeEngine", "library_path", "load"]
