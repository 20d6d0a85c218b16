"""Commands on kernels: emit, compile.  Neither needs a GPU."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from codalang.cli import OK, WRONG, add_program, print_json
from codalang.cli.programs import chosen, load_program
from codalang.cli.specs import DTYPES, backward_spec, forward_spec
from codalang.cli.text import derived
from codalang.errors import CodaError, CodaUnsupportedError
from codalang.ir.epilogue import Epilogue
from codalang.ir.printer import print_epilogue
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
    emit.add_argument("--stage", choices=_STAGES, default="cutedsl", help="default: cutedsl")
    _add_kernel_options(emit)
    emit.set_defaults(command=run_emit)

    compile_ = commands.add_parser("compile", help="compile to an object for sm_90a")
    add_program(compile_)
    _add_kernel_options(compile_)
    compile_.add_argument("-o", "--output", metavar="DIR", type=_folder, default=Path(), help="where objects go")
    compile_.set_defaults(command=run_compile)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of the directory is empty")
    return Path(text)


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the matmul (default: bf16)")
    parser.add_argument("--backward", action="store_true", help="the derived backward's kernel, too")


def run_emit(options: argparse.Namespace) -> int:
    """`codalang emit`."""
    stages = []
    for epilogue in chosen(load_program(options.program), options.name):
        for name, text in _emit(epilogue, options):
            stages.append({"name": name, "stage": options.stage, "text": text})
    if options.json:
        print_json(True, stages=stages)
    else:
        sys.stdout.write("\n".join(s["text"] if s["text"].endswith("\n") else s["text"] + "\n" for s in stages))
    return OK


def _emit(epilogue: Epilogue, options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.stage == "ir":
        shown = [simplify(epilogue)]
        if options.backward:
            shown.append(derived(epilogue).backward)
        return [(e.name, print_epilogue(e)) for e in shown]
    if options.stage == "backward":
        backward = derived(epilogue).backward
        return [(backward.name, print_epilogue(backward))]
    specs = _specs(epilogue, options)
    if options.stage == "cutedsl":
        from codalang.lower.codegen import generate

        return [(spec.epilogue.name, generate(spec)) for spec in specs]
    return [(spec.epilogue.name, _ptx(spec)) for spec in specs]


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
    objects = []
    for epilogue in chosen(load_program(options.program), options.name):
        for spec in _specs(epilogue, options):
            objects.append(_compile(spec, options.output / f"{spec.epilogue.name}.o"))
            if not options.json:
                _print_object(objects[-1])
    ok = not any(o["spill_bytes"] or o["serialized"] for o in objects)
    if options.json:
        print_json(ok, objects=objects)
    return OK if ok else WRONG


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
