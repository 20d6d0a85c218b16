"""The reference interpreter: values against plain Python, tiles against the whole, rounding by hand, and bad calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from oracles import assert_within
from strategies import epilogues, extents, fitted, inputs_for
from torch import Tensor
from user_states import ALL_STATES, POSITIVE_INPUTS, USER_STATES

from codalang.errors import CodaCallError
from codalang.ir.build import EpilogueBuilder
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue, Reduce, State
from codalang.ir.evaluate import CONTEXT_FUNCTIONS, OP_FUNCTIONS, Context, evaluate_function
from codalang.ir.fold import REDUCTION_FUNCTIONS, folded, initial_values, merged
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.printer import print_epilogue
from codalang.ir.reference import Storage, run, run_tiled
from codalang.ir.states import StateDef
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.lower.plan import TILINGS
from codalang.parser import parse

ROOT = Path(__file__).parent.parent
NAN, INF = math.nan, math.inf
F64 = torch.float64


def program(text: str) -> Epilogue:
    """The only epilogue of a source text."""
    (epilogue,) = parse(text).epilogues.values()
    return epilogue


def tensor(*values: object) -> Tensor:
    """A float64 tensor of nested lists."""
    return torch.tensor(values if len(values) > 1 else values[0], dtype=F64)


def test_every_op_and_reduction_has_a_function() -> None:
    assert set(OP_FUNCTIONS) | set(CONTEXT_FUNCTIONS) == set(OPS)
    assert not set(OP_FUNCTIONS) & set(CONTEXT_FUNCTIONS)
    assert set(REDUCTION_FUNCTIONS) == set(REDUCTIONS)


# ---- values ----------------------------------------------------------------------------------------------------------

# Written out in plain Python for ordinary numbers.
MEANINGS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "where": lambda mask, a, b: a if mask else b,
    "min": min,
    "max": max,
    "abs": abs,
    "exp": math.exp,
    "exp2": lambda a: 2.0**a,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1 / math.sqrt(a),
    "tanh": math.tanh,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
    "erf": math.erf,
    "sin": math.sin,
    "cos": math.cos,
    "pow": lambda a: a**1.5,
    "cast": lambda a: a,  # of numbers that fit
    "stop_gradient": lambda a: a,
}
ATTRIBUTES = {"pow": 1.5, "cast": "bf16"}


def test_every_elementwise_op_has_a_meaning() -> None:
    others = {"row_index", "col_index", "float", "group_sum", "group_max"}
    assert set(MEANINGS) | others == {op for op in OPS if OPS[op].resize is None}


def _as_number(b: EpilogueBuilder, value: int) -> int:
    """A mask as 0 or 1."""
    is_mask = b.nodes[value].type.dtype is Dtype.BOOL
    return b.op("where", value, b.const(1.0), b.const(0.0)) if is_mask else value


@pytest.mark.parametrize("op", MEANINGS)
def test_op(op: str) -> None:
    b = EpilogueBuilder("one", ("M", "N"))
    operands, arguments, inputs = [], [], {}
    for name, dtype, number in zip("abc", OPS[op].operands, (0.75, 2.5, 1.25), strict=False):
        param = b.param(name, tile())
        operands.append(b.op("gt", param, b.const(1.0)) if dtype is Dtype.BOOL else param)
        arguments.append(number > 1.0 if dtype is Dtype.BOOL else number)
        inputs[name] = torch.full((2, 3), number, dtype=F64)
    b.store("y", _as_number(b, b.op(op, *operands, attr=ATTRIBUTES.get(op))), tile())
    result = run(b.finish(), inputs)["y"]
    expected = torch.full((2, 3), float(MEANINGS[op](*arguments)), dtype=F64)
    torch.testing.assert_close(result, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("expression", "a", "b", "expected"),
    [
        ("max(a, b)", [NAN, 1, -INF, 0], [1, NAN, -1, INF], [NAN, NAN, -1, INF]),
        ("min(a, b)", [NAN, 1, -INF, 0], [1, NAN, -1, INF], [NAN, NAN, -INF, 0]),
        ("abs(a)", [NAN, -INF, -0.0, -2], [0, 0, 0, 0], [NAN, INF, 0, 2]),
        ("where(a > b, a, b)", [NAN, 1, 2, INF], [1, NAN, 1, 0], [1, NAN, 2, INF]),
        ("where(a == a, a, b)", [NAN, 1, INF, 0], [7, 7, NAN, 7], [7, 1, INF, 0]),
        ("where(not (a < b), a, b)", [NAN, 1, 2, 0], [1, NAN, 1, 1], [NAN, 1, 2, 1]),
        ("a * b", [0, INF, NAN, -0.0], [INF, 0, 0, 1], [NAN, NAN, NAN, -0.0]),
        ("a - b", [INF, -INF, 1, 0], [INF, INF, INF, NAN], [NAN, -INF, -INF, NAN]),
        ("a / b", [1, -1, 0, INF], [0, 0, 0, INF], [INF, -INF, NAN, NAN]),
        ("sigmoid(a) + tanh(b)", [-INF, INF, 1e4, NAN], [INF, -INF, -1e4, 0], [1, 0, 0, NAN]),
    ],
)
def test_nan_and_infinity(expression: str, a: list[float], b: list[float], expected: list[float]) -> None:
    epilogue = program(f"epilogue e(a: tile[M, N], b: tile[M, N]) {{ store y: tile[M, N] = {expression} }}")
    result = run(epilogue, {"a": tensor([a]), "b": tensor([b])})["y"]
    torch.testing.assert_close(result, tensor([expected]), rtol=0, atol=0, equal_nan=True)


def test_split_takes_adjacent_columns() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], b: row[N]) {
            let (gate, up) = split(acc)
            let (p, q) = split(b)
            store g: tile[M, N/2] = gate + p
            store u: tile[M, N/2] = up + q
            store back: tile[M, N] = join(up, gate)
            store wide: tile[M, 2*N] = join(acc, b)
        }"""
    )
    result = run(epilogue, {"acc": tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "b": tensor(10, 20, 30, 40)})
    assert result["g"].tolist() == [[11, 33], [15, 37]]
    assert result["u"].tolist() == [[22, 44], [26, 48]]
    assert result["back"].tolist() == [[2, 1, 4, 3], [6, 5, 8, 7]]
    assert result["wide"].tolist() == [[1, 10, 2, 20, 3, 30, 4, 40], [5, 10, 6, 20, 7, 30, 8, 40]]


