"""Calls of programs with indices, masks, groups, stored vectors, maxima and stateful transforms.

Each is compared with the reference, which torch differentiates by itself; wrong calls are named for what they are.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import codalang
from codalang.errors import CodaCallError, CodaUnsupportedError
from codalang.ir import reference
from codalang.ir.types import Dtype
from codalang.torch import execute
from codalang.torch.module import EpilogueFunction, Module

PROGRAM = """
state spread(x) {
    carry low = inf, high = -inf
    update { return (min(low, x), max(high, x)) }
    merge { return (min(a_low, b_low), max(a_high, b_high)) }
    finalize (width) = (high - low)
}
epilogue masked(acc: tile[M, N], keep: tile[M, N]: bool, target: col[M]: i64, shift: row[N]: i32, k: scalar: i32,
                on: scalar: bool, g: row[N]) {
    let x = where(keep and on, tanh(acc) * g, 0.25 * acc)
    store y: tile[M, N] = x * float(shift + k)
    store first: row[N] = g * float(col_index())
    store flag: scalar = where(on, 2.0, 3.0)
    reduce logit: col[M] = sum(where(col_index() == target, x, 0))
}
epilogue grouped(acc: tile[M, N], g: row[N], r: col[M]) {
    let ms = group_sum(acc * acc, 4) * 0.25
    store y: tile[M, N] = acc * rsqrt(ms + 0.5) * g
    store top: tile[M, N] = group_max(acc * r, 2)
    store scaled: col[M] = r * r
}
epilogue extremes(acc: tile[M, N], t: tile[M, N]) {
    let x = acc * t
    reduce high: col[M] = max(x)
    reduce low: row[N] = min(x)
    reduce amax: scalar = max(abs(acc))
}
epilogue transforms(acc: tile[M, N], t: tile[M, N]) {
    let x = acc + t
    state lse: col[M] = online_logsumexp(x)
    state (mean, var): row[N] = welford(x * t)
    state (value, index): col[M] = argmax(t * acc, col_index())
}
epilogue indices(acc: tile[M, N]) { state (value, index): col[M] = argmax(acc, col_index()) }
epilogue rotated(acc: tile[M, N], position: col[M]: i64, frequency: row[N/2]) {
    let (a, b) = split(acc)
    let (x, y) = rotate(a, b, float(position) * frequency)
    store z: tile[M, N] = join(x, y)
    store last: col[M]: bf16 = float(position)
}
epilogue widths(acc: tile[M, N]) {
    state spread: col[M] = spread(acc)
    reduce total: scalar = sum(acc)
}
"""
NAMES = ("masked", "grouped", "extremes", "transforms", "indices", "rotated")
ROWS, COLUMNS, K = 6, 8, 4


@pytest.fixture(scope="module")
def m() -> Module:
    return codalang.load(PROGRAM)


def arguments(function: EpilogueFunction, *, hosted: bool = False, lead: tuple[int, ...] = (ROWS,)) -> list[Tensor]:
    """Random values for every argument; floats are float64 and require gradients."""
    generator = torch.Generator().manual_seed(len(function.name))

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    params = function.epilogue.params
    values = [] if hosted else [floats(*lead, K), floats(int(params[0].type.width * COLUMNS), K)]
    for param in params if hosted else params[1:]:
        tail = () if param.type.width is None else (int(param.type.width * COLUMNS),)
        shape = (*(lead if param.type.kind.has_rows else ()), *tail)
        if param.type.dtype is Dtype.F32:
            values.append(floats(*shape))
        elif param.type.dtype is Dtype.I32:
            drawn = torch.randint(-1, COLUMNS, shape, generator=generator)
            values.append(drawn.to(reference.TORCH_DTYPES[param.dtype]))
        else:
            values.append(torch.rand(shape, generator=generator) < (0.7 if shape else 2))
    return values


def outputs(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def call(function: EpilogueFunction, hosted: bool, values: list[Tensor]) -> list[Tensor]:
    return outputs((function.hosted if hosted else function)(*values))


def truth(function: EpilogueFunction, hosted: bool, values: list[Tensor]) -> list[Tensor]:
    """The reference, which torch differentiates, on flattened values."""
    lead = values[0].shape[:-1]
    given = list(values) if hosted else [values[0] @ values[1].T, *values[2:]]
    named = {}
    for param, value in zip(function.epilogue.params, given, strict=True):
        tail = value.shape[-1:] if param.type.width is not None else ()
        named[param.name] = value.reshape((-1, *tail) if param.type.kind.has_rows else tail)
    results = reference.run(function.epilogue, named, extents=(lead.numel(), COLUMNS))
    return [
        results[o.name].unflatten(0, lead) if o.type.kind.has_rows and len(lead) > 1 else results[o.name]
        for o in function.epilogue.outputs
    ]


def assert_close(ours: Tensor, expected: Tensor, bound: float = 1e-12) -> None:
    assert ours.shape == expected.shape
    scale = expected.double().norm().item()
    assert (ours.double() - expected.double()).norm().item() <= bound * max(scale, 1e-300)


def penalty(results: list[Tensor]) -> Tensor:
    """A loss of all results that have gradients, each with its own cotangents."""
    return sum((r.sin() * (i + 1)).sum() for i, r in enumerate(results) if r.requires_grad)


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("lead", [(ROWS,), (2, 3)])
@pytest.mark.parametrize("name", [*NAMES, "widths"])
def test_values(m: Module, name: str, lead: tuple[int, ...], hosted: bool) -> None:
    function = m[name]
    values = arguments(function, hosted=hosted, lead=lead)
    with torch.no_grad():
        results = call(function, hosted, values)
    for output, mine, expected in zip(function.epilogue.outputs, results, truth(function, hosted, values), strict=True):
        wanted = torch.int32 if output.type.dtype is Dtype.I32 else torch.float64
        assert mine.dtype is (reference.TORCH_DTYPES[output.dtype] if output.dtype else wanted)
        assert mine.is_contiguous()
        assert_close(mine, expected, 1e-2 if output.dtype else 1e-12)


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("lead", [(ROWS,), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients(m: Module, name: str, lead: tuple[int, ...], hosted: bool) -> None:
    """Of all floats at once; and, where several outputs have gradients, with all cotangents but one missing."""
    function = m[name]
    values = arguments(function, hosted=hosted, lead=lead)
    leaves = [v for v in values if v.requires_grad]
    counted = [i for i, r in enumerate(truth(function, hosted, values)) if r.requires_grad]
    for chosen in (counted, *([i] for i in counted)):
        gradients, expected = (
            torch.autograd.grad(
                penalty([run(function, hosted, values)[i] for i in chosen]),
                leaves,
                allow_unused=True,
                materialize_grads=True,
            )
            for run in (call, truth)
        )
        for mine, theirs in zip(gradients, expected, strict=True):
            assert mine.dtype is torch.float64
            assert_close(mine, theirs, 1e-2 if name == "rotated" else 1e-12)


@pytest.mark.parametrize("name", ["masked", "grouped", "extremes", "transforms"])
def test_each_gradient_alone(m: Module, name: str) -> None:
    """Where only one input needs its gradient, and where only one of several is asked for."""
    function = m[name]
    values = arguments(function)
    floats = [i for i, v in enumerate(values) if v.requires_grad]
    every = torch.autograd.grad(penalty(call(function, False, values)), [values[i] for i in floats])
    for one, expected in zip(floats, every, strict=True):
        alone = [v.detach().requires_grad_(i == one) if i in floats else v for i, v in enumerate(values)]
        for given in (alone, values):
            (mine,) = torch.autograd.grad(penalty(call(function, False, given)), given[one])
            assert_close(mine, expected)


@pytest.mark.parametrize("name", ["masked", "grouped", "extremes", "transforms"])
def test_second_derivatives(m: Module, name: str) -> None:
    function = m[name]
    values = arguments(function)
    leaves = [v for v in values if v.requires_grad]
    found = []
    for run in (call, truth):
        first = torch.autograd.grad(penalty(run(function, False, values)), leaves, create_graph=True)
        found.append(torch.autograd.grad(penalty(list(first)), leaves, allow_unused=True, materialize_grads=True))
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, 1e-10)


def test_the_gradient_of_a_maximum_goes_to_its_first_place(m: Module) -> None:
    ties = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 1.0, 1.0]], dtype=torch.float64).requires_grad_()
    ones = torch.ones_like(ties)
    high, _, amax = m.extremes.hosted(ties, ones)
    (gradient,) = torch.autograd.grad(high.sum() + 2 * amax, ties)
    assert gradient.tolist() == [[0, 3, 0, 0, 0, 0, 0, 0]]


def test_indices_have_no_gradient(m: Module) -> None:
    values = arguments(m.indices)
    value, index = m.indices(*values)
    assert value.requires_grad and not index.requires_grad and index.dtype is torch.int32
    acc = values[0] @ values[1].T
    assert torch.equal(index.long(), acc.argmax(1)) and torch.equal(value, acc.max(1).values)


def test_only_an_index_is_asked_for() -> None:
    f = codalang.load("epilogue f(acc: tile[M, N]) {\nreduce m: row[N] = max(acc)\nstore i: col[M] = 1\n}").f
    acc = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    high, ones = f.hosted(acc)
    assert not ones.requires_grad
    (gradient,) = torch.autograd.grad(high.sum(), acc)
    assert torch.equal(gradient.argmax(0), acc.argmax(0)) and gradient.sum() == 8


def test_a_transform_without_vjp_runs_and_says_that_it_has_no_gradient(m: Module) -> None:
    values = arguments(m.widths)
    with torch.no_grad():
        spread, _ = m.widths(*values)
    acc = values[0] @ values[1].T
    assert_close(spread, acc.amax(1) - acc.amin(1))
    with pytest.raises(CodaUnsupportedError, match="no `vjp`"):
        m.widths(*values)


def test_low_precision_dtypes() -> None:
    """Tiles have A's dtype, vectors f32; hosted, a mask or an index that comes first decides nothing."""
    f = codalang.load(
        "epilogue f(i: tile[M, N]: i32, keep: tile[M, N]: bool, x: tile[M, N]) {\n"
        "store y: tile[M, N] = where(keep, x * float(i), 0)\nstore v: col[M] = 2\n"
        "state (top, at): scalar = argmax2(x, row_index(), col_index())\n}"
    ).f
    x = torch.randn(4, 8).bfloat16()
    i, keep = torch.randint(0, 5, (4, 8), dtype=torch.int32), torch.rand(4, 8) < 0.5
    result = f.hosted(i, keep, x)
    assert [r.dtype for r in result] == [torch.bfloat16, torch.float32, torch.float32, torch.int32]
    assert torch.equal(result.y, torch.where(keep, x.float() * i, 0.0).bfloat16())
    assert result.at == x.float().argmax() // 8


