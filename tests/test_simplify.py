"""Simplification: the rewrites, and that values stay what they were to the last bit."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from random import Random

import attrs
import golden_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import epilogues, extents, inputs_for

from codalang.errors import CodaTypeError
from codalang.ir import reference
from codalang.ir.build import EpilogueBuilder, canonical
from codalang.ir.epilogue import Epilogue
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.ir.types import COL, SCALAR, Dtype, row, tile
from codalang.ir.verify import verify
from codalang.parser import parse, read_source

STDLIB = sorted((Path(__file__).parent.parent / "stdlib").glob("*.coda"))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 3.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]


def simplified(e: Epilogue) -> Epilogue:
    """The simplified epilogue: well-formed, and as simple as it gets."""
    result = simplify(e)
    verify(result)
    again = simplify(result)
    assert again == result
    assert print_epilogue(again) == print_epilogue(result)
    return result


@pytest.mark.parametrize("name", golden_cases.load("simplify.txt"))
def test_simplify(name: str) -> None:
    def produce(text: str) -> str:
        return "\n".join(print_epilogue(simplified(e)) for e in parse(text).epilogues.values())

    golden_cases.check("simplify.txt", name, produce)


@pytest.mark.parametrize("path", STDLIB, ids=lambda p: p.stem)
def test_standard_library_is_simple(path: Path) -> None:
    for e in parse(read_source(path)).epilogues.values():
        assert simplified(e) == e


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, the sign of zero included; any NaN equals any other."""
    nan = torch.isnan(a) & torch.isnan(b)
    return bool((nan | ((a == b) & (torch.signbit(a) == torch.signbit(b)))).all())


# Ops whose results do not depend on a library's last bits.
EXACT = sorted(set(OPS) - {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf"})


def untamed(seed: int) -> Epilogue:
    """Three ops on a few values and constants, so that each meets the results of the others; every value an output.

    Drawn from a seed and not from hypothesis, whose programs are mostly too small for two rules to meet.
    """
    random = Random(seed)
    b = EpilogueBuilder("e", ("M", "N"))
    for name, type_ in (("x", tile()), ("y", tile()), ("s", SCALAR), ("r", row()), ("c", COL)):
        b.param(name, type_)
    for value in random.sample([*SPECIAL, True, False], 4):
        b.const(value)
    if random.random() < 0.5:
        b.op("gt", 0, 1)
    ops = random.sample(EXACT, 3)
    for op in random.choices(ops, k=30):
        operands = []
        for dtype in OPS[op].operands:
            options = [i for i, node in enumerate(b.nodes) if node.type.dtype is dtype] or [b.const(True)]
            constants = [i for i in options if b.nodes[i].op == "const"] or options
            operands.append(random.choice(random.choice([options, options[:2], options[-4:], constants])))
        with contextlib.suppress(CodaTypeError):  # the widths do not fit
            b.op(op, *operands)
    for index, node in enumerate(list(b.nodes)):
        if node.type.dtype is Dtype.BOOL:
            index = b.op("where", index, b.const(3.0), b.const(5.0))
        b.store(f"o{index}", index, tile(node.type.width or 1))
        b.reduce(f"p{index}", index, COL)
    return b.finish()


def assert_same_values(e: Epilogue, extents: tuple[int, int], seed: int, special: bool) -> None:
    inputs = inputs_for(e, extents, seed)
    if special:  # zeros of both signs, infinities and NaN among the inputs
        generator = torch.Generator().manual_seed(seed)
        for name, value in inputs.items():
            pick = torch.randint(0, len(SPECIAL), value.shape, generator=generator)
            use = torch.rand(value.shape, generator=generator) < 0.7
            inputs[name] = torch.where(use, torch.tensor(SPECIAL, dtype=torch.float64)[pick], value)
    before = reference.run(e, inputs, extents=extents)
    after = reference.run(simplified(e), inputs, extents=extents)
    assert list(before) == list(after)
    for output in e.outputs:
        if not same_bits(before[output.name], after[output.name]):
            alone = canonical(attrs.evolve(e, outputs=(output,)))
            pytest.fail(f"{print_epilogue(alone)}became\n{print_epilogue(simplify(alone))}for {inputs}")


@given(epilogues(), extents, st.integers(0, 1 << 30), st.booleans())
def test_values_stay_what_they_were(e: Epilogue, extents: tuple[int, int], seed: int, special: bool) -> None:
    assert_same_values(e, extents, seed, special)


@settings(max_examples=4 * settings().max_examples)
@given(st.integers(0, 1 << 60))
def test_values_stay_what_they_were_where_identities_apply(seed: int) -> None:
    assert_same_values(untamed(seed), (8, 8), seed, special=True)


NUMERIC = [name for name, info in OPS.items() if not info.resize and Dtype.BOOL not in info.operands]


@pytest.mark.parametrize("op", NUMERIC)
def test_constants_fold_to_what_torch_computes(op: str) -> None:
    """Special values exactly, others to the last bits in which libraries differ."""
    count = len(OPS[op].operands)
    cases = [(a,) for a in SPECIAL] if count == 1 else [(a, b) for a in SPECIAL for b in SPECIAL]
    for values in cases:
        b = EpilogueBuilder("e", ("M", "N"))
        value = b.op(op, *(b.const(v) for v in values))
        if OPS[op].result is Dtype.BOOL:
            value = b.op("where", value, b.const(1.0), b.const(0.0))
        b.store("y", value, tile())
        e = b.finish()
        folded = simplified(e)
        if len(folded.nodes) > 1:
            assert op in ("min", "max")
            assert values[0] == values[1] == 0
            continue
        want = reference.run(e, {}, extents=(1, 2))["y"]
        got = reference.run(folded, {}, extents=(1, 2))["y"]
        assert same_bits(want, got) or torch.allclose(want, got, rtol=1e-14, atol=0), (op, values, want, got)


def test_simplify_takes_linear_time() -> None:
    def seconds(n: int) -> float:
        b = EpilogueBuilder("e", ("M", "N"))
        x = value = b.param("x", tile())
        for i in range(n):
            value = b.op("add", b.op("neg", b.op("neg", value)), b.op("mul", x, b.const(float(i % 7))))
        b.store("y", value, tile())
        e = b.finish()
        start = time.perf_counter()
        simplify(e)
        verify(e)
        return time.perf_counter() - start

    seconds(100)
    assert seconds(24_000) < 30 * seconds(3_000) + 0.1