KINDS = {"tile[M, N]": (2, 4), "row[N]": (4,), "col[M]": (2,), "scalar": ()}


@pytest.mark.parametrize("a", KINDS)
@pytest.mark.parametrize("b", KINDS)
def test_kinds_broadcast(a: str, b: str) -> None:
    epilogue = program(
        f"epilogue e(acc: tile[M, N], a: {a}, b: {b}) {{ store y: tile[M, N] = a - 2 * b\nstore z: tile[M, N] = acc }}"
    )
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(KINDS[k], dtype=F64, generator=generator) for n, k in (("a", a), ("b", b))}
    wide = {n: v.reshape(2, 1) if v.shape == (2,) else v for n, v in values.items()}
    result = run(epilogue, {"acc": torch.zeros(2, 4, dtype=F64), **values})
    torch.testing.assert_close(result["y"], (wide["a"] - 2 * wide["b"]).expand(2, 4), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("expression", "col", "one_row", "scalar"),
    [
        ("1", [4, 4], [2, 2, 2, 2], 8),
        ("b", [10, 10], [2, 4, 6, 8], 20),
        ("c", [4, 8], [3, 3, 3, 3], 12),
        ("acc", [6, 22], [4, 6, 8, 10], 28),
    ],
)
def test_a_reduction_sums_over_the_whole_domain(
    expression: str, col: list[float], one_row: list[float], scalar: float
) -> None:
    """A value that does not vary along a summed axis counts as often as the axis is long."""
    epilogue = program(
        f"""epilogue e(acc: tile[M, N], b: row[N], c: col[M]) {{
            reduce per_row: col[M] = sum({expression})
            reduce per_column: row[N] = sum({expression})
            reduce all: scalar = sum({expression})
            store use: tile[M, N] = acc + b + c
        }}"""
    )
    inputs = {"acc": torch.arange(8, dtype=F64).reshape(2, 4), "b": tensor(1, 2, 3, 4), "c": tensor(1, 2)}
    result = run(epilogue, inputs)
    assert result["per_row"].tolist() == col
    assert result["per_column"].tolist() == one_row
    assert result["all"].tolist() == scalar


def test_a_reduction_s_domain_has_the_width_of_what_is_summed() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            let (a, _) = split(acc)
            reduce half: col[M] = sum(a * 0 + 1)
            reduce double: scalar = sum(join(acc, acc) * 0 + 1)
            reduce declared: row[2*N] = sum(1)
        }"""
    )
    result = run(epilogue, {"acc": torch.zeros(3, 6, dtype=F64)})
    assert result["half"].tolist() == [3, 3, 3]
    assert result["double"].tolist() == 36
    assert result["declared"].tolist() == [3] * 12


# ---- reductions and stateful transforms ------------------------------------------------------------------------------

AXES = {"col[M]": (1,), "row[N]": (0,), "scalar": (0, 1)}
RESULTS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "reduce {}: {} = sum(acc)": lambda x, axes: x.sum(axes),
    "reduce {}: {} = max(acc)": lambda x, axes: x.amax(axes),
    "reduce {}: {} = min(acc)": lambda x, axes: x.amin(axes),
    "state {}: {} = online_logsumexp(acc)": lambda x, axes: x.logsumexp(axes),
    "state {}: {} = welford(acc)": lambda x, axes: x.mean(axes),
    "state (_, {}): {} = welford(acc)": lambda x, axes: x.var(axes, unbiased=False),
    "state (_, _, {}): {} = welford(acc)": lambda x, axes: torch.ones_like(x).sum(axes),
}


@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("statement", RESULTS)
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, -30.0])
def test_a_result_is_that_of_torch(statement: str, kind: str, offset: float) -> None:
    """A common offset, and all elements negative: nothing cancels, and no padding enters.  769 and 129 fit no tile."""
    epilogue = program(f"epilogue e(acc: tile[M, N]) {{ {statement.format('s', kind)} }}")
    acc = torch.randn(129, 769, dtype=F64, generator=torch.Generator().manual_seed(1)) + offset
    expected = RESULTS[statement](acc, AXES[kind])
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(64, 256))):
        torch.testing.assert_close(result["s"], expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("kind", AXES)
def test_nan_and_infinity_in_a_maximum(how: str, kind: str) -> None:
    epilogue = program(f"epilogue e(acc: tile[M, N]) {{ reduce s: {kind} = {how}(acc) }}")
    acc = tensor([1, NAN, 2, -1], [-INF, -INF, -INF, -INF], [INF, 1, 2, -INF], [-5, -4, NAN, INF])
    expected = getattr(acc, f"a{how}")(AXES[kind])
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(3, 1))):
        torch.testing.assert_close(result["s"], expected, rtol=0, atol=0, equal_nan=True)


def test_argmax_finds_the_first() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            state (_, at): col[M] = argmax(acc, col_index())
            state (_, below): row[N] = argmax(acc, row_index())
            state (value, i, j): scalar = argmax2(acc, row_index(), col_index())
        }"""
    )
    acc = tensor([1, 3, 3, 2], [NAN, 9, NAN, 1], [-INF, -INF, -INF, -INF], [-1, -2, 9, -1])
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(3, 1))):
        assert result["at"].dtype is result["i"].dtype is torch.int32
        assert result["at"].tolist() == [1, 0, 0, 2]
        assert result["below"].tolist() == [1, 1, 1, 0]
        assert result["value"].isnan() and (result["i"].item(), result["j"].item()) == (1, 0)


