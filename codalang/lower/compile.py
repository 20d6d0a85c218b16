"""From a kernel spec to an object file for sm_90a, with or without a GPU.

    generate   readable Python source of the epilogue (codegen)
    trace      the kernel class of sm90 or hosted, specialised by it
    compile    CuTe DSL -> PTX -> cubin, inside an object file with a TVM FFI entry
    link       -> shared library, which loads without the DSL

The compiler's report is read on the way: a kernel that spills registers or whose wgmmas were serialized is
returned with that said, and tests fail on it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from codalang.errors import CodaCompileError, CodaUnsupportedError
from codalang.lower.balance import Balance
from codalang.lower.codegen import generate
from codalang.lower.plan import SMEM_CAPACITY, hosted_rows, shared_bytes
from codalang.lower.spec import PLAIN, Folding, KernelSpec

ARCH = "sm_90a"
ENTRY = "codalang_kernel"


@attrs.frozen
class Report:
    """What the device compiler said of a kernel.

    Attributes:
        registers: registers per thread at launch (setmaxnreg moves them between roles later).
        spill_bytes: bytes of registers spilled per thread, stores plus loads.
        serialized: the compiler's words where it serialized wgmmas, else None.
        ptx: the kernel's PTX, where it was asked for.
    """

    registers: int
    spill_bytes: int
    serialized: str | None
    ptx: str | None = None


def compile_object(spec: KernelSpec, path: Path, *, keep_ptx: bool = False) -> Report:
    """Compile a kernel for sm_90a into an object file at `path`.  Needs no GPU.

    Raises CodaCompileError where the device compiler fails, CodaUnsupportedError for what no kernel covers.
    """
    from cutlass import cute

    kernel, arguments = _kernel_and_arguments(spec)
    try:
        with _captured_output() as log, _quiet(), tempfile.TemporaryDirectory(prefix="codalang-") as folder:
            # the architecture is named: without a GPU the DSL would take another
            options = f"--enable-tvm-ffi --gpu-arch {ARCH} remarks{{ptx}}" + (
                f" --keep-ptx --dump-dir={folder}" if keep_ptx else ""
            )
            compiled = cute.compile(kernel, *arguments, options=options)
            ptx = compiled.__ptx__ if keep_ptx else None
            compiled.export_to_c(object_file_path=str(path), function_name=ENTRY)
    except CodaUnsupportedError:
        raise
    except OSError as error:
        raise no_room(spec, error) from error
    except Exception as error:
        raise CodaCompileError(
            f"the device compiler failed on `{spec.epilogue.name}`: {type(error).__name__}: {error}",
            spec.epilogue.loc,
            hint="this is a fault of codalang, not of the program; please report it with the .coda source",
        ) from error
    return _report(log.getvalue(), ptx)


def no_room(spec: KernelSpec, error: OSError) -> CodaCompileError:
    """What to say where a kernel cannot be written."""
    return CodaCompileError(
        f"the kernel of `{spec.epilogue.name}` cannot be written: {error.strerror or error}",
        spec.epilogue.loc,
        hint="make room where it goes and in the temporary folder, or set TMPDIR to a folder that has room",
    )


def _report(log: str, ptx: str | None) -> Report:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    if not registers or not spills:
        raise CodaCompileError(
            "the device compiler printed no report of registers and spills",
            hint="this version of nvidia-cutlass-dsl is not the tested one; see constraints.txt",
        )
    serialized = [line for line in log.splitlines() if "C7515" in line or "C7517" in line or "serialized" in line]
    return Report(max(registers), sum(spills), serialized[0] if serialized else None, ptx)


def load_body(spec: KernelSpec) -> Any:
    """Import the generated epilogue class.  Its text is a real file, which the DSL needs to read sources."""
    source = generate(spec)
    with tempfile.TemporaryDirectory(prefix="codalang-") as folder:
        path = Path(folder) / f"{spec.epilogue.name}.py"
        path.write_text(source)
        name = f"codalang_generated_{spec.epilogue.name}"
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        return module.Epilogue


def _kernel_and_arguments(spec: KernelSpec) -> tuple[Any, list[Any]]:
    """The host function to compile and the fake arguments that describe its signature."""
    import cutlass
    from cutlass import cute

    from codalang.lower.registers import CUTE_DTYPES

    body = load_body(spec)
    int64 = cute.sym_int64

    def tensor(dtype: str, major: str = "k", aligned: bool = True, folding: Folding = PLAIN) -> Any:
        # 16 bytes: what TMA demands of the base and of every stride but the contiguous one
        element = CUTE_DTYPES[dtype].width // 8
        shape = (cute.sym_int(), *folding.rows, cute.sym_int(), *folding.columns)
        contiguous = len(shape) - 1 if major == "k" else len(folding.rows)
        divisor = 16 // element if aligned else 1
        stride = tuple(1 if i == contiguous else int64(divisibility=divisor) for i in range(len(shape)))
        align = 16 if aligned else element
        return cute.runtime.make_fake_tensor(CUTE_DTYPES[dtype], shape, stride, assumed_align=align)

    def vector(dtype: str) -> Any:
        if dtype == "number":
            return cutlass.Float32(0.0)
        kind = CUTE_DTYPES[dtype]
        return cute.runtime.make_fake_tensor(kind, (cute.sym_int(),), (1,), assumed_align=kind.width // 8)

    def row_of_words(dtype: str) -> Any:
        kind = CUTE_DTYPES[dtype]
        shape, stride = (cute.sym_int(), cute.sym_int()), (int64(), 1)
        return cute.runtime.make_fake_tensor(kind, shape, stride, assumed_align=kind.width // 8)

    if spec.merge is not None:
        return _merge_kernel(body.PARTIALS[spec.merge], spec.overlap, row_of_words)
    if spec.parts is not None:
        from codalang.lower.vector import VectorKernel

        vectors = tuple(
            row_of_words("f32") if how else vector(i.dtype) for i, how in zip(body.INPUTS, spec.parts, strict=True)
        )
        stored = tuple(row_of_words(v.dtype) for v in body.VECTORS)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return VectorKernel(body, spec.parts, spec.overlap), [vectors, stored, cutlass.Int32(1), stream]
    aligned = spec.aligned
    input_foldings = spec.input_foldings or (PLAIN,) * len(body.INPUTS)
    output_foldings = spec.output_foldings or (PLAIN,) * len(body.TILES)
    inputs = tuple(
        tensor(i.dtype, aligned=aligned, folding=folding) if i.kind in ("tile", "rows") else vector(i.dtype)
        for i, folding in zip(body.INPUTS, input_foldings, strict=True)
    )
    outputs = tuple(
        tensor(t.dtype, aligned=aligned, folding=folding)
        for t, folding in zip(body.TILES, output_foldings, strict=True)
    )
    outputs += tuple(row_of_words(v.dtype) for v in body.VECTORS)
    outputs += tuple(row_of_words(dtype) for p in body.PARTIALS for dtype in p.fold.dtypes)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    if spec.operand is None:
        from codalang.lower.hosted import HostedKernel

        hosted = HostedKernel(body, hosted_rows(spec.epilogue), spec.aligned, spec.overlap)
        return hosted, [inputs, outputs, cutlass.Int32(1), cutlass.Int32(1), stream]
    from codalang.lower.sm90 import GemmKernel

    operand = spec.operand
    if spec.config is not None and not spec.config.is_in_step:
        raise CodaUnsupportedError(
            f"load_stages and store_stages of {spec.config} must divide its {spec.config.steps} steps"
        )
    if spec.config is None or shared_bytes(spec, spec.config) > SMEM_CAPACITY:
        # the launcher would only print a line before a launch that cannot succeed
        raise CodaUnsupportedError(f"`{spec.epilogue.name}` does not fit in shared memory with {spec.config}")
    if spec.config.gathers:
        outputs += (row_of_words("f32"), row_of_words("i32"))
    kernel = GemmKernel(
        body, spec.config, operand, input_foldings, output_foldings, spec.overlap, spec.epilogue.precise
    )
    a = tensor(operand.dtype, operand.a_major, folding=operand.a_folding)
    b = tensor(operand.dtype, operand.b_major, folding=operand.b_folding)
    schedule = (cutlass.Int32(1),) * (1 + len(attrs.fields(Balance)) * spec.config.balanced)
    return kernel, [a, b, inputs, outputs, schedule, stream]


def _merge_kernel(partial: Any, overlap: bool, row_of_words: Callable[[str], Any]) -> tuple[Any, list[Any]]:
    from cutlass import cute

    from codalang.lower.merge import MergeKernel

    kernel = MergeKernel(partial.fold, partial.kind == "scalar", overlap)
    partials = tuple(row_of_words(dtype) for dtype in partial.fold.dtypes)
    outputs = tuple(row_of_words(dtype) for dtype in partial.fold.results)
    return kernel, [partials, outputs, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about the DSL's own doings: they tell the user of codalang nothing that he could change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _captured_output() -> Iterator[io.StringIO]:
    """What the compiler writes to the process's stdout and stderr, Python's or a library's."""
    log = io.StringIO()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile(mode="w+b") as file:
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            # Python's own streams need not be descriptors 1 and 2: a notebook or a test runner replaces them
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield log
        finally:
            for target, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
            file.seek(0)
            log.write(file.read().decode(errors="replace"))