def test_numbers_for_scalars(m: Module) -> None:
    a, w, keep, target, shift, k, on, g = arguments(m.masked)
    tensors = m.masked(a, w, keep, target, shift, k, on, g)
    plain = m.masked(a, w, keep, target, shift, int(k), bool(on), g)
    assert all(torch.equal(x, y) for x, y in zip(tensors, plain, strict=True))
    off = m.masked(a, w, keep, target, shift, int(k) + 1, False, g)
    assert (off.flag, plain.flag) == (3, 2) and not torch.equal(off.y, plain.y)
    m.masked(a, w, keep, target, shift, torch.tensor(3, dtype=torch.int32), torch.tensor(False), g)


WRONG_CALLS = [
    ("a float for an index", {"target": torch.zeros(6)}, r"declared i64 \(torch.int64\), got torch.float32", "target"),
    ("int32 for int64", {"target": torch.zeros(6).int()}, "got torch.int32", "target"),
    ("an index for a mask", {"keep": torch.zeros(6, 8).int()}, "is declared bool .*, got torch.int32", "keep"),
    (
        "a mask for a float",
        {"g": torch.zeros(8) > 0},
        "dtypes bfloat16, float16, float32, float64, got torch.bool",
        "g",
    ),
    ("a fraction for an index", {"k": 1.5}, "or an integer of 32 bits, got the float 1.5", "k"),
    ("a truth value for an index", {"k": True}, "got the bool True", "k"),
    ("past 32 bits", {"k": 2**31}, "got the int 2147483648", "k"),
    ("a number for a mask", {"on": 1}, "or True or False, got the int 1", "on"),
    ("a number for a vector", {"target": 1}, "must be col.*, got the int 1", "target"),
    ("a wrong shape", {"target": torch.zeros(5).long()}, r"here \[6\] \(M = 6 from `a`\), got shape \[5\]", "target"),
]