def test_argmin_finds_the_first() -> None:
    epilogue = program("epilogue e(acc: tile[M, N]) { state (v, i): col[M] = argmin(acc, col_index()) }")
    acc = tensor([3, 1, 1, 2], [NAN, -9, NAN, 1], [INF, INF, INF, INF], [1, 2, -9, -9])
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(3, 1))):
        assert result["i"].tolist() == [1, 0, 0, 2]
        torch.testing.assert_close(result["v"], acc.amin(1), rtol=0, atol=0, equal_nan=True)


def test_the_derivative_of_a_logsumexp_where_elements_tie() -> None:
    """As rounding to bf16 makes them."""
    x = (4 * torch.randn(3, 64, dtype=F64, generator=torch.Generator().manual_seed(1))).round() / 4
    epilogue = program("epilogue e(acc: tile[M, N]) { state s: col[M] = online_logsumexp(acc) }")
    for call in (run, lambda *a: run_tiled(*a, tile=(2, 16))):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(call(epilogue, {"acc": leaf})["s"].sum(), leaf)
        torch.testing.assert_close(found, x.softmax(1), rtol=1e-13, atol=0)


def test_logsumexp_of_infinities() -> None:
    epilogue = program("epilogue e(acc: tile[M, N]) { state s: col[M] = online_logsumexp(acc) }")
    acc = tensor([-INF] * 3, [-INF, 0, -INF], [700, 800, -INF], [NAN, 0, 0], [0, NAN, 1], [INF, INF, 0], [0, INF, -INF])
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(3, 1))):
        torch.testing.assert_close(result["s"], acc.logsumexp(1), rtol=1e-15, atol=0, equal_nan=True)


