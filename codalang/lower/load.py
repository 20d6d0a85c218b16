"""From a kernel spec to a function that launches it, through the cache of the disk.

A cached kernel is a shared library with a TVM FFI entry; loading it needs neither the DSL nor a compiler.  Where no C
compiler can link one, the object file is loaded through the DSL's own loader instead, which costs its import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from codalang.errors import CodaCompileError
from codalang.lower import cache
from codalang.lower.codegen import generate
from codalang.lower.compile import ARCH, ENTRY, Report, compile_object, no_room
from codalang.lower.spec import KernelSpec


class CodaSlowKernelWarning(UserWarning):
    """The device compiler's report shows a kernel that runs slower than it should."""


@functools.cache
def disk_cache() -> cache.Cache:
    """The cache of this process."""
    return cache.Cache()


def launcher(spec: KernelSpec) -> Callable[..., None]:
    """What launches a kernel, compiled at need.  Its arguments are those of the kernel class's `__call__`."""
    path = library(spec)
    if path.suffix == ".so":
        return getattr(_load_shared(path), ENTRY)
    from cutlass import cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)


def library(spec: KernelSpec) -> Path:
    """The compiled kernel on disk: a shared library, or an object file where nothing can link.

    Raises CodaCompileError where the device compiler fails.
    """
    try:
        return disk_cache().load_or_build(key_of(spec), _suffix(), lambda path: _build(spec, path, _linker()))
    except OSError as error:  # no room in the temporary folder either
        raise no_room(spec, error) from error


def is_there(key: str) -> bool:
    """Is the kernel of that key on disk?"""
    return disk_cache().has(key, _suffix())


def key_of(spec: KernelSpec) -> str:
    """What a kernel goes by on disk: its code, but for comments, which say at which line a program stands, and what
    decides the mainloop."""
    lines = generate(spec).splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return cache.key(
        source=code, spec=repr((spec.epilogue.precise, *attrs.astuple(spec, recurse=False)[1:])), arch=ARCH
    )


def _build(spec: KernelSpec, path: Path, compiler: str | None) -> None:
    if compiler is None:
        _say_what_is_slow(spec, compile_object(spec, path))
        return
    with tempfile.TemporaryDirectory(prefix="codalang-") as folder:
        object_file = Path(folder) / "kernel.o"
        _say_what_is_slow(spec, compile_object(spec, object_file))
        command = [compiler, "-shared", "-o", str(path), str(object_file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CodaCompileError(
                f"`{' '.join(command)}` failed: {result.stderr.strip()[-500:]}",
                hint="linking needs a working C compiler; without one in PATH, objects are loaded unlinked",
            )


def _say_what_is_slow(spec: KernelSpec, report: Report) -> None:
    """Warn of a kernel that is right but slower than it should be: nobody reads the compiler's report otherwise."""
    faults = [f"spills {report.spill_bytes} bytes of registers per thread"] if report.spill_bytes else []
    faults += ["serializes its wgmmas"] if report.serialized else []
    if faults:
        warnings.warn(
            f"the kernel of `{spec.epilogue.name}` {' and '.join(faults)}; it is right, but slower than it should be",
            CodaSlowKernelWarning,
            stacklevel=2,
        )


@functools.cache
def _linker() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _suffix() -> str:
    return ".so" if _linker() else ".o"


def _load_shared(path: Path) -> Any:
    _load_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """The DSL's small runtime library, which kernels call to launch; found without importing the DSL."""
    package = importlib.util.find_spec("cutlass")
    if package is not None:
        for location in package.submodule_search_locations or ():
            for candidate in sorted(Path(location).parents[1].glob("cu*/lib/libcute_dsl_runtime.so"), reverse=True):
                return ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
    raise CodaCompileError(
        "the runtime library of nvidia-cutlass-dsl is not installed",
        hint="pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'",
    )
