"""Commands on kernels: emit, compile.  Neither needs a GPU.  Of a program: every distinct kernel that it launches."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from codalang.cli import OK, WRONG, add_precise, add_program, describe, print_json, report_errors
from codalang.cli.program_kernels import Kernels, kernels
from codalang.cli.programs import load_program, selected
from codalang.cli.sizes import add_sizes, given_for, show_sizes
from codalang.cli.specs import DTYPES, backward_spec, forward_spec
from codalang.cli.text import derived, derived_program, print_programs
from codalang.errors import CodaCallError, CodaCompileError, CodaError, CodaUnsupportedError
from codalang.ir.epilogue import Epilogue
from codalang.ir.module import Module
from codalang.ir.printer import print_epilogue
from codalang.ir.program import Program
from codalang.ir.simplify import simplify
from codalang.lower.plan import shared_bytes
from codalang.lower.spec import KernelSpec

# The configuration depends on the size of the problem; a large one is what kernels are made for.
ROWS, COLUMNS, DEPTH = 8192, 8192, 4096

_STAGES = ("ir", "backward", "cutedsl", "ptx")


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    emit = commands.add_parser("emit", help="print what a program becomes at a stage")
    add_program(emit)
    add_precise(emit)
    emit.add_argument("--stage", choices=_STAGES, default="cutedsl", help="default: cutedsl")
    _add_kernel_options(emit)
    emit.set_defaults(command=run_emit)

    compile_ = commands.add_parser(
        "compile",
        help="compile to an object for sm_90a",
        epilog="Exits with 1, and says why, where a kernel spills registers, the compiler serializes its wgmmas, or a "
        "part of a program has no kernel.  Objects are written all the same.",
    )
    add_program(compile_)
    add_precise(compile_)
    _add_kernel_options(compile_)
    compile_.add_argument("-o", "--output", metavar="DIR", type=_folder, default=Path(), help="where objects go")
    compile_.set_defaults(command=run_compile)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of the directory is empty")
    return Path(text)


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the matmul (default: bf16)")
    parser.add_argument("--backward", action="store_true", help="the kernels of the derived backward, too")
    add_sizes(parser, "--dims", help="of a program's dimensions (default: usual ones)")


def run_emit(options: argparse.Namespace) -> int:
    """`codalang emit`."""
    module = load_program(options.program, options.precise)
    stages = []
    for item in _items(module, options):
        texts = _emit_program(module, item, options) if isinstance(item, Program) else _emit(item, options)
        stages += [{"name": name, "stage": options.stage, "text": text} for name, text in texts]
    if options.json:
        print_json(True, stages=stages)
    else:
        sys.stdout.write("\n".join(s["text"] if s["text"].endswith("\n") else s["text"] + "\n" for s in stages))
    return OK


def _items(module: Module, options: argparse.Namespace) -> list[Program] | list[Epilogue]:
    """What is asked for.  Raises CodaCallError for sizes of what has none."""
    items = selected(module, options.name)
    programs = [item for item in items if isinstance(item, Program)]
    if options.sizes and not programs:
        raise CodaCallError("an epilogue's kernel is made for any size; only programs take them", argument="--dims")
    if programs:
        given_for(programs, options.sizes)
    return items


def _emit_program(module: Module, program: Program, options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.stage == "ir":
        shown = [program]
        if options.backward:
            shown.append(derived_program(program).backward)
        return [(p.name, print_programs([p])) for p in shown]
    if options.stage == "backward":
        backward = derived_program(program).backward
        return [(backward.name, print_programs([backward]))]
    text = _generated if options.stage == "cutedsl" else _ptx
    found, nothing = _of_program(module, program, options)
    if nothing:
        print(nothing, file=sys.stderr)
    return [(spec.epilogue.name, text(spec)) for spec in found.specs]


def _of_program(module: Module, program: Program, options: argparse.Namespace) -> tuple[Kernels, str | None]:
    """The kernels of a program; and where it launches none, words that say so."""
    given = {name: size for name, size in options.sizes.items() if name in program.dims}
    found, sizes = kernels(module, program, given, options.dtype, options.backward)
    is_empty = not found.specs and not found.fallbacks
    return found, f"{program.name}: nothing is launched at {show_sizes(sizes)}" if is_empty else None


def _generated(spec: KernelSpec) -> str:
    from codalang.lower.codegen import generate

    return generate(spec)


def _emit(epilogue: Epilogue, options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.stage == "ir":
        shown = [simplify(epilogue)]
        if options.backward:
            shown.append(derived(epilogue).backward)
        return [(e.name, print_epilogue(e)) for e in shown]
    if options.stage == "backward":
        backward = derived(epilogue).backward
        return [(backward.name, print_epilogue(backward))]
    text = _generated if options.stage == "cutedsl" else _ptx
    return [(spec.epilogue.name, text(spec)) for spec in _specs(epilogue, options)]


def _specs(epilogue: Epilogue, options: argparse.Namespace) -> list[KernelSpec]:
    """The forward's kernel, and the backward's where asked for.  With a backward, the forward is the one that saves."""
    if not options.backward:
        return [forward_spec(simplify(epilogue), options.dtype, ROWS, COLUMNS, DEPTH)]
    derivative = derived(epilogue)
    forward = forward_spec(derivative.forward, options.dtype, ROWS, COLUMNS, DEPTH)
    if not derivative.backward.outputs:  # every gradient is zero: there is no kernel
        return [forward]
    return [forward, backward_spec(derivative, options.dtype)]


def _ptx(spec: KernelSpec) -> str:
    import tempfile

    from codalang.lower.compile import compile_object

    _needs_compiler()
    with tempfile.TemporaryDirectory(prefix="codalang-") as folder:
        ptx = compile_object(spec, Path(folder) / "kernel.o", keep_ptx=True).ptx
    assert ptx is not None
    return ptx


def run_compile(options: argparse.Namespace) -> int:
    """`codalang compile`: objects are written to the directory, the compiler's report to standard output."""
    _needs_compiler()
    _make_folder(options.output)
    module = load_program(options.program, options.precise)
    objects: list[dict[str, Any]] = []
    fallbacks: list[str] = []
    idle: list[str] = []
    taken: set[str] = set()
    for item in _items(module, options):
        if isinstance(item, Program):
            found, nothing = _of_program(module, item, options)
            idle += [nothing] if nothing else []
            specs, prefix = list(found.specs), f"{item.name}."
            fallbacks += found.fallbacks
        else:
            specs, prefix = _specs(item, options), ""
        for spec in specs:
            name = _fresh(f"{prefix}{spec.epilogue.name}", taken)
            objects.append(_compile(spec, options.output / f"{name}.o"))
            if not options.json:
                _print_object(objects[-1])
    faults = [CodaCompileError(f"no kernel: {reason}") for reason in fallbacks]
    faults += [fault for facts in objects for fault in _faults(facts)]
    report_errors(faults, as_json=False)
    if options.json:
        told = {"objects": objects, "fallbacks": fallbacks, "idle": idle}
        print_json(not faults, **told, errors=[describe(fault) for fault in faults])
    else:
        for line in idle:
            print(line)
    return WRONG if faults else OK


