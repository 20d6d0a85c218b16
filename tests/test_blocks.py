"""Reductions that are made a block of columns at a time: what they carry, and which columns of which lanes they take.

`Waiting` runs here as on the device, but a register is a tensor of the 32 lanes' values.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from test_lower import _constant, _emulated_device, _lift, spec_of
from torch import Tensor

from codalang.ir import reference
from codalang.ir.builtin_states import BLOCKWISE, WELFORD
from codalang.ir.epilogue import Epilogue
from codalang.ir.evaluate import Context, evaluate_function
from codalang.ir.fold import REDUCTION_FUNCTIONS, folded
from codalang.ir.states import StateDef
from codalang.ir.types import Dtype
from codalang.lower import blocks, plan, registers, waiting
from codalang.lower.body import Block, Fold
from codalang.lower.codegen import generate
from codalang.lower.compile import compile_object
from codalang.lower.registers import finalize, merge
from codalang.lower.spec import KernelSpec, Operand
from codalang.parser import parse

ON_GEMM = Operand("bf16", "k", "k")
INF, NAN = torch.inf, torch.nan
SPECIAL = {
    "plain": [],
    "all equal": [3.0] * 24,
    "minus infinity": [-INF] * 24,
    "an infinity": [1.0, INF, -2.0, INF],
    "a minus infinity": [-INF, 5.0],
    "a NaN": [NAN, 1.0, NAN],
    "a late NaN": [2.0, INF, -INF, NAN],
    "far apart": [1e4, -1e4, 1e4],
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("definition", BLOCKWISE, ids=lambda d: d.name)
def test_passes_over_a_block_carry_what_updates_do(definition: StateDef, special: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, dtype=torch.float64)
    x[: len(SPECIAL[special])] = torch.tensor(SPECIAL[special], dtype=torch.float64)
    inputs = [x, *(torch.randint(0, 9, (24,)) for _ in definition.inputs[1:])]
    context = Context(torch.float64)
    results: list[Tensor] = []
    for one in BLOCKWISE[definition].passes:
        (value,) = evaluate_function(one.value, [*inputs, *results], context)
        value = value.expand(24)
        results.append(value.min() if one.dtype is Dtype.I32 else REDUCTION_FUNCTIONS[one.how](value, (0,)))
    ours = evaluate_function(
        definition.finalize, evaluate_function(BLOCKWISE[definition].carried, results, context), context
    )
    truth = evaluate_function(definition.finalize, folded(definition, inputs, (0,), context), context)
    for (name, _), a, b in zip(definition.results, ours, truth, strict=True):
        if definition is WELFORD and x.isinf().any() and name != "count":  # the updates' mean is NaN, torch's infinite
            assert not a.isfinite() and not b.isfinite(), name
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0, equal_nan=True, msg=name)


# ---------------------------------------------------------------- lanes

LANES = torch.arange(32)
TILE_N = 64
ROWS = 16  # of a warp: two halves of eight, four lanes each
EPILOGUES = {
    "states": """
epilogue states(acc: tile[M, N]) {
    state lse: col[M] = online_logsumexp(acc)
    state (value, index): col[M] = argmax(acc * 2, col_index())
    state (mean, variance, count): col[M] = welford(acc)
    state low: col[M] = online_min(abs(acc))
}""",
    "picks": """
epilogue picks(acc: tile[M, N], r: col[M]: i32) {
    reduce logit: col[M] = sum(where(col_index() == r, acc, 0))
    reduce highest: col[M] = max(where(r == col_index(), acc, -inf))
    reduce lowest: col[M] = min(where(col_index() == r, acc * 2, inf))
    reduce total: col[M] = sum(acc)
    reduce least: col[M] = min(acc)
}""",
    "halves": """
epilogue halves(acc: tile[M, 2*N], r: col[M]: i32) {
    let (x, y) = split(acc)
    state lse: col[M] = online_logsumexp(x)
    reduce logit: col[M] = sum(where(col_index() == r, x * y, 0))
}""",
    "doubles": """
