"""Hatchling's build hook: compiles the native engine's library into the package, for wheels and editable installs.

Without a C compiler the wheel is pure Python, and Penstock works without that engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILER = Path("runtime/penstock_runtime/engines/native/compiler.py")


class NativeLibraryHook(BuildHookInterface[Any]):
    """See `BuildHookInterface`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; a library makes the wheel one for this platform."""
        del version
        if self.target_name != "wheel":
            return
        compiler = _load(Path(self.root) / _COMPILER)
        try:
            library = compiler.compile_library()
        except compiler.NotCompiled as error:
            compiler.LIBRARY.unlink(missing_ok=True)  # an old one does not fit the sources
            self.app.display_warning(f"Without the native engine: {error}")
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        # No interface of Python's is used: one file serves all versions.
        build_data["tag"] = f"py3-none-{compiler.platform_tag()}"


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("penstock_native_compiler", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