def test_reductions_of_nothing() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            reduce a: col[M] = max(acc)
            reduce b: scalar = min(acc)
            state lse: col[M] = online_logsumexp(acc)
            state (_, _, count): scalar = welford(acc)
        }"""
    )
    for call in (run, lambda *a: run_tiled(*a, tile=(2, 2))):
        result = call(epilogue, {"acc": torch.zeros(3, 0, dtype=F64)})
        assert result["a"].tolist() == result["lse"].tolist() == [-INF] * 3
        assert (result["b"].item(), result["count"].item()) == (INF, 0)


def _elements(definition: StateDef, count: int, seed: int) -> list[Tensor]:
    """Values to fold: distinct indices, weights that are positive."""
    generator = torch.Generator().manual_seed(seed)
    elements = []
    for name, dtype in definition.inputs:
        if dtype is Dtype.I32:
            elements.append(torch.randperm(4 * count, generator=generator)[:count].int())
        else:
            value = 4 * torch.rand(count, dtype=F64, generator=generator) - 2
            elements.append(
                value > 0 if dtype is Dtype.BOOL else value.abs() + 0.25 if name in POSITIVE_INPUTS else value
            )
    return elements


def _finalized(definition: StateDef, carried: list[Tensor]) -> list[Tensor]:
    return evaluate_function(definition.finalize, carried, Context())


def _same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


states = pytest.mark.parametrize("definition", ALL_STATES.values(), ids=ALL_STATES)


@states
@given(st.integers(1, 20), st.integers(0, 2**20), st.data())
def test_a_state_folds_in_any_order(definition: StateDef, count: int, seed: int, data: st.DataObject) -> None:
    """One element after the other, in any order, cut into parts at any place: the results are the same."""
    elements = _elements(definition, count, seed)
    whole = _finalized(definition, list(folded(definition, elements, (0,), Context())))
    order = data.draw(st.permutations(range(count)))
    cut = data.draw(st.integers(0, count))
    parts = []
    for part in (order[:cut], order[cut:]):
        carried = initial_values(definition, Context())
        for position in part:
            carried = evaluate_function(definition.update, [*carried, *(e[position] for e in elements)], Context())
        parts.append(carried)
    for a, b in (parts, parts[::-1]):
        _same(_finalized(definition, evaluate_function(definition.merge, [*a, *b], Context())), whole)
    stacked = [torch.stack(pair) for pair in zip(*parts, strict=True)]
    _same(_finalized(definition, list(merged(definition, stacked, 0, Context()))), whole)


@states
@given(st.integers(0, 20), st.integers(0, 2**20))
def test_initial_values_are_the_identity_of_merging(definition: StateDef, count: int, seed: int) -> None:
    carried = list(folded(definition, _elements(definition, count, seed), (0,), Context()))
    initial = initial_values(definition, Context())
    for pair in ([*carried, *initial], [*initial, *carried]):
        again = evaluate_function(definition.merge, pair, Context())
        assert all(torch.equal(a, c) for a, c in zip(again, carried, strict=True))


@pytest.mark.parametrize("definition", [d for d in ALL_STATES.values() if d.vjp], ids=lambda d: d.name)
@given(st.integers(1, 20), st.integers(0, 2**20))
def test_a_vjp_is_the_derivative_of_the_fold(definition: StateDef, count: int, seed: int) -> None:
    elements = _elements(definition, count, seed)
    leaves = [e.requires_grad_(e.is_floating_point()) for e in elements]
    results = _finalized(definition, list(folded(definition, leaves, (0,), Context())))
    floats = [r for r in results if r.is_floating_point()]
    generator = torch.Generator().manual_seed(seed + 1)
    cotangents = [torch.randn((), dtype=F64, generator=generator) for _ in floats]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    total = sum(c * r for c, r in zip(cotangents, floats, strict=True))
    expected = torch.autograd.grad(total, wanted)
    arguments = [value.detach() for value in [*leaves, *results, *cotangents]]
    for found, value in zip(evaluate_function(definition.vjp, arguments, Context()), expected, strict=True):
        torch.testing.assert_close(found.expand_as(value), value, rtol=1e-9, atol=1e-12)


def test_built_in_states_are_what_the_standard_library_says() -> None:
    assert parse((ROOT / "stdlib" / "states.coda").read_text()).states == BUILTIN_STATES


# ---- indices, masks, groups, vectors ---------------------------------------------------------------------------------


def test_indices_count_in_the_whole_output() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], target: col[M]: i64, mask: row[N]: bool, shift: scalar: i32) {
            store index: tile[M, N] = float(10 * row_index() + col_index())
            store hit: tile[M, N] = where(col_index() == target + shift and mask, acc, 0)
            reduce at: col[M] = sum(where(col_index() == target, acc, 0))
        }"""
    )
    acc = torch.arange(12, dtype=F64).reshape(3, 4) + 1
    inputs = {
        "acc": acc,
        "target": torch.tensor([0, 3, 2]),
        "mask": torch.tensor([True, True, False, True]),
        "shift": 1,
    }
    for result in (run(epilogue, inputs), run_tiled(epilogue, inputs, tile=(2, 3))):
        assert result["index"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
        assert result["hit"].tolist() == [[0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 12]]
        assert result["at"].tolist() == [1, 8, 11]


def test_stored_vectors() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], c: col[M], r: row[N], a: scalar) {
            store twice: col[M] = 2 * c
            store spread: row[N]: bf16 = a
            store square: scalar = a * a
            let (left, _) = split(r)
            store halves: row[N/2] = left
            store y: tile[M, N] = acc
        }"""
    )
    inputs = {"acc": torch.zeros(3, 4), "c": tensor(1, 2, 3), "r": tensor(1, 2, 3, 4), "a": 1 + 2.0**-10}
    for result in (
        run(epilogue, inputs, storage=Storage(torch.float16)),
        run_tiled(epilogue, inputs, tile=(2, 2), storage=Storage(torch.float16)),
    ):
        assert result["twice"].tolist() == [2, 4, 6] and result["halves"].tolist() == [1, 3]
        assert result["spread"].tolist() == [1.0] * 4 and result["spread"].dtype is torch.bfloat16
        assert result["square"].item() == 1 + 2.0**-9 + 2.0**-20
        assert {n: v.dtype for n, v in result.items() if n in ("twice", "y")} == {
            "twice": torch.float32,
            "y": torch.float16,
        }


def test_groups_of_adjacent_columns() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], b: row[N]) {
            store total: tile[M, N] = group_sum(acc, 2)
            store largest: tile[M, N] = group_max(acc * b, 4)
            store row_total: row[N] = group_sum(b, 4)
        }"""
    )
    acc = tensor([[1, 2, 3, 4, -1, -2, -3, NAN]])
    inputs = {"acc": acc, "b": torch.ones(8, dtype=F64)}
    for result in (run(epilogue, inputs), run_tiled(epilogue, inputs, tile=(1, 4))):
        expected = {
            "total": tensor([[3, 3, 7, 7, -3, -3, NAN, NAN]]),
            "largest": tensor([[4] * 4 + [NAN] * 4]),
            "row_total": tensor([4.0] * 8),
        }
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(CodaCallError, match="groups of 4 columns, which must divide the 6 columns that `acc` brings"):
        run(epilogue, {"acc": torch.zeros(1, 6), "b": torch.zeros(6)})
    with pytest.raises(
        CodaCallError, match="cannot run in tiles of 1 x 6: both must be positive, and the columns a multip"
    ):
        run_tiled(epilogue, inputs, tile=(1, 6))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_cast_rounds_as_a_store_does(dtype: str) -> None:
    epilogue = program(
        f"""epilogue e(acc: tile[M, N]) {{
            store y: tile[M, N]: f32 = cast(acc, {dtype})
            store z: tile[M, N]: {dtype} = acc
        }}"""
    )
    values = [v for v, _ in ROUNDED_BF16 + ROUNDED_F16] + [-0.0, INF]
    acc = torch.tensor([values], dtype=torch.float32)
    result = run(epilogue, {"acc": acc}, dtype=torch.float32, storage=Storage(torch.bfloat16))
    torch.testing.assert_close(result["y"], result["z"].float(), rtol=0, atol=0, equal_nan=True)