@pytest.mark.parametrize(
    ("changed", "words", "argument"), [c[1:] for c in WRONG_CALLS], ids=[c[0] for c in WRONG_CALLS]
)
def test_wrong_calls(m: Module, changed: dict[str, object], words: str, argument: str) -> None:
    names = ("a", "w", *(p.name for p in m.masked.epilogue.params[1:]))
    right = dict(zip(names, arguments(m.masked), strict=True))
    m.masked(**right)
    for _ in range(2):  # what is wrong stays wrong, also beside what was right
        with pytest.raises(CodaCallError, match=words) as caught:
            m.masked(**{**right, **changed})
        assert caught.value.argument == argument
    m.masked(**right)


@pytest.mark.parametrize(
    ("values", "by"), [((torch.zeros(3, 4), torch.zeros(6, 4)), "w"), ((torch.zeros(3, 6),), "acc")], ids=["w", "acc"]
)
def test_groups_must_divide_the_columns(m: Module, values: tuple[Tensor, ...], by: str) -> None:
    run = m.grouped if by == "w" else m.grouped.hosted
    with pytest.raises(CodaCallError, match=f"groups of 4 columns, but `{by}` makes N = 6") as caught:
        run(*values, torch.zeros(6), torch.zeros(3))
    assert caught.value.argument == by and caught.value.loc is not None