epilogue doubles(acc: tile[M, N/2], r: col[M]: i32) {
    let x = join(acc, -acc)
    state (value, index): col[M] = argmin(x, col_index())
    reduce logit: col[M] = sum(where(col_index() == r, x, 0))
}""",
}


def of(name: str) -> Epilogue:
    """The epilogue of that name."""
    return parse(EPILOGUES[name]).epilogues[name]


def emulated_partials(spec: KernelSpec) -> tuple[types.ModuleType | Any, tuple[Any, ...]]:
    """The generated class on tensors, and its partials."""
    neutral = {"sum": ("add", 0.0), "max": ("max", -INF), "min": ("min", INF)}

    def same(a: Any) -> tuple[Any, ...]:
        return (a,)

    def reduction(how: str, op: str, start: float) -> Fold:
        def step(a: Any, b: Any) -> tuple[Any, ...]:
            return (_lift(op)(a, b),)

        return Fold((start,), ("f32",), step, step, same, ("f32",), Block(((how, same),), same))

    device = _emulated_device()
    device.REDUCTIONS = {how: reduction(how, *found) for how, found in neutral.items()}
    scope: dict[str, Any] = {"device": device}
    exec(compile(generate(spec).replace("from codalang.lower import device\n", ""), "generated", "exec"), scope)
    return scope["Epilogue"], scope["Epilogue"].PARTIALS


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Registers are tensors of lanes; yields which way each branch of the warp went."""
    taken: list[bool] = []

    def branch(condition: Any, dtypes: Sequence[str], then: Any, otherwise: Any) -> tuple:
        taken.append(bool(condition))
        values = (then if condition else otherwise)()
        assert len(values) == len(dtypes)
        return values

    def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    def neutral_of(how: str, like: Tensor) -> Tensor:
        whole = {"max": -(2**31), "min": 2**31 - 1}
        return torch.tensor(blocks.NEUTRAL[how] if like.is_floating_point() else whole[how], dtype=like.dtype)

    arch = types.SimpleNamespace(
        shuffle_sync_bfly=lambda value, offset: value.expand(32)[LANES ^ offset],
        vote_any_sync=lambda condition: bool(condition.any()),
    )
    for module, name, value in (
        (registers, "cute", types.SimpleNamespace(arch=arch)),
        (registers, "DEVICE_OPS", {"add": operator.add, "max": torch.maximum, "min": torch.minimum}),
        (registers, "opaque", lambda carried: carried),
        (registers, "choose", choose),
        (registers, "neutral_of", neutral_of),
        (registers, "constant", _constant),
        (waiting, "cute", types.SimpleNamespace(arch=arch)),
        (waiting, "branch", branch),
        (waiting, "choose", choose),
        (waiting, "Int32", torch.tensor),
        (waiting, "Boolean", lambda condition: condition),
    ):
        monkeypatch.setattr(module, name, value)
    return taken


class LaneHost:
    """What a body asks of its host."""

    def __init__(self, first: int, eights: Sequence[int]) -> None:
        self.first, self.eights = first, eights

    def col_index(self, count: int) -> tuple[Tensor, ...]:
        """The columns that the lanes hold."""
        return columns_of(self.first, self.eights, count)