def test_masks_and_indices_in_a_call() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], t: col[M]: i32, k: scalar: bool) {
            store y: tile[M, N] = where(k and col_index() == t, acc, 0)
        }"""
    )
    good = {"acc": torch.ones(2, 2), "t": torch.tensor([0, 1]), "k": True}
    assert run(epilogue, good)["y"].tolist() == [[1, 0], [0, 1]]
    assert run(epilogue, good | {"t": torch.tensor([0, 1], dtype=torch.int32)})["y"].tolist() == [[1, 0], [0, 1]]
    for change, message in (
        ({"t": torch.zeros(2)}, "`t` of `e` must have dtype int32 or int64, got torch.float32"),
        ({"t": torch.zeros(2, dtype=torch.int16)}, "`t` of `e` must have dtype int32 or int64, got torch.int16"),
        ({"k": 1}, "`k` of `e` is scalar of bool, got int"),
        ({"k": torch.tensor(1)}, "`k` of `e` must have dtype bool, got torch.int64"),
    ):
        with pytest.raises(CodaCallError, match=message):
            run(epilogue, good | change)


def test_padding_is_never_summed() -> None:
    """exp(0) = 1 in a ragged tile's padding, and a common offset of 1000, would show."""
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            reduce s: col[M] = sum(exp(acc))
            reduce d: row[N] = sum((acc - 1000) * (acc - 1000))
        }"""
    )
    acc = torch.full((129, 769), -3.0, dtype=F64)
    for result in (run(epilogue, {"acc": acc}), run_tiled(epilogue, {"acc": acc}, tile=(64, 256))):
        torch.testing.assert_close(result["s"], torch.full((129,), 769 * math.exp(-3.0), dtype=F64), rtol=1e-12, atol=0)
        torch.testing.assert_close(result["d"], torch.full((769,), 129 * 1003.0**2, dtype=F64), rtol=1e-12, atol=0)


# ---- tile by tile ----------------------------------------------------------------------------------------------------


# Ops that are correctly rounded, so that they do not depend on which other elements are computed beside one.
EXACT = {
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "not",
    "where",
    "min",
    "max",
}
EXACT |= {"abs", "sqrt", "cast", "float", "row_index", "col_index", "group_max", "even", "odd", "join", "stop_gradient"}


def check_tiled(epilogue: Epilogue, size: tuple[int, int], tile_shape: tuple[int, int], seed: int) -> None:
    """Tile by tile equals whole."""
    note(print_epilogue(epilogue))
    size, tile_shape = fitted(epilogue, size), fitted(epilogue, tile_shape)
    inputs = inputs_for(epilogue, size, seed)
    whole = run(epilogue, inputs, extents=size)
    tiled = run_tiled(epilogue, inputs, tile=tile_shape, extents=size)
    scale = run(_magnitudes(epilogue), inputs, extents=size)
    assert list(tiled) == list(whole) == [o.name for o in epilogue.outputs]
    exact = all(n.op in EXACT or n.op in ("param", "const") for n in epilogue.nodes)
    for name, value in whole.items():
        assert tiled[name].is_contiguous() and value.is_contiguous() and tiled[name].dtype == value.dtype
        if value.is_floating_point():
            assert_within(tiled[name], value, scale[name], 1e-12, name)
        elif exact:  # elsewhere two values may or may not tie by their last bits
            assert torch.equal(tiled[name], value), name


@given(
    epilogues(states=USER_STATES), extents, st.integers(0, 2**20), st.integers(1, 6), st.sampled_from([1, 2, 4, 6, 10])
)
def test_tile_by_tile_equals_whole(
    epilogue: Epilogue, size: tuple[int, int], seed: int, tile_rows: int, tile_columns: int
) -> None:
    check_tiled(epilogue, size, (tile_rows, tile_columns), seed)


# Rows and columns of the tiles that a GEMM may be cut into, and of their sub-tiles.
SHAPES = sorted({t.tile for t in TILINGS} | {(64, 32), (64, 16)})


@pytest.mark.parametrize("tile_shape", SHAPES, ids=str)
@settings(max_examples=-(-settings.default.max_examples // len(SHAPES)))
@given(
    epilogue=epilogues(states=USER_STATES),
    seed=st.integers(0, 2**20),
    rows=st.integers(-3, 3),
    columns=st.integers(-3, 3),
)
def test_every_tile_shape_that_the_lowering_chooses(
    tile_shape: tuple[int, int], epilogue: Epilogue, seed: int, rows: int, columns: int
) -> None:
    """Sizes at and beside the edge of a tile."""
    check_tiled(epilogue, (tile_shape[0] + rows, max(8, tile_shape[1] + 8 * columns)), tile_shape, seed)


def _magnitudes(epilogue: Epilogue) -> Epilogue:
    """The same outputs of (1 + |value|)^2, summed where they are reduced, which bounds every reduction that there is.

    Sums differ in order, and functions in the last bit (a vector unit's and a scalar unit's exp are not the same code);
    what values are made of is of the order of 1, and a transform squares its inputs at most.
    """
    b = EpilogueBuilder("magnitudes", epilogue.dims)
    b.params, b.nodes = list(epilogue.params), list(epilogue.nodes)
    for output in epilogue.outputs:
        values = [v for v in output.values if epilogue.nodes[v].type.dtype is Dtype.F32]
        total = b.const(1.0)
        for value in values:
            total = b.op("add", total, b.op("abs", value))
        total = b.op("mul", total, total)
        type_ = attrs.evolve(output.type, dtype=Dtype.F32)
        if isinstance(output, Reduce | State):
            b.reduce(output.name, total, type_)
        else:
            b.store(output.name, total, type_)
    return b.finish()


@pytest.mark.parametrize("tile_shape", [(1, 2), (2, 4), (3, 6), (128, 256)], ids=str)
@pytest.mark.parametrize("size", [(0, 0), (0, 6), (5, 0), (1, 2), (7, 10)], ids=str)
def test_extents_of_every_size(size: tuple[int, int], tile_shape: tuple[int, int]) -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N], b: row[2*N], c: col[M], a: scalar) {
            let (gate, up) = split(acc)
            store y: tile[M, N/2] = gate * up * c * a
            store z: tile[M, 2*N] = join(acc, acc) + b
            reduce s: col[M] = sum(acc)
            reduce t: row[N/2] = sum(gate)
            reduce u: scalar = sum(acc)
        }"""
    )
    m, n = size
    inputs = inputs_for(epilogue, size, seed=2)
    whole, tiled = run(epilogue, inputs), run_tiled(epilogue, inputs, tile=tile_shape)
    shapes = {"y": (m, n // 2), "z": (m, 2 * n), "s": (m,), "t": (n // 2,), "u": ()}
    assert {name: tuple(v.shape) for name, v in whole.items()} == shapes
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, rtol=1e-13, atol=1e-14)
    if 0 in size:
        assert not whole["s"].any() and not whole["t"].any() and whole["u"] == 0


def test_both_ways_are_differentiable() -> None:
    epilogue = program((ROOT / "stdlib" / "residual_rms.coda").read_text())
    inputs = {name: v.requires_grad_() for name, v in inputs_for(epilogue, (5, 6), seed=3).items()}
    for outputs in (run(epilogue, inputs), run_tiled(epilogue, inputs, tile=(2, 4))):
        total = sum((value * value).sum() for value in outputs.values())
        grads = torch.autograd.grad(total, list(inputs.values()))
        x = (inputs["acc"] + inputs["res"]).detach()
        gamma, ss = inputs["gamma"].detach(), (x * x).sum(1, keepdim=True)
        expected = 2 * x + 2 * x * gamma**2 + 4 * ss * x
        assert (grads[0] - expected).norm() <= 1e-13 * expected.norm()
        assert torch.equal(grads[0], grads[1])


def test_tile_columns_must_be_even_where_there_are_halves() -> None:
    halves = program("epilogue e(acc: tile[M, N]) { store y: tile[M, N/2] = 1 }")
    with pytest.raises(CodaCallError, match="cannot run in tiles of 2 x 3"):
        run_tiled(halves, {"acc": torch.zeros(4, 6)}, tile=(2, 3))
    whole = program("epilogue e(acc: tile[M, N]) { store y: tile[M, N] = acc }")
    assert run_tiled(whole, {"acc": torch.ones(4, 5)}, tile=(2, 3))["y"].shape == (4, 5)
    with pytest.raises(CodaCallError, match="cannot run in tiles of 0 x 4"):
        run_tiled(whole, {"acc": torch.zeros(4, 6)}, tile=(0, 4))


# ---- dtypes and rounding ---------------------------------------------------------------------------------------------


def test_computes_in_the_dtype_asked_for() -> None:
    epilogue = program("epilogue e(acc: tile[M, N]) { store y: tile[M, N] = (acc + 1) - 1 }")
    acc = torch.full((1, 1), 2.0**-30, dtype=F64)
    assert run(epilogue, {"acc": acc})["y"].item() == 2.0**-30
    single = run(epilogue, {"acc": acc}, dtype=torch.float32)["y"]
    assert single.dtype is torch.float32 and single.item() == 0.0


def test_inputs_of_any_floating_dtype_widen() -> None:
    epilogue = program("epilogue e(acc: tile[M, N], b: row[N], a: scalar) { store y: tile[M, N] = acc * b + a }")
    inputs = {
        "acc": torch.full((2, 2), 1.5, dtype=torch.bfloat16),
        "b": torch.full((2,), 3.0, dtype=torch.float16),
        "a": 0.25,
    }
    assert run(epilogue, inputs)["y"].tolist() == [[4.75, 4.75], [4.75, 4.75]]
    assert run(epilogue, inputs | {"a": torch.tensor(0.25)})["y"].tolist() == [[4.75, 4.75], [4.75, 4.75]]


# bf16 has 8 significant bits: in [1, 2) it moves in steps of 2^-7, and a tie goes to the even neighbour.
ROUNDED_BF16 = [
    (1 + 2.0**-8, 1.0),
    (1 + 3 * 2.0**-8, 1 + 2.0**-6),
    (1 + 2.0**-8 + 2.0**-16, 1 + 2.0**-7),
    (-1 - 2.0**-8, -1.0),
    (3.4e38, INF),
    (2.0**-134, 0.0),
    (1.5 * 2.0**-134, 2.0**-133),
    (NAN, NAN),
]
# f16 has 11 significant bits, its largest number is 65504, and below 2^-24 / 2 it underflows.
ROUNDED_F16 = [
    (1 + 2.0**-11, 1.0),
    (1 + 3 * 2.0**-11, 1 + 2.0**-9),
    (65519.0, 65504.0),
    (65520.0, INF),
    (2.0**-25, 0.0),
    (1.5 * 2.0**-25, 2.0**-24),
    (-INF, -INF),
]


@pytest.mark.parametrize(
    ("dtype", "cases"), [(torch.bfloat16, ROUNDED_BF16), (torch.float16, ROUNDED_F16)], ids=["bf16", "f16"]
)
@pytest.mark.parametrize("compute", [torch.float32, F64], ids=["in f32", "in f64"])
def test_stores_round_to_nearest_even(
    dtype: torch.dtype, cases: list[tuple[float, float]], compute: torch.dtype
) -> None:
    epilogue = program("epilogue e(acc: tile[M, N]) { store y: tile[M, N] = acc }")
    values, expected = zip(*cases, strict=True)
    result = run(epilogue, {"acc": tensor([list(values)])}, dtype=compute, storage=Storage(dtype))["y"]
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), tensor([list(expected)]), rtol=0, atol=0, equal_nan=True)


