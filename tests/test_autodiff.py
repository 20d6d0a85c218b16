"""Derived gradients against torch.autograd in float64, what the backward may read, and what it moves.

Gradients are compared elementwise to 1e-9 of the sum of their absolute contributions (see `oracles`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import attrs
import golden_cases
import pytest
import torch
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from oracles import absolute_contributions, as_leaf, assert_within, autograd, backward_inputs, derived
from strategies import JUMPS, NOT_SMOOTH, cotangents_for, epilogues, extents, fitted, inputs_for
from torch import Tensor
from user_states import USER_STATES

from codalang.autodiff import Derivative, Load, derive
from codalang.autodiff.cut import Kept, choose
from codalang.autodiff.graph import Graph
from codalang.autodiff.rules import RULES
from codalang.autodiff.seeds import REDUCTION_RULES
from codalang.errors import CodaCallError, CodaUnsupportedError
from codalang.ir import reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Node
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.ir.verify import verify
from codalang.parser import parse

RELATIVE = 1e-9
ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "grad"
# Those whose derived text and traffic are pinned down here; test_stdlib holds all gradients against formulas.
STDLIB = sorted(path.stem for path in GOLDEN.glob("*.coda"))
HALF = Fraction(1, 2)

seeds = st.integers(0, 2**20)
Tensors = dict[str, Tensor]


def program(text: str) -> Epilogue:
    """The only epilogue of a source text."""
    (epilogue,) = parse(text).epilogues.values()
    return epilogue


def standard(name: str) -> Epilogue:
    """An epilogue of the standard library."""
    return parse((ROOT / "stdlib" / f"{name}.coda").read_text()).epilogues[name]


def check_gradients(
    epilogue: Epilogue,
    derivative: Derivative,
    inputs: Tensors,
    cotangents: Tensors,
    size: tuple[int, int],
    relative: float = RELATIVE,
) -> None:
    """Every gradient that was asked for equals autograd's, a missing cotangent being zero."""
    found = derived(derivative, inputs, cotangents, size)
    expected = autograd(epilogue, inputs, cotangents, size)
    scale = absolute_contributions(epilogue, inputs, cotangents, size)
    for name, output in derivative.gradients.items():
        if inputs[name].is_floating_point():
            assert_within(found[name], expected[name], scale[name], relative, f"d_{name}")
        else:
            assert output is None


def check_text(text: str, size: tuple[int, int] = (3, 8), **inputs: Tensor) -> Derivative:
    """Derive a program, and check its gradients on random inputs but for those given."""
    epilogue = program(text)
    derivative = derive(epilogue)
    values = inputs_for(epilogue, size, seed=1) | inputs
    check_gradients(epilogue, derivative, values, cotangents_for(epilogue, size, seed=1), size)
    return derivative


def note_program(epilogue: Epilogue, derivative: Derivative | None = None) -> None:
    """The .coda text of a failing example."""
    note(print_epilogue(epilogue))
    if derivative is not None and derivative.backward.outputs:
        note(print_epilogue(derivative.backward))


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_every_op_has_a_rule() -> None:
    assert set(RULES) == set(OPS)


def test_every_reduction_has_a_rule() -> None:
    assert set(REDUCTION_RULES) == set(REDUCTIONS)


# ---- every op, alone, on every mix of kinds --------------------------------------------------------------------------

KINDS = [tile(), row(), COL, SCALAR]


def _operand_types(op: str) -> list[tuple[ValueType, ...]]:
    numbers = sum(d is Dtype.F32 for d in OPS[op].operands)
    mixes = list(itertools.product(KINDS, repeat=numbers))
    needs_columns = OPS[op].resize or OPS[op].attr == "group"
    return [m for m in mixes if not needs_columns or any(t.width is not None for t in m)]


# Ops of floats with a float result.
FLOAT_OPS = [op for op, info in OPS.items() if info.result is Dtype.F32 and Dtype.F32 in info.operands]
CASES = [(op, types) for op in FLOAT_OPS for types in _operand_types(op)]
ATTRIBUTES = {"exponent": 1.5, "dtype": "bf16", "group": 2}


def _one_op(op: str, types: tuple[ValueType, ...], attr: str | float | int | None = None) -> Epilogue:
    """The op on parameters a, b; its mask, where it has one, compares them with each other."""
    b = EpilogueBuilder("one", ("M", "N"))
    operands = [b.param(name, type) for name, type in zip("ab", types, strict=False)]
    operands = [b.op("lt", *operands), *operands] if op == "where" else operands
    if OPS[op].attr is not None and attr is None:
        attr = ATTRIBUTES[OPS[op].attr]
    value = b.op(op, *operands, attr=attr)
    width = b.nodes[value].type.width or Fraction(1)
    b.store("y", value, tile(width))
    b.reduce("per_row", value, COL)
    b.reduce("per_column", value, row(width))
    b.reduce("all", value, SCALAR)
    return b.finish()


@pytest.mark.parametrize(("op", "types"), CASES, ids=[f"{op}-{'-'.join(t.kind.value for t in ts)}" for op, ts in CASES])
def test_op(op: str, types: tuple[ValueType, ...]) -> None:
    epilogue = _one_op(op, types)
    size = (3, 4)
    # Positive, for logarithms and roots; the second operand on both sides of the first.
    inputs = {name: value.abs() + 0.25 for name, value in inputs_for(epilogue, size, seed=3).items()}
    check_gradients(epilogue, derive(epilogue), inputs, cotangents_for(epilogue, size, seed=3), size)


@pytest.mark.parametrize("op", ["neg", "abs", "exp", "exp2", "tanh", "sigmoid", "erf", "min", "max", "where", "div"])
def test_op_on_negative_and_large_values(op: str) -> None:
    epilogue = _one_op(op, (tile(),) * sum(d is Dtype.F32 for d in OPS[op].operands))
    size = (4, 8)
    inputs = {name: 10 * value - 5 for name, value in inputs_for(epilogue, size, seed=4).items()}
    check_gradients(epilogue, derive(epilogue), inputs, cotangents_for(epilogue, size, seed=4), size)


@pytest.mark.parametrize("op", ["min", "max", "abs", "where", "sqrt"])
def test_at_kinks_as_torch_does(op: str) -> None:
    epilogue = _one_op(op, (tile(),) * sum(d is Dtype.F32 for d in OPS[op].operands))
    points = [1.0, 0.0, -0.0, -1.0] if op != "sqrt" else [1.0, 4.0]
    a, b = torch.tensor(list(itertools.product(points, points)), dtype=torch.float64).T
    inputs = {p.name: v.reshape(2, -1) for p, v in zip(epilogue.params, (a, b), strict=False)}
    size = tuple(inputs["a"].shape)
    cotangents = cotangents_for(epilogue, size, seed=5)
    expected = autograd(epilogue, inputs, cotangents, size)
    for name, value in derived(derive(epilogue), inputs, cotangents, size).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("op", ["min", "max", "abs", "where", "mul", "div", "exp", "tanh", "sigmoid", "erf", "log"])
