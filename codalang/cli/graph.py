"""`codalang graph`: a program, and with --backward its derived backward, as a picture in SVG.

Matmuls with their epilogues, the values between them with their bytes, and what the forward keeps for the backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from codalang.cli import OK, add_program, print_json
from codalang.cli.drawing import Panel, draw
from codalang.cli.explain_program import backward_values, forward_values, kept, total
from codalang.cli.programs import load_program, only_program
from codalang.cli.sizes import add_sizes, check_sizes, show_sizes
from codalang.cli.specs import DTYPES
from codalang.cli.text import derived_program
from codalang.cli.traffic import NOTHING, Stored, show_bytes, show_operations, text, values, work
from codalang.errors import CodaError
from codalang.ir.program import Program


def add_commands(commands: Any) -> None:
    """Declare the command."""
    graph = commands.add_parser("graph", help="draw a program, and its derived backward, as SVG")
    add_program(graph, "a program in it; needed where there are several")
    graph.add_argument("--backward", action="store_true", help="the forward that saves, and the derived backward")
    add_sizes(graph, "--dims", help="sizes of dimensions; bytes are polynomials of those that are not given")
    graph.add_argument("--dtype", choices=DTYPES, default="bf16", help="of tensors without annotation (default: bf16)")
    graph.add_argument("-o", "--output", metavar="FILE", type=Path, help="where the SVG goes (default: stdout)")
    graph.set_defaults(command=run_graph)


def run_graph(options: argparse.Namespace) -> int:
    """`codalang graph`."""
    program = only_program(load_program(options.program), options.name)
    check_sizes(program, options.sizes)
    svg = draw(_panels(program, options))
    if options.output is not None:
        _write(options.output, svg)
    if options.json:
        print_json(True, name=program.name, svg=None if options.output else svg, output=_named(options.output))
    elif options.output is None:
        sys.stdout.write(svg)
    return OK


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _write(path: Path, svg: str) -> None:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise CodaError(f"cannot write {path}: {error.strerror or error}", argument="--output") from None


def _panels(program: Program, options: argparse.Namespace) -> list[Panel]:
    sizes, dtype = options.sizes, options.dtype
    if not options.backward:
        return [_panel(program.name, program, values(program, dtype), (), sizes, dtype)]
    derivative = derived_program(program)
    held = kept(derivative)
    forward, backward = forward_values(derivative, dtype), backward_values(derivative, dtype)
    amount = sum((forward[name].bytes for name in dict.fromkeys(held.values())), NOTHING)
    first = _panel(
        f"{program.name}, as it runs when gradients are wanted",
        derivative.forward,
        forward,
        held.values(),
        sizes,
        dtype,
    )
    summary = f"{first.summary}; {show_bytes(amount, sizes)} kept for the backward"
    first = attrs.evolve(first, summary=summary, results=program.results)
    return [first, _panel(derivative.backward.name, derivative.backward, backward, held.keys(), sizes, dtype)]


def _panel(
    title: str,
    program: Program,
    stored: Mapping[str, Stored],
    held: Collection[str],
    sizes: Mapping[str, int],
    dtype: str,
) -> Panel:
    works = [work(statement, stored) for statement in program.statements]
    matmuls = sum(w.kind == "matmul" for w in works)
    told = [f"{matmuls} matmul{'' if matmuls == 1 else 's'}"]
    if set(program.dims) <= sizes.keys():  # polynomials of all are too long for a line
        moved = {key: show_bytes(total(works, stored, key), sizes) for key in ("operands", "loads", "stores")}
        told.append(show_operations(sum((w.operations for w in works), NOTHING), sizes))
        told.append(f"{moved['operands']} of operands, {moved['loads']} loaded besides, {moved['stores']} stored")
    told.append(dtype)
    known = {name: size for name, size in sizes.items() if name in program.dims}
    if known:
        told.append(show_sizes(known))
    steps = [text(statement) for statement in program.statements]
    return Panel(title, "; ".join(told), program, program.results, stored, works, steps, frozenset(held), sizes)
