"""`codalang explain` of a program: its kernels one by one, what each loads and stores, and what is kept.

For the forward as it runs when gradients are wanted, and for the derived backward:

    kernels      the matmul and its epilogue, the five kinds of work; what is loaded besides the matmul's operands, and
                 stored, with its bytes
    kept         what the backward reads of the forward, and the bytes that stay allocated for it

Bytes are numbers where the sizes are given, polynomials of the dimension names else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from codalang.cli.traffic import (
    NOTHING,
    Stored,
    Work,
    known,
    show_bytes,
    show_counts,
    show_extents,
    show_operations,
    text,
    values,
    work,
)
from codalang.ir.dims import Dim
from codalang.ir.program import Program

if TYPE_CHECKING:
    from codalang.autodiff.program_derivative import ProgramDerivative

_WORDS = {
    "result": "a result of the program",
    "made": "made by the forward anyway",
    "saved": "an extra store of the forward",
}
_KINDS = {"matmul": "matmul", "hosted": "epilogue on plain tensors", "vector": "vector step"}


def forward_values(derivative: ProgramDerivative, dtype: str) -> dict[str, Stored]:
    """The values of the forward that saves."""
    return values(derivative.forward, dtype)


def backward_values(derivative: ProgramDerivative, dtype: str) -> dict[str, Stored]:
    """The values of the backward, whose parameters are stored as the forward's values that they belong to."""
    stored = forward_values(derivative, dtype)
    return values(
        derivative.backward, dtype, {name: stored[load.name].dtype for name, load in derivative.loads.items()}
    )


def kept(derivative: ProgramDerivative) -> dict[str, str]:
    """What the backward reads of the forward, inputs left out: its name in the backward -> in the forward."""
    return {n: load.name for n, load in derivative.loads.items() if load.source in ("output", "saved")}


def explain_program(
    program: Program, derivative: ProgramDerivative | None, sizes: Mapping[str, int], dtype: str
) -> dict[str, Any]:
    """The facts, as data.  Without a derivative, of the forward alone."""
    if derivative is None:
        forward = _part(program, values(program, dtype), sizes)
        return {"name": program.name, "sizes": dict(sizes), "forward": forward, "backward": None}
    stored = forward_values(derivative, dtype)
    return {
        "name": program.name,
        "sizes": dict(sizes),
        "forward": _part(derivative.forward, stored, sizes),
        "kept": _kept(program, derivative, stored, sizes),
        "backward": _part(derivative.backward, backward_values(derivative, dtype), sizes),
    }


def _part(program: Program, stored: Mapping[str, Stored], sizes: Mapping[str, int]) -> dict[str, Any]:
    works = [work(statement, stored) for statement in program.statements]
    counts = {kind: sum(w.kind == kind for w in works) for kind in ("matmul", "hosted", "vector")}
    return {
        "name": program.name,
        "kernels": counts,
        "operations": _amount(sum((w.operations for w in works), NOTHING), sizes),
        "operands": _amount(total(works, stored, "operands"), sizes),
        "loaded": _amount(total(works, stored, "loads"), sizes),
        "stored": _amount(total(works, stored, "stores"), sizes),
        "statements": [_statement(text(s), w, stored, sizes) for s, w in zip(program.statements, works, strict=True)],
    }


def total(works: list[Work], stored: Mapping[str, Stored], which: str) -> Dim:
    """All bytes of the statements' operands, loads or stores: each counts what it reads for itself."""
    return sum((stored[name].bytes for w in works for name in getattr(w, which)), NOTHING)


def _statement(text: str, work: Work, stored: Mapping[str, Stored], sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text": text,
        "kind": work.kind,
        "epilogue": work.epilogue,
        "host": work.host,
        "extents": [_amount(extent, sizes) for extent in work.extents],
        "operations": _amount(work.operations, sizes),
        "operands": _bytes(work.operands, stored, sizes),
        "loads": _bytes(work.loads, stored, sizes),
        "stores": _bytes(work.stores, stored, sizes),
        "primitives": dict(work.primitives),
    }


def _bytes(names: Collection[str], stored: Mapping[str, Stored], sizes: Mapping[str, int]) -> dict[str, Any]:
    return {name: _amount(stored[name].bytes, sizes) for name in names}


def _amount(amount: Dim, sizes: Mapping[str, int]) -> int | str:
    """A number, or the polynomial as text."""
    number = known(amount, sizes)
    return str(amount) if number is None else number


def how_kept(program: Program, name: str) -> str:
    """Where a value that the forward keeps comes from: a key of `_WORDS`."""
    if name in program.results:
        return "result"
    return "made" if any(name in statement.makes for statement in program.statements) else "saved"


def _kept(
    program: Program, derivative: ProgramDerivative, stored: Mapping[str, Stored], sizes: Mapping[str, int]
) -> dict[str, Any]:
    found = list(dict.fromkeys(kept(derivative).values()))
    return {
        "bytes": _amount(sum((stored[name].bytes for name in found), NOTHING), sizes),
        "values": [
            {"value": name, "bytes": _amount(stored[name].bytes, sizes), "how": how_kept(program, name)}
            for name in found
        ],
        "inputs": [load.name for load in derivative.loads.values() if load.source == "param"],
    }


# ---- in words --------------------------------------------------------------------------------------------------------


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The facts for people."""
    sizes = report["sizes"]
    yield report["name"] + (": " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) if sizes else "")
    yield from _part_lines("forward", report["forward"])
    if not report["backward"]:
        yield f"  no backward: {report['no_backward']}"
        return
    held = report["kept"]
    yield f"  kept for the backward: {_text(held['bytes'])}"
    for value in held["values"]:
        yield f"    {value['value']:<16} {_text(value['bytes']):>10}  {_WORDS[value['how']]}"
    if held["inputs"]:
        yield f"    and the inputs   {', '.join(held['inputs'])}"
    yield from _part_lines("backward", report["backward"])


def _part_lines(title: str, part: Mapping[str, Any]) -> Iterator[str]:
    counts = {_KINDS[kind]: count for kind, count in part["kernels"].items() if count}
    operations = show_operations(_dim(part["operations"]), {})
    yield f"  {title} `{part['name']}`: {show_counts(counts) or 'no kernels'}; {operations}"
    moved = ", ".join(
        f"{_text(part[key])} {words}"
        for key, words in (("operands", "of operands"), ("loaded", "loaded besides"), ("stored", "stored"))
    )
    yield f"    {moved}"
    for number, statement in enumerate(part["statements"], 1):
        yield f"    {number}. {statement['text']}"
        if statement["kind"] == "vector":
            continue
        what = show_extents(tuple(map(_dim, statement["extents"])), {})
        if statement["operations"]:
            what += f", {show_operations(_dim(statement['operations']), {})}"
        yield f"       {'extents':<8} {what}"
        for kind in ("operands", "loads", "stores"):
            if statement[kind]:
                listed = ", ".join(f"{name} ({_text(amount)})" for name, amount in statement[kind].items())
                yield f"       {kind:<8} {listed}"
        if statement["primitives"]:
            yield f"       {'work':<8} {show_counts(statement['primitives'])}"


def _dim(amount: int | str) -> Dim:
    """As it is shown: a name stands for a polynomial."""
    return Dim.of(amount)


def _text(amount: int | str) -> str:
    return show_bytes(_dim(amount), {})