def _faults(facts: dict[str, Any]) -> Iterator[CodaCompileError]:
    """What the compiler's report has against a kernel."""
    kernel = f"kernel `{facts['name']}` ({facts['object']})"
    if facts["spill_bytes"]:
        yield CodaCompileError(f"{kernel} is slow: it spills {facts['spill_bytes']} bytes of registers per thread")
    if facts["serialized"]:
        yield CodaCompileError(f"{kernel} is slow: the compiler serialized its wgmmas: {facts['serialized']}")


def _fresh(name: str, taken: set[str]) -> str:
    """The name of an object, numbered where kernels share theirs."""
    fresh, number = name, 1
    while fresh in taken:
        number += 1
        fresh = f"{name}.{number}"
    taken.add(fresh)
    return fresh


def _compile(spec: KernelSpec, path: Path) -> dict[str, Any]:
    """Compile one kernel; what the compiler and the plan say of it."""
    from codalang.lower.compile import ARCH, compile_object

    start = time.perf_counter()
    report = compile_object(spec, path)
    return {
        "name": spec.epilogue.name,
        "object": str(path),
        "bytes": path.stat().st_size,
        "arch": ARCH,
        "seconds": round(time.perf_counter() - start, 3),
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "serialized": report.serialized,
        "shared_bytes": shared_bytes(spec, spec.config) if spec.config else None,
        "config": attrs.asdict(spec.config) if spec.config else None,
    }


def _print_object(facts: dict[str, Any]) -> None:
    print(f"{facts['object']}: {facts['arch']}, {facts['bytes']} bytes, compiled in {facts['seconds']:.1f} s")
    print(f"  {facts['registers']} registers, {facts['spill_bytes']} bytes spilled", end="")
    config = facts["config"]
    if config:
        (tile_m, tile_n), (cluster_m, cluster_n) = config["tile"], config["cluster"]
        print(
            f", {facts['shared_bytes']} bytes of shared memory"
            f"\n  tile {tile_m} x {tile_n}, cluster {cluster_m} x {cluster_n}, {config['stages']} stages, "
            f"{'ping-pong' if config['ping_pong'] else 'cooperative'}"
        )
    else:
        print(", hosted on plain tensors")
    if facts["serialized"]:
        print(f"  the compiler serialized wgmmas: {facts['serialized']}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".codalang-probe").touch()
        (folder / ".codalang-probe").unlink()
    except OSError as error:
        raise CodaError(f"cannot write to {folder}: {error.strerror or error}", argument="--output") from None


def _needs_compiler() -> None:
    """Raises CodaUnsupportedError where the device compiler is not installed."""
    import importlib.util

    if importlib.util.find_spec("cutlass") is None:
        raise CodaUnsupportedError(
            "the device compiler is not installed", hint="pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'"
        )