def test_a_store_does_not_round_what_later_lines_see() -> None:
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            let x = acc + 0.00390625
            store x: tile[M, N]
            store d: tile[M, N]: f32 = x - 1
            reduce s: col[M] = sum(x)
        }"""
    )
    inputs = {"acc": torch.ones(1, 4, dtype=torch.bfloat16)}
    for result in (
        run(epilogue, inputs, dtype=torch.float32, storage=Storage(torch.bfloat16)),
        run_tiled(epilogue, inputs, tile=(1, 2), dtype=torch.float32, storage=Storage(torch.bfloat16)),
    ):
        assert result["x"].tolist() == [[1.0] * 4]
        assert result["d"].tolist() == [[2.0**-8] * 4]
        assert result["s"].tolist() == [4 + 2.0**-6]


def test_whose_dtype_wins() -> None:
    """The caller's over the annotation's over the default: A's dtype for tiles, f32 for reductions."""
    epilogue = program(
        """epilogue e(acc: tile[M, N]) {
            store plain: tile[M, N] = acc
            store noted: tile[M, N]: f16 = acc
            store told: tile[M, N]: f16 = acc
            reduce s: col[M] = sum(acc)
            reduce t: col[M]: bf16 = sum(acc)
            reduce u: scalar = sum(acc)
        }"""
    )
    storage = Storage(torch.bfloat16, {"told": torch.float32, "u": torch.float16})
    result = run(epilogue, {"acc": torch.ones(2, 2)}, storage=storage)
    assert {name: value.dtype for name, value in result.items()} == {
        "plain": torch.bfloat16,
        "noted": torch.float16,
        "told": torch.float32,
        "s": torch.float32,
        "t": torch.bfloat16,
        "u": torch.float16,
    }


