"""`codalang explain`: what a program costs, and why: primitives, bytes moved, what is kept, and the kernels' plans.

For each epilogue, of the forward as it runs when a gradient is wanted and of the derived backward:

    primitives   how many of each of the five kinds of work the body does
    loads/stores activation-sized tensors, in bytes per element of [M, N]
    kept         what the backward needs of the forward, and how each value gets there
    kernel       tile, schedule, stages, shared memory, estimated registers

Of programs: `explain_program`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from codalang.autodiff import Derivative
from codalang.cli import OK, add_program, print_json
from codalang.cli.explain_program import explain_program, lines
from codalang.cli.kernels import COLUMNS, DEPTH, ROWS
from codalang.cli.programs import load_program, selected
from codalang.cli.sizes import add_sizes, given_for
from codalang.cli.specs import DTYPES, backward_spec, column_step, forward_spec
from codalang.cli.text import derived, derived_program
from codalang.cli.traffic import primitives, show_counts
from codalang.errors import CodaCallError, CodaError
from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Program
from codalang.ir.simplify import simplify
from codalang.ir.types import Kind
from codalang.lower.plan import registers, shared_bytes
from codalang.lower.spec import DTYPE_BYTES, KernelSpec


def add_commands(commands: Any) -> None:
    """Declare the command."""
    explain = commands.add_parser("explain", help="what a program moves, keeps and computes, and how it is scheduled")
    add_program(explain)
    explain.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the matmul (default: bf16)")
    for name, usual in (("rows", ROWS), ("columns", f"{COLUMNS}, or the next multiple that fits"), ("depth", DEPTH)):
        explain.add_argument(f"--{name}", type=_size, help=f"of an epilogue's matmul (default: {usual})")
    add_sizes(explain, "--dims", help="of a program's dimensions; bytes are polynomials of those that are not given")
    explain.add_argument(
        "--budget", type=float, metavar="BYTES", help="per element that an epilogue may keep beyond its outputs"
    )
    explain.set_defaults(command=run_explain)


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number") from None
    if not 0 < size < 2**31:
        raise argparse.ArgumentTypeError("a size is from 1 to 2**31 - 1")
    return size


def run_explain(options: argparse.Namespace) -> int:
    """`codalang explain`."""
    items = selected(load_program(options.program), options.name)
    programs = [item for item in items if isinstance(item, Program)]
    epilogues = [item for item in items if isinstance(item, Epilogue)]
    if options.sizes and not programs:
        raise CodaCallError("an epilogue's sizes are --rows, --columns and --depth", argument="--dims")
    for name in ("rows", "columns", "depth", "budget"):
        if programs and getattr(options, name) is not None:
            hint = "a program's sizes are `--dims NAME=SIZE`" if name != "budget" else None
            raise CodaCallError(f"--{name} is of an epilogue; `{programs[0].name}` is a program", hint=hint)
    sizes = given_for(programs, options.sizes) if programs else []
    reports = [_explain_program(p, known, options.dtype) for p, known in zip(programs, sizes, strict=True)]
    explained = [_explain(epilogue, options) for epilogue in epilogues]
    if options.json:
        print_json(True, **({"programs": reports} if programs else {"epilogues": explained}))
    else:
        texts = [lines(report) for report in reports] + [_lines(report) for report in explained]
        print("\n\n".join("\n".join(text) for text in texts))
    return OK


def _explain_program(program: Program, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    try:
        derivative = derived_program(program)
    except CodaError as error:  # not differentiable: the forward is explained all the same
        return explain_program(program, None, sizes, dtype) | {"backward": None, "no_backward": error.message}
    return explain_program(program, derivative, sizes, dtype)


def _explain(epilogue: Epilogue, options: argparse.Namespace) -> dict[str, Any]:
    try:
        derivative = derived(epilogue, budget=options.budget)
    except CodaError as error:  # not differentiable: the forward is explained all the same
        return {"name": epilogue.name, "forward": _forward(simplify(epilogue), options), "backward": None,
                "no_backward": error.message, "kept": []}  # fmt: skip
    backward = derivative.backward
    return {
        "name": epilogue.name,
        "forward": _forward(derivative.forward, options),
        "backward": _part(backward, backward_spec(derivative, options.dtype)) if backward.outputs else None,
        "no_backward": None if backward.outputs else "every gradient is zero",
        "kept": _kept(derivative),
    }


def _forward(epilogue: Epilogue, options: argparse.Namespace) -> dict[str, Any]:
    step = column_step(epilogue)
    columns = options.columns or -(-COLUMNS // step) * step
    if columns % step:
        raise CodaCallError(
            f"`{epilogue.name}` has widths or groups that take a multiple of {step} columns, got {columns}",
            argument="--columns",
        )
    spec = forward_spec(epilogue, options.dtype, options.rows or ROWS, columns, options.depth or DEPTH)
    return _part(epilogue, spec)


def _part(epilogue: Epilogue, spec: KernelSpec) -> dict[str, Any]:
    """One kernel's facts."""
    loads = {p.name: _bytes(p.type.width, dtype) for p, dtype in spec.inputs if p.type.kind is Kind.TILE}
    stores = {s.name: _bytes(s.type.width, dtype) for s, dtype in spec.stores}
    return {
        "name": epilogue.name,
        "primitives": primitives(epilogue),
        "loads": loads,
        "stores": stores,
        "bytes_per_element": sum(loads.values()) + sum(stores.values()),
        "kernel": _kernel(spec),
    }