def test_nan_reaches_the_gradients_that_it_reaches_in_torch(op: str) -> None:
    epilogue = _one_op(op, (tile(),) * sum(d is Dtype.F32 for d in OPS[op].operands))
    points = [float("nan"), 1.0, 2.0]
    a, b = torch.tensor(list(itertools.product(points, points)), dtype=torch.float64).T
    inputs = {p.name: v.reshape(1, -1).repeat(1, 2) for p, v in zip(epilogue.params, (a, b), strict=False)}
    size = tuple(inputs["a"].shape)
    # Only the tile output has a cotangent, so that a NaN stays in its element.
    cotangents = {"y": torch.ones(size, dtype=torch.float64)}
    derivative = derive(epilogue, cotangents=["y"])
    expected = autograd(epilogue, inputs, cotangents, size)
    for name, value in derived(derivative, inputs, cotangents, size).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-14, atol=0, equal_nan=True)


# ---- properties of random programs -----------------------------------------------------------------------------------


@given(epilogues(states=USER_STATES), extents, seeds)
def test_gradients(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    size = fitted(epilogue, size)
    derivative = derive(epilogue)
    note_program(epilogue, derivative)
    inputs = inputs_for(epilogue, size, seed)
    check_gradients(epilogue, derivative, inputs, cotangents_for(epilogue, size, seed), size)


@given(epilogues(without=NOT_SMOOTH, states=USER_STATES), extents, seeds)
def test_finite_differences(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    """Along a random direction of each parameter, by the values of the forward alone: nothing differentiates here."""
    size = fitted(epilogue, size)
    derivative = derive(epilogue)
    note_program(epilogue, derivative)
    inputs, cotangents = inputs_for(epilogue, size, seed), cotangents_for(epilogue, size, seed)
    found = derived(derivative, inputs, cotangents, size)
    scale = absolute_contributions(epilogue, inputs, cotangents, size)
    directions = inputs_for(epilogue, size, seed + 1)
    for name, gradient in found.items():
        if not gradient.is_floating_point():
            continue
        slope = (gradient * directions[name]).sum()
        # A step that crosses a kink is too long; a shorter one crosses it only a hundredth as often.
        errors = [
            abs(_difference(epilogue, inputs, cotangents, size, name, directions[name], h) - slope) for h in STEPS
        ]
        allowed = 1e-5 * ((scale[name] * directions[name].abs()).sum() + _sizes(epilogue, inputs, cotangents, size))
        assert min(errors) <= allowed, f"d_{name}: off by {min(errors):.3e}, where {allowed:.3e} is allowed"


STEPS = (1e-6, 1e-8)


def _difference(
    epilogue: Epilogue,
    inputs: Tensors,
    cotangents: Tensors,
    size: tuple[int, int],
    name: str,
    direction: Tensor,
    step: float,
) -> float:
    """The central difference of what the cotangents weigh, along a direction of one parameter."""
    ends = []
    for sign in (1, -1):
        moved = inputs | {name: inputs[name] + sign * step * direction}
        outputs = reference.run(epilogue, moved, extents=size)
        ends.append({n: outputs[n] for n in cotangents})
    # Each element's difference is small where the sum may not be.
    return sum(((ends[0][n] - ends[1][n]) * c).sum().item() for n, c in cotangents.items()) / (2 * step)


def _sizes(epilogue: Epilogue, inputs: Tensors, cotangents: Tensors, size: tuple[int, int]) -> float:
    """What rounding the outputs is proportional to."""
    outputs = reference.run(epilogue, inputs, extents=size)
    return 1e-2 * sum((outputs[n].abs() * c.abs()).sum().item() for n, c in cotangents.items())


@given(epilogues(states=USER_STATES), extents, seeds, st.data())
def test_a_subset_of_gradients_and_cotangents(
    epilogue: Epilogue, size: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    size = fitted(epilogue, size)
    wrt = data.draw(st.sets(st.sampled_from([p.name for p in epilogue.params])))
    present = data.draw(st.sets(st.sampled_from([o.name for o in epilogue.outputs])))
    derivative = derive(epilogue, wrt=wrt, cotangents=present)
    note_program(epilogue, derivative)
    assert list(derivative.gradients) == [p.name for p in epilogue.params if p.name in wrt]
    assert set(derivative.cotangents) <= present
    inputs = inputs_for(epilogue, size, seed)
    cotangents = {name: c for name, c in cotangents_for(epilogue, size, seed).items() if name in present}
    check_gradients(epilogue, derivative, inputs, cotangents, size)
    # Names do not depend on what is asked for.
    full = derive(epilogue, share=False)
    alone = derive(epilogue, wrt=wrt, cotangents=present, share=False)
    assert all(output in (None, full.gradients[name]) for name, output in alone.gradients.items())


@given(epilogues(states=USER_STATES), extents, seeds)
def test_saving_leaves_the_forward_as_it_was(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    size = fitted(epilogue, size)
    derivative = derive(epilogue)
    note_program(derivative.forward, derivative)
    inputs = inputs_for(epilogue, size, seed)
    before = reference.run(epilogue, inputs, extents=size)
    after = reference.run(derivative.forward, inputs, extents=size)
    assert list(after) == [*before, *derivative.saved]
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert derivative.forward.params == epilogue.params
    # What is saved is loaded, or it would not be worth its store.
    assert {load.name for load in derivative.loads.values() if load.source == "saved"} == set(derivative.saved)


@given(epilogues(states=USER_STATES), extents, seeds, st.integers(1, 3), st.sampled_from([2, 4]))
def test_backward_tile_by_tile(
    epilogue: Epilogue, size: tuple[int, int], seed: int, tile_rows: int, tile_columns: int
) -> None:
    size = fitted(epilogue, size)
    derivative = derive(epilogue)
    note_program(epilogue, derivative)
    inputs, cotangents = inputs_for(epilogue, size, seed), cotangents_for(epilogue, size, seed)
    loaded = backward_inputs(derivative, inputs, cotangents, size)
    whole = reference.run(derivative.backward, loaded, extents=size)
    tile_shape = fitted(derivative.backward, (tile_rows, tile_columns))
    tiled = reference.run_tiled(derivative.backward, loaded, tile=tile_shape, extents=size)
    scale = absolute_contributions(epilogue, inputs, cotangents, size)
    for name, output in derivative.gradients.items():
        if output is not None:
            assert_within(tiled[output], whole[output], scale[name], RELATIVE, output)


@given(epilogues())
def test_derived_programs_are_programs(epilogue: Epilogue) -> None:
    derivative = derive(epilogue)
    note_program(derivative.forward, derivative)
    for derived_ in (derivative.forward, derivative.backward):
        if derived_.outputs:
            verify(derived_)
            assert program(print_epilogue(derived_)) == derived_


@given(epilogues())
def test_the_first_parameter_is_the_first_tile_cotangent(epilogue: Epilogue) -> None:
    derivative = derive(epilogue)
    note_program(epilogue, derivative)
    params = derivative.backward.params
    sources = [derivative.loads[p.name].source for p in params]
    is_tile_cotangent = [
        p.type.kind is Kind.TILE and source == "cotangent" for p, source in zip(params, sources, strict=True)
    ]
    if any(is_tile_cotangent):
        assert is_tile_cotangent[0]
        stored = [derivative.loads[p.name].name for p, is_ in zip(params, is_tile_cotangent, strict=True) if is_]
        assert stored == [s.name for s in epilogue.stores if s.name in stored]
    elif any(p.type.kind is Kind.TILE and p.type.dtype is Dtype.F32 for p in params):
        assert params[0].type.kind is Kind.TILE and params[0].type.dtype is Dtype.F32
    else:
        assert derivative.backward.accumulator is None
    order = {"cotangent": 0, "output": 1, "saved": 2, "param": 3}
    assert [order[s] for s in sources[1:]] == sorted(order[s] for s in sources[1:])


@given(epilogues(max_steps=8, annotated=False, states=USER_STATES), extents, seeds)
def test_second_derivative(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    """d/d(inputs, cotangents) of a random functional of the gradients, by deriving the derived backward."""
    size = fitted(epilogue, size)
    first = derive(epilogue, share=False)
    second = derive(first.backward)
    note_program(epilogue, first)
    note_program(first.forward, second)
    inputs, cotangents = inputs_for(epilogue, size, seed), cotangents_for(epilogue, size, seed)
    loaded = backward_inputs(first, inputs, cotangents, size)
    weights = cotangents_for(first.backward, size, seed + 1)

    found, scale = _double_backward(first, second, inputs, loaded, weights, size)
    expected = _double_autograd(epilogue, first, inputs, cotangents, weights, size)
    for key, value in expected.items():
        nothing = torch.zeros_like(value)
        # A difference that a first derivative multiplies by may be all rounding: of values that are of the order of 1.
        bound = scale.get(key, nothing) + 1e-3 if key in found else nothing
        assert_within(found.get(key, nothing), value, bound, RELATIVE, " ".join(key))


# ---- low precision ---------------------------------------------------------------------------------------------------

# The derived backward's error is at most this times that of PyTorch in bf16 or f16, plus what rounding the gradient and
# what it is made of costs once.
EAGER_FACTOR = 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("outlier", [1.0, 100.0, 1000.0])
# The same examples each time: of two errors that are both small by chance one may be zero, and no factor bounds that.
@settings(max_examples=max(1, settings.default.max_examples // 4), derandomize=True, database=None)
@given(epilogue=epilogues(annotated=False, without=JUMPS), size=extents, seed=seeds)
def test_rounding_costs_no_more_than_in_eager_mode(
    dtype: torch.dtype, outlier: float, epilogue: Epilogue, size: tuple[int, int], seed: int
) -> None:
    """Inputs, outputs, cotangents, saved values and gradients in 16 bits, one row of all inputs an outlier."""
    size = fitted(epilogue, size)
    derivative = derive(epilogue)
    note_program(epilogue, derivative)
    inputs = {
        n: rounded(_with_outlier(epilogue, n, v, outlier), dtype) for n, v in inputs_for(epilogue, size, seed).items()
    }
    cotangents = {n: rounded(c, dtype) for n, c in cotangents_for(epilogue, size, seed).items()}
    exact = autograd(epilogue, doubled(inputs), doubled(cotangents), size)
    eager = autograd(epilogue, inputs, cotangents, size, dtype)
    found = _rounded_gradients(derivative, inputs, cotangents, size, dtype)
    scale = absolute_contributions(epilogue, doubled(inputs), doubled(cotangents), size)
    for name, output in derivative.gradients.items():
        if output is None:
            continue
        error, unavoidable = (eager[name].double() - exact[name]).norm(), torch.finfo(dtype).eps * scale[name].norm()
        ours = (found[output].double() - exact[name]).norm()
        if not error.isfinite() or not unavoidable.isfinite():
            continue  # of an exponential of 1000, say
        assert ours <= EAGER_FACTOR * error + unavoidable, f"d_{name}: {ours:.3e}, in eager mode {error:.3e}"


CONFIDENT = """epilogue e(acc: tile[M, N], target: col[M]: i64) {{
    let x = {}
    state lse: col[M]: {} = online_logsumexp(x)
    reduce logit: col[M] = sum(where(col_index() == target, x, 0))
    {}
}}"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("x", "lse", "more"),
    [
        ("acc", "f32", ""),
        ("0.5 * acc + 9", "f32", ""),
        ("cast(acc, bf16)", "f32", ""),
        ("cast(acc, f16)", "f32", ""),
        ("acc", "f32", "store x: tile[M, N]"),
        ("acc", "f32", "save x"),
        ("acc", "bf16", ""),
        ("30 * tanh(acc / 30)", "f32", ""),
    ],
)
def test_a_confident_prediction_has_a_small_gradient(dtype: torch.dtype, x: str, lse: str, more: str) -> None:
    """A logit of 28 beside others of 20: softmax - 1 is 0.02 or so, and rounding 28 may move exp(x - lse) by 0.06."""
    epilogue, size = program(CONFIDENT.format(x, lse, more)), (16, 64)
    generator = torch.Generator().manual_seed(1)
    acc = 20 + torch.rand(size, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 64, (16,), generator=generator)
    acc[torch.arange(16), target] += 7 + torch.rand(16, dtype=torch.float64, generator=generator)
    inputs = {"acc": acc.float(), "target": target}  # an accumulator is not rounded
    cotangents = {"lse": torch.ones(16), "logit": -torch.ones(16)}
    derivative = derive(epilogue, cotangents=list(cotangents))
    exact = autograd(epilogue, doubled(inputs), doubled(cotangents), size)["acc"]
    found = _rounded_gradients(derivative, inputs, cotangents, size, dtype)["d_acc"].double()
    if "cast" in x:
        coarse = torch.bfloat16 if "bf16" in x else torch.float16
        seen = {**doubled(inputs), "acc": acc.float().to(coarse).double()}
        exact = autograd(program(CONFIDENT.format("acc", "f32", "")), seen, doubled(cotangents), size)["acc"]
    assert (found - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of floats in a storage dtype; others as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def doubled(values: Tensors) -> Tensors:
    """Tensors of floats in float64."""
    return {name: rounded(value, torch.float64) for name, value in values.items()}


def _with_outlier(epilogue: Epilogue, name: str, value: Tensor, factor: float) -> Tensor:
    """The input with its first row multiplied, where it has rows of floats."""
    type_ = epilogue.param(name).type
    if type_.kind.has_rows and type_.dtype is Dtype.F32:
        value[0] *= factor
    return value


def _rounded_gradients(
    derivative: Derivative, inputs: Tensors, cotangents: Tensors, size: tuple[int, int], dtype: torch.dtype
) -> Tensors:
    """The backward's outputs as kernels make them: f32 in registers, and rounded wherever something is stored."""
    stored = reference.run(
        derivative.forward, inputs, dtype=torch.float32, extents=size, storage=reference.Storage(dtype)
    )
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    loaded = {name: sources[load.source][load.name] for name, load in derivative.loads.items()}
    storage = reference.Storage(dtype, {o.name: dtype for o in derivative.backward.outputs})
    return reference.run(derivative.backward, loaded, dtype=torch.float32, extents=size, storage=storage)


# ---- second derivatives ----------------------------------------------------------------------------------------------

Keyed = dict[tuple[str, str], Tensor]


def _double_backward(
    first: Derivative, second: Derivative, inputs: Tensors, loaded: Tensors, weights: Tensors, size: tuple[int, int]
) -> tuple[Keyed, Keyed]:
    """The second derivative and its scale: what reaches a stored value goes on through the forward's derivative."""
    if not first.backward.outputs:
        return {}, {}
    grads = derived(second, loaded, weights, size)
    bounds = absolute_contributions(first.backward, loaded, weights, size)
    found: Keyed = {}
    scale: Keyed = {}
    through: dict[str, Tensor] = {}
    through_bounds: dict[str, Tensor] = {}
    for name, load in first.loads.items():
        if load.source in ("output", "saved"):
            through[load.name], through_bounds[load.name] = grads[name], bounds[name]
        else:
            found[load.source, load.name], scale[load.source, load.name] = grads[name], bounds[name]
    if through:
        again = derive(first.forward, cotangents=through)
        more = derived(again, inputs, through, size)
        more_bounds = absolute_contributions(first.forward, inputs, through_bounds, size)
        for name in inputs:
            key = ("param", name)
            found[key] = found.get(key, 0.0) + more[name]
            scale[key] = scale.get(key, 0.0) + more_bounds[name]
    return found, scale


def _double_autograd(
    epilogue: Epilogue,
    first: Derivative,
    inputs: Tensors,
    cotangents: Tensors,
    weights: Tensors,
    size: tuple[int, int],
) -> Keyed:
    """The same by torch: autograd over autograd, for what the derived backward depends on."""
    leaves = {("param", n): as_leaf(v) for n, v in inputs.items()}
    leaves |= {("cotangent", n): as_leaf(v) for n, v in cotangents.items()}
    outputs = reference.run(epilogue, {n: leaves["param", n] for n in inputs}, extents=size)
    total = sum((leaves["cotangent", n] * outputs[n]).sum() for n in cotangents)
    if not isinstance(total, Tensor) or not total.requires_grad:
        return {}
    wanted = [n for n, output in first.gradients.items() if output is not None]
    if not wanted:
        return {}
    grads = torch.autograd.grad(total, [leaves["param", n] for n in wanted], create_graph=True, allow_unused=True)
    functional = sum(
        (weights[first.gradients[n]] * g).sum() for n, g in zip(wanted, grads, strict=True) if g is not None
    )
    if not isinstance(functional, Tensor) or not functional.requires_grad:
        return {}
    varied = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(functional, list(varied.values()), allow_unused=True)
    return {key: grad for key, grad in zip(varied, found, strict=True) if grad is not None}


@given(epilogues(states=USER_STATES), extents, seeds)
def test_gradients_that_share_an_output_are_equal(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    size = fitted(epilogue, size)
    shared, alone = derive(epilogue), derive(epilogue, share=False)
    note_program(epilogue, shared)
    inputs, cotangents = inputs_for(epilogue, size, seed), cotangents_for(epilogue, size, seed)
    a, b = derived(shared, inputs, cotangents, size), derived(alone, inputs, cotangents, size)
    assert all(torch.equal(a[name], b[name]) for name in a)
    for name, output in shared.gradients.items():
        if output is not None:
            param, stored = epilogue.param(name), next(o for o in shared.backward.outputs if o.name == output)
            assert (stored.type, stored.dtype) == (param.type, param.dtype)


@given(epilogues(states=USER_STATES), extents, seeds)
def test_hosted_reads_the_accumulator_again(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    size = fitted(epilogue, size)
    epilogue = attrs.evolve(epilogue, keeps=())
    derivative = derive(epilogue, hosted=True)
    note_program(epilogue, derivative)
    inputs = inputs_for(epilogue, size, seed)
    check_gradients(epilogue, derivative, inputs, cotangents_for(epilogue, size, seed), size)
    accumulator = epilogue.accumulator
    assert accumulator is None or Load("saved", f"saved_{accumulator.name}") not in derivative.loads.values()


@given(epilogues(states=USER_STATES), extents, seeds, st.data())
def test_what_was_kept_for_all_is_enough_for_some(
    epilogue: Epilogue, size: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    """The forward has run and kept what every gradient needs; then only some are wanted, of some cotangents."""
    size = fitted(epilogue, size)
    full = derive(epilogue)
    kept = {
        attrs.evolve(load, source="output") if load.source == "saved" else load
        for load in full.loads.values()
        if load.source != "cotangent"
    }
    wrt = data.draw(st.sets(st.sampled_from([p.name for p in epilogue.params])))
    present = data.draw(st.sets(st.sampled_from([o.name for o in epilogue.outputs])))
    derivative = derive(full.forward, wrt=wrt, cotangents=present, kept=kept)
    note_program(full.forward, derivative)
    assert derivative.saved == () and derivative.forward == full.forward
    assert {load for load in derivative.loads.values() if load.source != "cotangent"} <= kept
    inputs = inputs_for(epilogue, size, seed)
    cotangents = {name: c for name, c in cotangents_for(epilogue, size, seed).items() if name in present}
    check_gradients(full.forward, derivative, inputs, cotangents, size)


@given(epilogues(states=USER_STATES), extents, seeds)
def test_simplification_keeps_gradients(epilogue: Epilogue, size: tuple[int, int], seed: int) -> None:
    """What derives from a simplified forward, simplified again, is the gradient of the forward as written."""
    size = fitted(epilogue, size)
    simple = simplify(epilogue)
    derivative = derive(simple)
    if derivative.backward.outputs:
        derivative = attrs.evolve(derivative, backward=simplify(derivative.backward))
    note_program(epilogue, derivative)
    inputs = inputs_for(epilogue, size, seed)
    check_gradients(epilogue, derivative, inputs, cotangents_for(epilogue, size, seed), size)


# ---- what is saved ---------------------------------------------------------------------------------------------------


def _cuts_by_trying(nodes: list[Node], needed: list[int], ways: dict[int, Kept]) -> list[set[int]]:
    """The cheapest sets of loads from which everything needed can be computed, by trying every set."""
    costs = [
        (sum(ways[i].capacity for i in chosen), set(chosen))
        for count in range(len(ways) + 1)
        for chosen in itertools.combinations(ways, count)
        if _suffices(nodes, needed, set(chosen))
    ]
    least = min(cost for cost, _ in costs)
    return [chosen for cost, chosen in costs if cost == least]


def _suffices(nodes: list[Node], needed: list[int], chosen: set[int]) -> bool:
    known: list[bool] = []
    for index, node in enumerate(nodes):
        computable = node.op != "param" and all(known[a] for a in node.args)
        known.append(index in chosen or computable)
    return all(known[i] for i in needed)


@st.composite
def _choices(draw: Callable[..., object]) -> tuple[list[Node], list[int], dict[int, Kept]]:
    count = draw(st.integers(1, 7))
    nodes: list[Node] = []
    ways: dict[int, Kept] = {}
    for index in range(count):
        is_param = index == 0 or draw(st.integers(0, 3)) == 0
        args = () if is_param else tuple(draw(st.lists(st.integers(0, index - 1), min_size=1, max_size=2)))
        nodes.append(Node("param" if is_param else "map", args, tile(), f"p{index}" if is_param else None))
        load, store = draw(st.sampled_from([HALF, Fraction(1), Fraction(2)])), draw(st.sampled_from([0, 1, 2]))
        if is_param or draw(st.booleans()):
            ways[index] = Kept("any", f"v{index}", load, Fraction(store))
    return nodes, draw(st.lists(st.integers(0, count - 1), unique=True, max_size=4)), ways


@given(_choices())
@example(
    ([Node("param", (), tile(), "p"), Node("map", (0,), tile())], [1], dict.fromkeys((0, 1), Kept("any", "v", HALF)))
)
def test_the_cut_is_minimal(choice: tuple[list[Node], list[int], dict[int, Kept]]) -> None:
    nodes, needed, ways = choice
    chosen = choose(nodes, needed, ways, free=[False] * len(nodes))
    cheapest = _cuts_by_trying(nodes, needed, ways)
    assert chosen is not None and set(chosen) in cheapest
    # of those that cost as much it is the nearest to the parameters: all others can be computed from it
    for other in cheapest:
        assert _suffices(nodes, sorted(other), set(chosen))


@given(_choices())
def test_there_is_no_cut_where_a_parameter_cannot_be_loaded(
    choice: tuple[list[Node], list[int], dict[int, Kept]],
) -> None:
    nodes, needed, ways = choice
    for index, node in enumerate(nodes):
        without = {i: way for i, way in ways.items() if i != index}
        if node.op == "param":
            chosen = choose(nodes, needed, without, free=[False] * len(nodes))
            assert (chosen is not None) == _suffices(nodes, needed, set(without))


@given(_choices(), st.data())
def test_what_is_forced_is_loaded_where_it_is_needed(
    choice: tuple[list[Node], list[int], dict[int, Kept]], data: st.DataObject
) -> None:
    nodes, needed, ways = choice
    forced = data.draw(st.sets(st.sampled_from(sorted(ways)))) if ways else set()
    free = [False] * len(nodes)
    chosen, cheapest = choose(nodes, needed, ways, free, forced), choose(nodes, needed, ways, free)
    assert chosen is not None and cheapest is not None and _suffices(nodes, needed, set(chosen))
    assert forced & set(needed) <= set(chosen)
    # Nothing is loaded that could be left out, and what is not forced costs no more than it did.
    for index in chosen:
        assert not _suffices(nodes, needed, set(chosen) - {index}) or index in forced
    rest = [k.capacity for i, k in chosen.items() if i not in forced]
    assert sum(rest) <= sum(k.capacity for k in cheapest.values())


KEEPS = {
    # program, what is stored beside its outputs, what its backward loads beside the cotangents
    "save where the accumulator would be": (
        "let (a, b) = split(acc)\nlet y = a * sigmoid(b)\nsave a\nstore y: tile[M, N/2]",
        {"saved_a": HALF, "saved_b": HALF},
        {"saved_a": HALF, "saved_b": HALF},
    ),
    "save a value that nothing needs": (
        "let x = acc + r\nsave x\nstore y: tile[M, N] = x + 1",
        {},
        {},
    ),
    "save beside what is loaded anyway": (
        "let x = exp(acc)\nsave x\nstore y: tile[M, N] = x * acc",
        {"saved_acc": 1, "saved_x": 1},
        {"saved_acc": 1, "saved_x": 1},
    ),
    "recompute a stored value": (
        "let x = exp(acc)\nrecompute x\nstore y: tile[M, N] = x",
        {"saved_acc": 1},
        {"saved_acc": 1},
    ),
    "recompute what would be saved": (
        "let x = exp(acc)\nrecompute acc\nstore y: tile[M, N] = tanh(x)",
        {"saved_x": 1},
        {"saved_x": 1},
    ),
    "save a vector": (
        "let s = exp(r)\nsave s\nstore y: tile[M, N] = acc * s",
        {"saved_acc": 1, "saved_s": None},
        {"saved_acc": 1, "saved_s": None},
    ),
    "save a vector that is stored": (
        "let s = exp(r)\nsave s\nstore s: col[M]\nstore y: tile[M, N] = z * s",
        {},
        {"s": None, "z": 1},
    ),
}


@pytest.mark.parametrize(("body", "saved", "loads"), KEEPS.values(), ids=KEEPS)
def test_an_author_says_what_to_keep(body: str, saved: dict[str, Fraction], loads: dict[str, Fraction]) -> None:
    lines = body.replace("\n", "\n    ")
    derivative = check_text(f"epilogue e(acc: tile[M, N], z: tile[M, N], r: col[M]) {{\n    {lines}\n}}")
    kept = {o.name: o.type.width for o in derivative.forward.outputs if o.name in derivative.saved}
    assert kept == saved
    cotangents = set(derivative.cotangents.values())
    assert {p.name: p.type.width for p in derivative.backward.params if p.name not in cotangents} == loads


def test_what_cannot_be_recomputed() -> None:
    with pytest.raises(CodaUnsupportedError, match="needs a value that is to be recomputed") as info:
        derive(program("epilogue e(acc: tile[M, N]) {\nrecompute acc\nstore y: tile[M, N] = acc * acc\n}"))
    assert info.value.loc is not None and info.value.loc.line == 2


def test_bytes_moved_count_first_and_memory_kept_second() -> None:
    saved, output = Kept("saved", "a", HALF, HALF), Kept("output", "y", Fraction(1))
    assert output.capacity < saved.capacity < Kept("output", "y", Fraction(3, 2)).capacity


def loaded(derivative: Derivative) -> list[tuple[str, Fraction]]:
    """The activation-sized loads of a backward."""
    return [(p.name, p.type.width) for p in derivative.backward.params if p.type.kind is Kind.TILE]


def stored(epilogue: Epilogue) -> list[tuple[str, Fraction]]:
    """The activation-sized stores of an epilogue."""
    return [(s.name, s.type.width) for s in epilogue.stores]


def reduced(epilogue: Epilogue) -> list[str]:
    """The reductions of an epilogue."""
    return [r.name for r in epilogue.reductions]


@attrs.frozen
class Traffic:
    """Activation-sized traffic of a forward and its backward, the whole cotangents included."""

    forward_stores: list[tuple[str, Fraction]]
    backward_loads: list[tuple[str, Fraction]]
    backward_stores: list[tuple[str, Fraction]]
    backward_reductions: list[str]


TRAFFIC = {
    "swiglu": Traffic([("y", HALF), ("saved_acc", 1)], [("d_y", HALF), ("saved_acc", 1)], [("d_acc", 1)], []),
    "scaled_swiglu": Traffic(
        [("y", HALF), ("saved_acc", 1)], [("d_y", HALF), ("saved_acc", 1)], [("d_acc", 1)], ["d_r"]
    ),
    "residual_rms": Traffic([("x", 1), ("h", 1)], [("d_x", 1), ("d_h", 1), ("x", 1)], [("d_acc", 1)], ["d_gamma"]),
    "bias_gelu": Traffic([("y", 1), ("saved_acc", 1)], [("d_y", 1), ("saved_acc", 1)], [("d_acc", 1)], ["d_bias"]),
}


def test_traffic_is_counted_for_the_whole_standard_library() -> None:
    assert sorted(TRAFFIC) == STDLIB


@pytest.mark.parametrize("name", STDLIB)
def test_traffic(name: str) -> None:
    derivative = derive(standard(name))
    found = Traffic(
        stored(derivative.forward), loaded(derivative), stored(derivative.backward), reduced(derivative.backward)
    )
    assert found == TRAFFIC[name]
    # The plan accounts for every load that is not a cotangent, and for every extra store.
    saved = {name: width for name, width in stored(derivative.forward) if name in derivative.saved}
    cotangents = set(derivative.cotangents.values())
    assert sum(d.store for d in derivative.plan) == sum(saved.values())
    assert sum(d.load for d in derivative.plan) == sum(w for n, w in loaded(derivative) if n not in cotangents)


@pytest.mark.parametrize("name", STDLIB)
def test_golden(name: str) -> None:
    """The derived backward, as text.  `UPDATE_GOLDEN=1 pytest` writes what is derived now."""
    text = print_epilogue(derive(standard(name)).backward)
    path = GOLDEN / f"{name}.coda"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", golden_cases.load("derivatives.txt"))
def test_golden_derivative(name: str) -> None:
    """What each construct derives to: the forward that keeps, where it has to keep something, and the backward."""
    golden_cases.check("derivatives.txt", name, _derivative_text)


def _derivative_text(text: str) -> str:
    (epilogue,) = parse(text).epilogues.values()
    derivative = derive(epilogue)
    size = fitted(epilogue, (3, 8))
    check_gradients(epilogue, derivative, inputs_for(epilogue, size, 1), cotangents_for(epilogue, size, 1), size)
    kept = [print_epilogue(derivative.forward)] if derivative.saved else []
    return "\n".join([*kept, print_epilogue(derivative.backward)])


@pytest.mark.parametrize("name", STDLIB)
@pytest.mark.parametrize("size", [(1, 2), (5, 8), (7, 26)], ids=str)
def test_standard_library_gradients(name: str, size: tuple[int, int]) -> None:
    epilogue = standard(name)
    inputs = inputs_for(epilogue, size, seed=6)
    check_gradients(epilogue, derive(epilogue), inputs, cotangents_for(epilogue, size, seed=6), size)


@pytest.mark.parametrize("name", STDLIB)
def test_standard_library_gradients_of_outlier_rows(name: str) -> None:
    epilogue = standard(name)
    size = (6, 8)
    inputs = inputs_for(epilogue, size, seed=7)
    inputs["acc"][2] *= 100
    inputs["acc"][4] = -inputs["acc"][4].abs() * 50
    check_gradients(epilogue, derive(epilogue), inputs, cotangents_for(epilogue, size, seed=7), size)


@pytest.mark.parametrize("name", STDLIB)
def test_standard_library_gradients_in_f32(name: str) -> None:
    """By relative norm: float32 differs from float64 by its own rounding and no more."""
    epilogue = standard(name)
    size = (32, 64)
    inputs, cotangents = inputs_for(epilogue, size, seed=8), cotangents_for(epilogue, size, seed=8)
    loaded_ = backward_inputs(derive(epilogue), inputs, cotangents, size)
    exact = reference.run(derive(epilogue).backward, loaded_)
    single = reference.run(derive(epilogue).backward, loaded_, dtype=torch.float32)
    for output, value in single.items():
        assert (value.double() - exact[output]).norm() <= 1e-6 * exact[output].norm()


def test_an_output_that_holds_a_needed_value_is_loaded() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N]) { store y: tile[M, N] = tanh(acc) }")
    assert derivative.saved == ()
    assert list(derivative.loads.values()) == [Load("cotangent", "y"), Load("output", "y")]


def test_a_tile_parameter_is_loaded_again() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N], g: tile[M, N]) { store y: tile[M, N] = acc * sigmoid(g) }")
    # acc is needed for d_g, g for both.
    assert [(d.value, d.how) for d in derivative.plan if d.how != "recomputed"] == [("acc", "saved"), ("g", "param")]
    without = derive(
        program("epilogue e(acc: tile[M, N], g: tile[M, N]) { store y: tile[M, N] = acc * sigmoid(g) }"), wrt=["acc"]
    )
    assert without.saved == ()


def test_half_of_an_accumulator_is_saved_where_that_is_enough() -> None:
    derivative = check_text(
        """epilogue e(acc: tile[M, N]) {
            let (a, b) = split(acc)
            store y: tile[M, N/2] = exp(a) * 2 + b
        }"""
    )
    assert stored(derivative.forward) == [("y", HALF), ("saved_a", HALF)]


def test_what_was_kept_must_suffice() -> None:
    epilogue = standard("scaled_swiglu")
    with pytest.raises(CodaUnsupportedError, match="needs more of its forward than was kept, which is `r`"):
        derive(epilogue, kept=[Load("param", "r")])
    forward = derive(epilogue).forward
    with pytest.raises(CodaUnsupportedError, match="than was kept, which is `saved_acc`"):
        derive(forward, kept=[Load("output", "saved_acc")])
    derivative = derive(forward, cotangents=["y"], kept=[Load("output", "saved_acc"), Load("param", "r")])
    assert loaded(derivative) == [("d_y", HALF), ("saved_acc", 1)]


def test_a_wide_annotation_costs_twice() -> None:
    """The f32 output is as costly to load as storing and loading the accumulator again, and needs no memory."""
    derivative = check_text("epilogue e(acc: tile[M, N]) { store y: tile[M, N]: f32 = exp(acc) }")
    assert derivative.saved == ()
    derivative = check_text(
        """epilogue e(acc: tile[M, N], x: tile[M, N]: f32) {
            store y: tile[M, N] = exp(x) + acc
            store z: tile[M, N] = x
        }"""
    )
    assert Load("output", "z") in derivative.loads.values()


def test_linear_programs_read_nothing() -> None:
    derivative = check_text(
        """epilogue e(acc: tile[M, N], b: row[N], c: col[M]) {
            store y: tile[M, N] = acc - b + c
            reduce s: scalar = sum(acc)
        }"""
    )
    assert {load.source for load in derivative.loads.values()} == {"cotangent"}


# ---- faults that others had ------------------------------------------------------------------------------------------


def test_an_ignored_accumulator_has_no_gradient() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N], x: tile[M, N]) { store y: tile[M, N] = x * x }")
    assert derivative.gradients == {"acc": None, "x": "d_x"}
    assert "acc" not in {load.name for load in derivative.loads.values()}


def test_an_unused_input_has_no_gradient() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N], r: col[M], b: row[N]) { store y: tile[M, N] = acc * b }")
    assert derivative.gradients == {"acc": "d_acc", "r": None, "b": "d_b"}


def test_stop_gradient_of_everything() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N]) { store y: tile[M, N] = stop_gradient(acc) * 2 }")
    assert derivative.gradients == {"acc": None}
    assert derivative.backward.outputs == () and derivative.backward.params == ()
    assert derivative.saved == ()