def columns_of(first: int, eights: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """The columns that the lanes hold of some eights, from the accumulator's column `first` on, where a value has
    `count` columns for two of the accumulator's."""
    starts = [(first + 8 * eight) * count // 2 for eight in eights]
    return tuple(start + LANES % 4 * count + i for start in starts for i in range(count))


def carried_of_rows(spec: KernelSpec, acc: Tensor, r: Tensor | None, subtile: int) -> dict[str, Tensor]:
    """The results for one warp's rows, tile after tile, and lanes and tiles merged in the end."""
    body, partials = emulated_partials(spec)
    n = acc.shape[1]
    whole: dict[tuple[int, int], tuple] = {}
    in_row = (1, 2) if subtile == TILE_N else ()
    for tile in range(-(-n // TILE_N)):
        held = waiting.Waiting(partials, n - tile * TILE_N, TILE_N, LANES % 4, torch.tensor(tile), in_row)
        for start in range(0, TILE_N, subtile):
            for half in (0, 1):
                rows = LANES // 4 + 8 * half
                for eight in range(subtile // 8):
                    first = tile * TILE_N + start
                    columns = columns_of(first, [eight], 2)
                    beyond = torch.tensor(NAN, dtype=acc.dtype)  # must not be seen
                    given = tuple(torch.where(c < n, acc[rows, c.clamp(max=n - 1)], beyond) for c in columns)
                    arguments = [given] if r is None else [given, (r[rows],)]
                    _, _, reduced = body.apply(LaneHost(first, [eight]), *arguments)
                    for index, values in enumerate(reduced):
                        count = partials[index].registers
                        assert partials[index].waits
                        broadcast = [registers.broadcast(v, count) for v in values]
                        held.add((index, (0, half)), start + 8 * eight, zip(*broadcast, strict=True))
            for (index, (_, half)), part in held.folded(0).items():
                fold = partials[index].fold
                if not in_row:
                    part = registers.fold_lanes(fold, part, (1, 2))
                before = whole.get((index, half))
                whole[index, half] = part if before is None else merge(fold, before, part)
    results = {}
    for index, partial in enumerate(partials):
        halves = [finalize(partial.fold, whole[index, half]) for half in (0, 1)]
        joined = [torch.cat([side.expand(32)[::4] for side in sides]) for sides in zip(*halves, strict=True)]
        results |= dict(zip(partial.names, joined, strict=False))
    return results


@pytest.mark.parametrize("subtile", [16, 32, TILE_N])
@pytest.mark.parametrize("n", [128, 130, 189, 8])
@pytest.mark.parametrize("name", EPILOGUES)
def test_lanes_fold_their_own_columns_and_none_beyond_the_edge(
    name: str, n: int, subtile: int, lanes: list[bool]
) -> None:
    epilogue = of(name)
    torch.manual_seed(n + subtile)
    n += n % 2 if name == "halves" else 0
    acc = torch.randn(ROWS, n, dtype=torch.float64) - 7  # so that a 0 for what does not exist would be the maximum
    columns = {"halves": n // 2, "doubles": 2 * n}.get(name, n)
    r = torch.randint(0, columns, (ROWS,))
    r[:5] = torch.tensor([0, columns - 1, columns, -1, 2**31 - 1])
    takes_r = any(p.name == "r" for p in epilogue.params)
    inputs = {"acc": acc} | ({"r": r} if takes_r else {})
    truth = reference.run(epilogue, inputs, dtype=torch.float64)
    spec = spec_of(epilogue, ON_GEMM)
    ours = carried_of_rows(spec, acc, r if takes_r else None, subtile)
    assert set(truth) <= set(ours)
    for key, value in truth.items():
        torch.testing.assert_close(ours[key].double(), value.double(), rtol=1e-12, atol=0, msg=key)


def test_masks_and_picks_are_behind_branches(lanes: list[bool]) -> None:
    acc, r = torch.randn(ROWS, 189, dtype=torch.float64), torch.full((ROWS,), 70)
    carried_of_rows(spec_of(of("halves"), ON_GEMM), acc[:, :188], r, TILE_N)
    at_edge, met = lanes[0::2], lanes[1::2]
    assert at_edge == [False, False, True]  # of three tiles
    assert met == [False, False, True]  # column 70 of the halves is in the third


# ---------------------------------------------------------------- which, and what it takes


@pytest.mark.parametrize(
    "value",
    [
        "where(col_index() == r, acc, 1)",
        "where(col_index() != r, acc, 0)",
        "where(col_index() == row_index() + r, 0, acc)",
        "where(col_index() == s, acc, 0)",
        "where(row_index() == r, acc, 0)",
    ],
)
def test_what_is_no_pick(value: str) -> None:
    text = f"epilogue e(acc: tile[M, N], r: col[M]: i32, s: row[N]: i32) {{ reduce y: col[M] = sum({value}) }}"
    epilogue = parse(text).epilogues["e"]
    assert blocks.picked(epilogue, epilogue.outputs[0]) is None


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("state s: col[M] = online_logsumexp(acc)", True),
        ("let x = acc + b\n store x: tile[M, N]\n state (m, v): col[M] = welford(x)\n reduce t: col[M] = sum(x)", True),
        ("state (v, i): col[M] = argmax(acc, col_index())", True),
        ("state s: col[M] = online_logsumexp(acc)\n state t: col[M] = online_logsumexp(acc + b)", False),
        ("state s: col[M] = online_logsumexp(join(acc, acc))", False),
        ("reduce s: col[M] = sum(acc)", False),  # nothing waits
    ],
)
def test_one_value_waits_in_the_place_of_the_accumulator(text: str, is_whole: bool) -> None:
    epilogue = parse(f"epilogue e(acc: tile[M, N], b: tile[M, N]) {{ {text} }}").epilogues["e"]
    assert blocks.takes_whole_tiles(epilogue) == is_whole
    assert f"WHOLE_TILES = {is_whole} " in generate(spec_of(epilogue, ON_GEMM))


def test_an_element_of_a_logsumexp_takes_one_exponential_and_no_mask(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "stdlib/logsumexp_target.coda").read_text()
    spec = spec_of(parse(text).epilogues["logsumexp_target"], ON_GEMM)
    config = plan.choose(spec, 8192, 128256, 4096)
    report = compile_object(attrs.evolve(spec, config=config), tmp_path / "kernel.o", keep_ptx=True)
    assert (report.spill_bytes, report.serialized) == (0, None)
    assert report.ptx is not None
    accumulators = config.tile[0] * config.tile[1] // (128 if config.ping_pong else 256)
    exponentials = report.ptx.count("ex2.approx")
    assert exponentials == 2 * accumulators  # the second for blocks at the edge
    assert report.ptx.count("selp.f32") <= 3 * accumulators + 64  # all of them at the edge, or where a column is picked
