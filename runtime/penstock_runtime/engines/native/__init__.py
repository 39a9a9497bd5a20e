"""The native engine: 8-bit encoder models in C, mainly for short rows.

A library engine executes some ninety nodes for a row of eight tokens, each with its overhead, while the arithmetic
takes half a millisecond. Here a model is one loop over a few kinds of steps, on one thread or several
(docs/decisions/native-engine.md). `c/` has the arithmetic, `graph_file` the file format, `library` the ctypes
bindings, `compiler` the compilation at installation.

The library also computes the steps of text generation: `decoder_file` is its format, and `decoder_engine` its engine.
"""

from penstock_runtime.engines.native.engine import NativeEngine, load
from penstock_runtime.engines.native.library import library_path

__all__ = ["NativeEngine", "library_path", "load"]