def test_partials_are_rounded_once_after_the_merge() -> None:
    """Each tile's partial is a tie in bf16, the merged sum is not."""
    epilogue = program("epilogue e(acc: tile[M, N]) { reduce s: col[M]: bf16 = sum(acc) }")
    acc = torch.full((1, 4), (1 + 2.0**-8) / 2, dtype=F64)
    result = run_tiled(epilogue, {"acc": acc}, tile=(1, 2), storage=Storage(torch.bfloat16))["s"]
    assert result.item() == torch.tensor(2 + 2.0**-7, dtype=F64).to(torch.bfloat16).item() == 2.0
    acc[0, 0] += 2.0**-7
    result = run_tiled(epilogue, {"acc": acc}, tile=(1, 2), storage=Storage(torch.bfloat16))["s"]
    assert result.item() == 2 + 2.0**-6


# ---- calls -----------------------------------------------------------------------------------------------------------

SWIGLU = program((ROOT / "stdlib" / "swiglu.coda").read_text())
RMS = program((ROOT / "stdlib" / "residual_rms.coda").read_text())


def rms_inputs() -> dict[str, object]:
    """Fitting inputs of residual_rms."""
    return {"acc": torch.zeros(4, 6), "res": torch.zeros(4, 6), "gamma": torch.zeros(6)}


@pytest.mark.parametrize(
    ("changes", "message", "argument"),
    [
        ({"gamma": None}, r"`residual_rms` needs `gamma`: row\[N\], which was not given", "gamma"),
        ({"beta": torch.zeros(6)}, "has no parameter `beta`; it has acc, res, gamma", "beta"),
        ({"res": torch.zeros(5, 6)}, "`res` .* has 5 rows, which makes M = 5, but `acc` makes M = 4", "res"),
        ({"res": torch.zeros(4, 7)}, "`res` .* has 7 columns, which makes N = 7, but `acc` makes N = 6", "res"),
        ({"gamma": torch.zeros(8)}, "`gamma` .* has 8 columns, which makes N = 8, but `acc` makes N = 6", "gamma"),
        ({"gamma": torch.zeros(1, 6)}, r"a tensor of 1 axes, got shape \[1, 6\]", "gamma"),
        ({"acc": torch.zeros(6)}, r"a tensor of 2 axes, got shape \[6\]", "acc"),
        ({"gamma": 1.0}, r"`gamma` of `residual_rms` is row\[N\], got float", "gamma"),
        ({"gamma": [1.0] * 6}, r"`gamma` of `residual_rms` is row\[N\], got list", "gamma"),
        ({"res": torch.zeros(4, 6, dtype=torch.int32)}, "must have a floating dtype, got torch.int32", "res"),
        ({"res": torch.zeros(4, 6, dtype=torch.bool)}, "must have a floating dtype, got torch.bool", "res"),
        ({"res": torch.zeros(4, 6, device="meta")}, "`res` .* is on meta, but `acc` is on cpu", "res"),
    ],
)
def test_bad_calls(changes: dict[str, object], message: str, argument: str) -> None:
    inputs = {name: value for name, value in (rms_inputs() | changes).items() if value is not None}
    for call in (lambda: run(RMS, inputs), lambda: run_tiled(RMS, inputs, tile=(2, 2))):
        with pytest.raises(CodaCallError, match=message) as info:
            call()
        assert info.value.argument == argument


def test_a_disagreement_points_at_both_declarations() -> None:
    with pytest.raises(CodaCallError) as info:
        run(RMS, rms_inputs() | {"res": torch.zeros(5, 6)})
    assert info.value.loc is not None and info.value.loc == RMS.param("res").loc
    assert [loc for loc, _ in info.value.notes] == [RMS.param("acc").loc]