def test_no_cotangent_and_nothing_wanted() -> None:
    epilogue = standard("swiglu")
    for derivative in (derive(epilogue, cotangents=[]), derive(epilogue, wrt=[])):
        assert not any(derivative.gradients.values())
        assert derivative.forward == epilogue and derivative.backward.outputs == ()


def test_a_scalar_and_every_vector_get_their_gradients() -> None:
    derivative = check_text(
        """epilogue e(acc: tile[M, N], alpha: scalar, bias: row[N], scale: row[N/2], r: col[M]) {
            let (gate, up) = split((acc + bias) * r)
            store y: tile[M, N/2] = alpha * gate * up * scale
            reduce s: scalar = sum(alpha * bias)
        }"""
    )
    assert derivative.gradients == {p: f"d_{p}" for p in ("acc", "alpha", "bias", "scale", "r")}


def test_interleaved_columns_stay_in_place() -> None:
    """F = 4 distinct gate and up values: halves taken for interleaved pairs, or the reverse, would show."""
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            let (gate, up) = split(acc)
            store y: tile[M, N/2] = 10 * gate + up
        }"""
    )
    cotangent = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    found = derived(derive(epilogue), {"acc": torch.zeros(1, 8, dtype=torch.float64)}, {"y": cotangent}, (1, 8))
    assert found["acc"].tolist() == [[10, 1, 20, 2, 30, 3, 40, 4]]
    joined = program("epilogue e(a: tile[M, N/2], b: tile[M, N/2]) { store y: tile[M, N] = join(a, 10 * b) }")
    zeros = {name: torch.zeros(1, 2, dtype=torch.float64) for name in "ab"}
    found = derived(derive(joined), zeros, {"y": cotangent}, (1, 4))
    assert (found["a"].tolist(), found["b"].tolist()) == ([[1, 3]], [[20, 40]])


def test_all_negative_accumulators() -> None:
    acc = -torch.rand(5, 8, dtype=torch.float64) - 0.5
    check_text(
        """epilogue e(acc: tile[M, N], b: row[N]) {
            store y: tile[M, N] = max(acc, -1) * b + abs(acc)
            reduce m: row[N] = sum(min(acc, b))
        }""",
        (5, 8),
        acc=acc,
    )


def test_broadcast_and_strided_cotangents() -> None:
    """What `sum()`, `expand()` and `cat` hand to a backward: stride 0, and rows that are not adjacent."""
    epilogue, size = standard("residual_rms"), (4, 6)
    inputs = inputs_for(epilogue, size, seed=9)
    for cotangent in (
        torch.ones(1, 1, dtype=torch.float64).expand(4, 6),
        torch.randn(6, 9, dtype=torch.float64).T[::2][:4],
    ):
        view = {"x": cotangent[:, :6], "h": cotangent[:, :6], "ss": cotangent[:, 0]}
        kept = {name: c.clone() for name, c in view.items()}
        check_gradients(epilogue, derive(epilogue), inputs, view, size)
        assert all(torch.equal(view[name], kept[name]) for name in view)


def test_empty_extents() -> None:
    for size in ((0, 8), (3, 0), (0, 0)):
        epilogue = standard("scaled_swiglu")
        inputs, cotangents = inputs_for(epilogue, size, seed=10), cotangents_for(epilogue, size, seed=10)
        found = derived(derive(epilogue), inputs, cotangents, size)
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in inputs.items()}
        assert not any(value.any() for value in found.values())


def test_a_state_without_a_vjp() -> None:
    """Its other uses are derived, and its own gradient is an error that says where it stands and what to do."""
    text = """state total(x) {
        carry s = 0
        update { return s + x }
        merge { return a_s + b_s }
        finalize (t) = s
    }

    epilogue e(acc: tile[M, N]) {
        store y: tile[M, N] = acc * acc
        state t: col[M] = total(acc)
    }"""
    epilogue = program(text)
    assert derive(epilogue, cotangents=["y"]).gradients == {"acc": "d_acc"}
    assert derive(epilogue, wrt=[]).gradients == {}
    with pytest.raises(CodaUnsupportedError, match="`t` of `e` is a `total`, which has no `vjp`") as info:
        derive(epilogue)
    assert info.value.loc is not None and info.value.loc.line == 10


# ---- domains ---------------------------------------------------------------------------------------------------------

DOMAINS = {
    "a col on half and full width": """epilogue e(acc: tile[M, N], r: col[M]) {
        let (a, b) = split(acc)
        store y: tile[M, N] = acc * r
        store z: tile[M, N/2] = a * r * b
    }""",
    "a col on half and double width": """epilogue e(acc: tile[M, N], r: col[M]) {
        let (a, b) = split(acc)
        store y: tile[M, 2*N] = join(acc, acc) * exp(r)
        store z: tile[M, N/2] = a * exp(r)
        reduce s: col[M] = sum(r)
    }""",
    "a scalar broadcast to every width": """epilogue e(acc: tile[M, N], alpha: scalar) {
        store y: tile[M, 2*N] = alpha
        store z: tile[M, N/2] = alpha * alpha
        reduce s: scalar = sum(alpha)
        reduce r: row[2*N] = sum(alpha)
    }""",
    "a col summed over half the columns": """epilogue e(acc: tile[M, N], r: col[M]) {
        store z: tile[M, N/2] = r
    }""",
    "one half that is summed": """epilogue e(acc: tile[M, N]) {
        let (a, _) = split(acc)
        reduce s: col[M] = sum(a)
    }""",
    "both halves summed apart": """epilogue e(acc: tile[M, N]) {
        let (a, b) = split(acc)
        reduce s: col[M] = sum(a)
        reduce t: col[M] = sum(b)
    }""",
    "both halves summed together": """epilogue e(acc: tile[M, N]) {
        let (a, b) = split(acc)
        reduce s: col[M] = sum(a + b)
    }""",
    "halves of halves of a row": """epilogue e(acc: tile[M, N/2], b: row[2*N]) {
        let (p, q) = split(b)
        let (r, s) = split(p)
        store y: tile[M, N/2] = acc * r + s
        reduce t: scalar = sum(s)
        reduce u: scalar = sum(q)
    }""",
    "a scalar joined with a tile": """epilogue e(acc: tile[M, N/2], alpha: scalar, r: col[M]) {
        store y: tile[M, N] = join(acc * r, alpha)
        store z: tile[M, N] = join(r, acc)
    }""",
    "the half of a join that has no columns": """epilogue e(acc: tile[M, N], r: col[M]) {
        let (a, b) = split(join(r, acc))
        reduce s: col[M] = sum(a)
        reduce t: col[M] = sum(exp(a) + b)
    }""",
    "a row reduced to a col": """epilogue e(acc: tile[M, N], b: row[N]) {
        reduce s: col[M] = sum(b * b)
    }""",
    "no tile at all": """epilogue e(r: col[M], b: row[N]) {
        reduce s: scalar = sum(r * b)
        reduce t: col[M] = sum(r * r)
    }""",
    "a parameter that is an output": """epilogue e(acc: tile[M, N], x: tile[M, N]) {
        store x: tile[M, N] = exp(acc)
        store z: tile[M, N] = exp(acc) * x
    }""",
}


@pytest.mark.parametrize("text", DOMAINS.values(), ids=DOMAINS)
def test_domain(text: str) -> None:
    derivative = check_text(text, (3, 8))
    verify(derivative.backward)
    assert program(print_epilogue(derivative.backward)) == derivative.backward


def test_a_sum_gives_its_cotangent_to_whoever_was_summed() -> None:
    """No tile cotangent, nothing kept: the backward has no accumulator and broadcasts a col."""
    derivative = check_text("epilogue e(acc: tile[M, N]) { reduce s: col[M] = sum(acc) }")
    assert print_epilogue(derivative.backward) == (
        "epilogue e_backward(d_s: col[M]) {\n    store d_acc: tile[M, N] = d_s\n}\n"
    )


def test_without_a_tile_cotangent_another_tile_leads() -> None:
    derivative = check_text("epilogue e(acc: tile[M, N], x: tile[M, N]) { reduce s: col[M] = sum(acc * x) }")
    assert [p.name for p in derivative.backward.params] == ["saved_acc", "d_s", "x"]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_that_a_user_has_taken() -> None:
    derivative = check_text(
        """epilogue e(acc: tile[M, N], x: tile[M, N], d_x: tile[M, N], saved_acc: tile[M, N]) {
            store y: tile[M, N] = exp(acc) * x * d_x
            store d_y: tile[M, N] = exp(saved_acc) * x
        }"""
    )
    assert derivative.gradients == {"acc": "d_acc", "x": "d_x_2", "d_x": "d_d_x", "saved_acc": "d_saved_acc"}
    assert derivative.cotangents == {"y": "d_y_2", "d_y": "d_d_y"}
    names = [p.name for p in derivative.backward.params] + [o.name for o in derivative.backward.outputs]
    assert len(set(names)) == len(names)


def test_an_output_with_the_name_of_another_parameter() -> None:
    derivative = check_text(
        """epilogue e(acc: tile[M, N], x: tile[M, N]) {
            store x: tile[M, N] = exp(acc)
            store y: tile[M, N] = exp(acc) * x * x
        }"""
    )
    assert {Load("output", "x"), Load("param", "x")} <= set(derivative.loads.values())


def test_annotations_reach_gradients_and_cotangents() -> None:
    backward = derive(
        program(
            """epilogue e(acc: tile[M, N], x: tile[M, N]: f16, b: row[N]: bf16) {
                store y: tile[M, N]: f32 = acc * x
                reduce s: col[M]: f16 = sum(acc * b)
            }"""
        )
    ).backward
    assert {p.name: p.dtype for p in backward.params if p.name.startswith("d_")} == {"d_y": "f32", "d_s": "f16"}
    assert {o.name: o.dtype for o in backward.outputs} == {"d_acc": None, "d_x": "f16", "d_b": "bf16"}


def test_equal_gradients_of_other_dtypes_are_not_shared() -> None:
    text = "epilogue e(acc: tile[M, N], x: tile[M, N]{}, z: tile[M, N]) {{ store y: tile[M, N] = acc + x + z }}"
    assert derive(program(text.format(""))).gradients == {"acc": "d_acc", "x": "d_acc", "z": "d_acc"}
    assert derive(program(text.format(": f32"))).gradients == {"acc": "d_acc", "x": "d_x", "z": "d_acc"}
    alone = derive(program(text.format("")), share=False)
    assert alone.gradients == {"acc": "d_acc", "x": "d_x", "z": "d_z"}


@pytest.mark.parametrize("argument", ["wrt", "cotangents"])
@pytest.mark.parametrize("value", [["nothing"], "acc", "y", 3, iter(["acc"]), [None]])
def test_unknown_names(argument: str, value: object) -> None:
    with pytest.raises(CodaCallError, match=f"`{argument}` of `swiglu` must be a collection of names") as info:
        derive(standard("swiglu"), **{argument: value})
    assert info.value.argument == argument


# ---- programs of any length ------------------------------------------------------------------------------------------


def _long(kind: str, length: int) -> Epilogue:
    b = EpilogueBuilder("long", ("M", "N"))
    acc, r = b.param("acc", tile()), b.param("r", COL)
    value = acc
    for step in range(length):
        if kind == "sum":
            value = b.op("add", value, b.op("mul", acc, b.op("mul", r, b.const(1 / (1 + step)))))
        elif kind == "nest":
            value = b.op("tanh" if step % 2 else "neg", value)
        else:
            value = b.op("mul", b.const(1.0 + 1e-6), value) if step % 2 else b.op("neg", value)
    b.store("y", value, tile())
    return b.finish()


@pytest.mark.parametrize("kind", ["sum", "nest", "scale"])
def test_long_programs(kind: str) -> None:
    """25,000 steps: no recursion, and no more than linear time."""
    size = (1, 2)
    start = time.process_time()
    derive(_long(kind, 2_500))
    short = time.process_time() - start
    epilogue = _long(kind, 25_000)
    start = time.process_time()
    derivative = derive(epilogue)
    assert time.process_time() - start < 30 * short + 1.0
    inputs, cotangents = inputs_for(epilogue, size, seed=11), cotangents_for(epilogue, size, seed=11)
    found, expected = derived(derivative, inputs, cotangents, size), autograd(epilogue, inputs, cotangents, size)
    for name in found:
        assert (found[name] - expected[name]).norm() <= 1e-9 * (expected[name].norm() + 1e-6)


# ---- expressions -----------------------------------------------------------------------------------------------------


def test_expressions_simplify_to_what_one_would_write() -> None:
    graph = Graph(("M", "N"))
    x, y = graph.param("x", tile()), graph.param("y", tile())
    zero, one, two = graph.const(0.0), graph.const(1.0), graph.const(2.0)
    neg = graph.op("neg", x)
    assert graph.op("add", zero, x) == graph.op("add", x, zero) == graph.op("mul", one, x) == graph.op("neg", neg) == x
    assert graph.op("add", x, x) == graph.op("mul", x, two)
    assert graph.op("add", y, neg) == graph.op("add", neg, y) == graph.op("sub", y, x)
    assert graph.op("mul", neg, y) == graph.op("neg", graph.op("mul", x, y))
    assert graph.op("mul", graph.op("mul", two, x), y) == graph.op("mul", two, graph.op("mul", x, y))
    assert graph.op("join", graph.op("even", x), graph.op("odd", x)) == x
    # Not exact for NaN and infinities, hence left alone.
    assert graph.nodes[graph.op("mul", zero, x)].op == "mul"
    assert graph.nodes[graph.op("sub", x, x)].op == "sub"
    assert graph.nodes[graph.op("div", x, x)].op == "div"


def test_a_mask_that_comes_first_is_no_accumulator() -> None:
    """No matmul computes a mask or indices: they are loaded like any other input."""
    for dtype, condition in (("bool", "first"), ("i32", "first == 1")):
        body = f"store y: tile[M, N] = where({condition}, x, 2 * x)"
        epilogue = parse(f"epilogue e(first: tile[M, N]: {dtype}, x: tile[M, N]) {{ {body} }}").epilogues["e"]
        assert epilogue.accumulator is None
        for cotangents in (None, set()):
            derivative = derive(epilogue, cotangents=cotangents)
            assert not derivative.saved and derivative.gradients["first"] is None
