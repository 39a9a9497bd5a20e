"""Removes what no process of an image ever opens: `trim.py FOLDER MACHINE GROUP...`, FOLDER being a
site-packages and MACHINE the processor that it is for.

Each group is a list of patterns. A pattern that matches nothing ends the build: the package has changed its shape, and
what was trimmed may be back under another name. Standard library only: this runs in the build.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

GROUPS: dict[str, tuple[str, ...]] = {
    # Stubs and C headers, for compilers and editors.
    "any": ("**/*.pyi",),
    # Other devices than CPUs, other formats than OpenVINO's own and ONNX. 85 of 180 MB.
    "openvino": (
        "openvino/libs/libopenvino_tensorflow_frontend.so.*",
        "openvino/libs/libopenvino_tensorflow_lite_frontend.so.*",
        "openvino/libs/libopenvino_pytorch_frontend.so.*",
        "openvino/libs/libopenvino_paddle_frontend.so.*",
        "openvino/libs/libopenvino_jax_frontend.so.*",
        "openvino/libs/libopenvino_gguf_frontend.so.*",
        "openvino/libs/libopenvino_c.so.*",
        "openvino/include",
        "openvino/cmake",
    ),
    # A process that serves builds, converts and quantises nothing.
    "onnxruntime": (
        "onnxruntime/transformers",
        "onnxruntime/tools",
        "onnxruntime/quantization",
        "onnxruntime/datasets",
        "onnxruntime/backend",
    ),
    "numpy": ("numpy/**/tests", "numpy/f2py", "numpy/_core/include", "numpy/_core/lib/*.a", "numpy/random/lib/*.a"),
    # The blocking client, which is not used: kubernetes.aio is. The modules of its packages are imported and stay.
    "kubernetes": ("kubernetes/client/models/[!_]*.py", "kubernetes/client/api/[!_]*.py"),
    # The hub's accelerator: a server fetches artefacts, never models.
    "hub": ("hf_xet/*.so",),
    # Tests of the optimiser's packages.
    "optimizer": (
        "numpy/**/tests",
        "onnx/backend/test",
        "onnx/**/*.h",
    ),
}

ONLY_X86_64: dict[str, tuple[str, ...]] = {
    # Intel's GPU and NPU; the last is a cache of kernels of the GPU plugin.
    "openvino": (
        "openvino/libs/libopenvino_intel_gpu_plugin.so",
        "openvino/libs/libopenvino_intel_npu_plugin.so",
        "openvino/libs/cache.json",
    ),
}
"""Further patterns of a group that packages for other processors have no file for."""


def matches(folder: Path, group: str, machine: str) -> Iterator[Path]:
    """The paths that the group removes under the folder, in order. SystemExit where a pattern matches nothing.

    machine: the processor that the packages are for, as `platform.machine` names it.
    """
    for pattern in (*GROUPS[group], *(ONLY_X86_64.get(group, ()) if machine == "x86_64" else ())):
        found = sorted(folder.glob(pattern))
        if pattern.endswith("/"):
            found = [path for path in found if path.is_dir()]
        if not found:
            raise SystemExit(
                f"nothing under {folder} matches {pattern!r} of group {group!r}: the package has changed. Look what "
                "takes its place and correct dev/images/inside/trim.py"
            )
        yield from found


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(part.lstat().st_size for part in path.rglob("*") if part.is_file())


def trim(folder: Path, groups: Sequence[str], machine: str) -> int:
    """Remove the groups' files and folders, of packages for this processor. Returns the bytes that this saves."""
    removed = 0
    for group in groups:
        # A parent may have taken a later match with it, so each group is listed before anything of it goes.
        for path in list(matches(folder, group, machine)):
            if not path.exists() and not path.is_symlink():
                continue
            removed += size(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return removed


if __name__ == "__main__":
    print(f"trimmed {trim(Path(sys.argv[1]), sys.argv[3:], sys.argv[2]) / 1e6:.1f} MB")