def test_extents_that_do_not_fit_the_widths() -> None:
    with pytest.raises(CodaCallError, match="N must be even, but `acc` makes it 5"):
        run(SWIGLU, {"acc": torch.zeros(2, 5)})
    wide = program("epilogue e(acc: tile[M, 2*N]) { reduce s: col[M] = sum(acc) }")
    with pytest.raises(CodaCallError, match="its 3 columns are not a multiple of 2"):
        run(wide, {"acc": torch.zeros(2, 3)})
    with pytest.raises(CodaCallError, match="has 2 rows, which makes M = 2, but `extents` makes M = 3"):
        run(wide, {"acc": torch.zeros(2, 4)}, extents=(3, 2))
    assert run(wide, {"acc": torch.zeros(2, 4)}, extents=(2, 2))["s"].shape == (2,)


def test_extents_that_no_input_determines() -> None:
    epilogue = program("epilogue e(d_s: col[M]) { store d_acc: tile[M, N] = d_s }")
    with pytest.raises(CodaCallError, match="no input of `e` determines N") as info:
        run(epilogue, {"d_s": torch.ones(3)})
    assert info.value.argument == "extents" and "extents=(M, N)" in str(info.value)
    assert run(epilogue, {"d_s": torch.ones(3)}, extents=(3, 5))["d_acc"].tolist() == [[1.0] * 5] * 3


def test_half_width_inputs_determine_the_base_extent() -> None:
    epilogue = program(
        "epilogue e(d_y: tile[M, N/2]) { reduce n: scalar = sum(1)\nstore w: tile[M, N] = join(d_y, 0) }"
    )
    result = run(epilogue, {"d_y": torch.ones(2, 3)})
    assert result["n"].item() == 12 and result["w"].tolist() == [[1, 0, 1, 0, 1, 0]] * 2


def test_numbers_stand_for_scalars() -> None:
    epilogue = program("epilogue e(acc: tile[M, N], a: scalar) { store y: tile[M, N] = acc * a }")
    for number in (3, 3.0, torch.tensor(3.0), torch.tensor(3.0, dtype=torch.bfloat16)):
        assert run(epilogue, {"acc": torch.ones(1, 2), "a": number})["y"].tolist() == [[3.0, 3.0]]
    with pytest.raises(CodaCallError, match=r"`a` of `e` is scalar, a tensor of 0 axes, got shape \[1\]"):
        run(epilogue, {"acc": torch.ones(1, 2), "a": torch.ones(1)})


def test_any_strides_and_nothing_is_written() -> None:
    acc = torch.randn(12, 8, dtype=F64).T[::2]
    res, gamma = torch.randn(1, 1, dtype=F64).expand(4, 12), torch.randn(24, dtype=F64)[::2]
    inputs = {"acc": acc, "res": res, "gamma": gamma}
    kept = {name: value.clone() for name, value in inputs.items()}
    result = run(RMS, inputs)
    x = kept["acc"] + kept["res"]
    assert torch.equal(result["x"], x) and torch.equal(result["h"], x * kept["gamma"])
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)


def test_every_kind_of_type_has_a_shape() -> None:
    types: list[tuple[ValueType, tuple[int, ...]]] = [
        (tile(Fraction(1, 2)), (3, 2)),
        (tile(2), (3, 8)),
        (row(Fraction(1, 2)), (2,)),
        (row(2), (8,)),
        (COL, (3,)),
        (SCALAR, ()),
    ]
    for type_, shape in types:
        b = EpilogueBuilder("shapes", ("M", "N"))
        b.param("acc", tile())
        value = b.param("x", type_)
        if type_.kind is Kind.TILE:
            b.store("y", value, type_)
        else:
            b.reduce("y", value, type_)
        inputs = {"acc": torch.zeros(3, 4), "x": torch.ones(shape)}
        assert tuple(run(b.finish(), inputs)["y"].shape) == shape


def test_a_target_of_more_than_32_bits_is_no_column():
    """It does not wrap around to one: 2**32 + 3 is not column 3."""
    e = parse(
        "epilogue f(acc: tile[M, N], t: col[M]: i64, u: tile[M, N]: i64, s: scalar: i64) {\n"
        "    reduce hit: col[M] = sum(where(col_index() == t, acc, 0))\n"
        "    reduce least: col[M] = min(where(u < 0, -1, 1))\n"
        "    reduce late: col[M] = sum(where(col_index() > s, acc, 0))\n}\n"
    ).epilogues["f"]
    t = torch.tensor([2**32 + 3, -(2**32) + 1, 3, 2**63 - 1, -(2**63), -100])
    u = torch.tensor([[2**31, 2**32 - 1, 2**63 - 1, 0], [-(2**31) - 1, 0, 0, 0]]).repeat(3, 1)
    for s in (2**32, torch.tensor(2**32)):
        got = run(e, {"acc": torch.ones(6, 4), "t": t, "u": u, "s": s})
        assert got["hit"].tolist() == [0, 0, 1, 0, 0, 0]
        assert got["least"].tolist() == [1, -1] * 3
        assert got["late"].tolist() == [0] * 6


def test_a_number_that_is_too_large_is_refused():
    e = parse("epilogue f(s: scalar, i: scalar: i64) {\n    store y: scalar = s * float(i)\n}\n").epilogues["f"]
    for inputs, argument in (({"s": 10**400, "i": 1}, "s"), ({"s": 1, "i": 10**30}, "i")):
        with pytest.raises(CodaCallError, match="an int that is too large") as caught:
            run(e, inputs, extents=(1, 1))
        assert caught.value.argument == argument