def _bytes(width: Any, dtype: str) -> float:
    """Bytes per element of [M, N]."""
    return float(width) * DTYPE_BYTES[dtype]


def _kernel(spec: KernelSpec) -> dict[str, Any] | None:
    config = spec.config
    if config is None:
        return None
    return {
        "tile": list(config.tile),
        "cluster": list(config.cluster),
        "schedule": "ping-pong" if config.ping_pong else "cooperative",
        "stages": config.stages,
        "shared_bytes": shared_bytes(spec, config),
        "registers": registers(spec, config),
    }


def _kept(derivative: Derivative) -> list[dict[str, Any]]:
    """Each value that the backward needs: where it comes from, and the bytes per element that it costs."""
    return [
        {"value": d.value, "how": d.how, "load_bytes": 2 * float(d.load), "store_bytes": 2 * float(d.store)}
        for d in derivative.plan
    ]


_WORDS = {
    "param": "loaded: it is an input of the forward",
    "output": "loaded: the forward stores it anyway",
    "saved": "saved: an extra store of the forward",
    "inverted": "undone from what the forward stores, which is loaded",
    "recomputed": "recomputed from what is loaded",
}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield report["name"]
    yield from _part_lines("forward", report["forward"])
    yield "  kept for the backward"
    for kept in report["kept"]:
        moved = kept["load_bytes"] + kept["store_bytes"]
        yield f"    {kept['value']:<16} {_WORDS.get(kept['how'], kept['how'])}; {moved:g} bytes per element"
    if not report["kept"]:
        yield "    nothing that is activation-sized"
    if report["backward"]:
        yield from _part_lines("backward", report["backward"])
    else:
        yield f"  no backward: {report['no_backward']}"


def _part_lines(title: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"  {title} `{part['name']}`: {part['bytes_per_element']:g} bytes per element of [M, N] beside the matmul"
    for kind in ("loads", "stores"):
        if part[kind]:
            yield f"    {kind:<10} " + ", ".join(f"{name} ({size:g})" for name, size in part[kind].items())
    yield f"    primitives {show_counts(part['primitives'])}"
    kernel = part["kernel"]
    if kernel:
        tile, cluster = ("x".join(map(str, kernel[k])) for k in ("tile", "cluster"))
        yield (
            f"    kernel     {tile} {kernel['schedule']}, cluster {cluster}, {kernel['stages']} stages, "
            f"{kernel['shared_bytes']} bytes of shared memory, about {kernel['registers']} registers per thread"
        )
    else:
        yield "    kernel     hosted on plain tensors: no mainloop"