def test_stored_vectors_are_new_tensors() -> None:
    f = codalang.load(
        "epilogue f(acc: tile[M, N], r: row[N], c: col[M], s: scalar) {\n"
        "store vr: row[N] = r\nstore vc: col[M] = c\nstore vs: scalar = s\nstore vf: row[N]: f32 = cast(r, f32)\n}"
    ).f
    values = [torch.randn(s) for s in ((3, 8), (8,), (3,), ())]
    before = copy.deepcopy(values)
    for result in f.hosted(*values):
        result.add_(1)
    assert all(torch.equal(v, b) for v, b in zip(values, before, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(m: Module, backend: str) -> None:
    """No graph break; the same values, indices and gradients; two compilations for any number of rows."""
    torch._dynamo.reset()

    def program(a: Tensor, w: Tensor, keep: Tensor, target: Tensor, shift: Tensor, on: Tensor, g: Tensor):  # noqa: ANN202
        y, first, flag, logit = m.masked(a, w, keep, target, shift, 3, on, g)
        high, low, amax = m.extremes(a, w, y)
        lse, mean, var, value, index = m.transforms(a, w, t=y)
        loss = (high * lse + value).sum() + (low * mean + var).sum() + amax + logit.sum() + (first * flag).sum()
        return loss, index

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for rows in (3, 4, 6, 9):
        values = arguments(m.masked, lead=(rows,))
        del values[5]
        leaves = [v for v in values if v.requires_grad]
        (expected, where), (result, found) = program(*values), compiled(*values)
        assert_close(result, expected)
        assert torch.equal(where, found) and found.dtype is torch.int32
        ours, theirs = torch.autograd.grad(result, leaves), torch.autograd.grad(expected, leaves)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other)
    assert counter.frame_count <= 2


def test_torch_compile_reports_a_wrong_number(m: Module) -> None:
    torch._dynamo.reset()
    a, w, keep, target, shift, _, on, g = arguments(m.masked)
    compiled = torch.compile(lambda k: m.masked(a, w, keep, target, shift, k, on, g), backend="eager")
    with pytest.raises(Exception, match="`k` of `masked`"):
        compiled(1.5)


def test_a_traced_program_with_a_state_of_its_own_stands_for_itself(m: Module) -> None:
    """The text that a traced graph holds defines the state that it uses: another process can run it."""
    from codalang.torch import opaque

    text = opaque.one_line(m.widths.source)
    assert opaque.epilogue_of(text) == m.widths.epilogue


def test_nothing_but_what_was_kept_is_loaded(m: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cotangents of some outputs, the backward takes no zeros for them."""
    values = arguments(m.transforms)
    results = m.transforms(*values)
    names: list[str] = []
    original = execute._execute

    def spy(job, *rest):  # noqa: ANN001, ANN002, ANN202
        names.extend(p.name for p in job.epilogue.params)
        return original(job, *rest)

    monkeypatch.setattr(execute, "_execute", spy)
    torch.autograd.grad(results.lse.sum(), [v for v in values if v.requires_grad])
    assert "d_lse" in names and not {"d_mean", "d_var", "d_value"} & set(names)
