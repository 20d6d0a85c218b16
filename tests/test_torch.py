"""Programs as torch functions: calls and their errors, gradients of any order, and what torch does around them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import oracles
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import epilogues, extents
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import codalang
from codalang.errors import CodaCallError, CodaError, CodaSyntaxError, CodaUnsupportedError
from codalang.ir import reference
from codalang.torch import execute
from codalang.torch.module import EpilogueFunction, Module

ROOT = Path(__file__).resolve().parent.parent

# Each kind of input and output, several outputs, something to save that is not an input, every width.
PROGRAM = """
epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }
epilogue scaled(acc: tile[M, N], s: scalar, r: col[M], g: row[N]) {
    let x = tanh(acc * s)
    store y: tile[M, N] = x * r + g
    reduce total: scalar = sum(x * x)
}
epilogue halves(acc: tile[M, 2*N], t: tile[M, N], b: row[2*N]) {
    let (u, v) = split(acc + b)
    store y: tile[M, N] = sigmoid(u) * v * t
    reduce rows: col[M] = sum(u * v)
    reduce columns: row[N] = sum(t * u)
}
epilogue wide(acc: tile[M, N/2], t: tile[M, N]) {
    store y: tile[M, N] = exp(join(acc, acc * acc) * 0.1) * t
}
epilogue forgetful(acc: tile[M, N], t: tile[M, N], unused: row[N]) { store y: tile[M, N] = t * t }
epilogue stopped(acc: tile[M, N], t: tile[M, N]) { store y: tile[M, N] = stop_gradient(acc * t) }
epilogue add2(acc: tile[M, N], t: tile[M, N], u: tile[M, N]) { store y: tile[M, N] = acc + t + u }
epilogue vectors(r: col[M], g: row[N]) { store y: tile[M, N] = sigmoid(r) * g }
epilogue counts(acc: tile[M, N]) {
    reduce n: col[M] = sum(1.0)
    reduce s: scalar = sum(acc)
}
epilogue annotated(acc: tile[M, N], t: tile[M, N]: f32) {
    store y: tile[M, N]: f32 = acc * t
    reduce s: col[M]: bf16 = sum(acc)
}
epilogue copies(acc: tile[M, N], t: tile[M, N]) {
    store x: tile[M, N] = t
    store y: tile[M, N] = t
    store z: tile[M, N] = acc
}
"""

STDLIB = ("swiglu", "bias_gelu", "residual_rms", "scaled_swiglu")


@pytest.fixture(scope="module")
def m() -> Module:
    return codalang.load(PROGRAM)


def _function(name: str) -> EpilogueFunction:
    return codalang.load(name)[name] if name in STDLIB else codalang.load(PROGRAM)[name]


def _inputs(
    function: EpilogueFunction,
    *,
    rows: int = 5,
    columns: int = 6,
    k: int = 4,
    lead: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    hosted: bool = False,
    grad: bool = True,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Random values for every argument, in order."""
    generator = torch.Generator().manual_seed(seed)
    lead = (rows,) if lead is None else lead

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    values, params = [], function.epilogue.params
    if not hosted:
        values += [make(*lead, k), make(int(params[0].type.width * columns), k)]
        params = params[1:]
    for param in params:
        tail = () if param.type.width is None else (int(param.type.width * columns),)
        values.append(make(*(lead if param.type.kind.has_rows else ()), *tail))
    return values


def _outputs(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _by_torch(function: EpilogueFunction, values, *, hosted: bool = False, columns: int = 6) -> list[torch.Tensor]:
    """The same function by the reference interpreter alone, which torch differentiates."""
    lead = values[0].shape[:-1]
    if not hosted:
        values = [values[0] @ values[1].T, *values[2:]]
    flat = []
    for param, value in zip(function.epilogue.params, values, strict=True):
        tail = value.shape[-1:] if param.type.width is not None else ()
        flat.append(value.reshape((-1, *tail) if param.type.kind.has_rows else tail))
    named = {p.name: v for p, v in zip(function.epilogue.params, flat, strict=True)}
    rows = 1
    for size in lead:
        rows *= size
    results = reference.run(function.epilogue, named, dtype=torch.float64, extents=(rows, columns))
    return [
        results[o.name].reshape((*lead, *results[o.name].shape[1:]) if o.type.kind.has_rows else results[o.name].shape)
        for o in function.epilogue.outputs
    ]


def _close(ours: torch.Tensor, expected: torch.Tensor, bound: float = 1e-12) -> bool:
    assert ours.shape == expected.shape
    distance = (ours.double() - expected.double()).norm().item()
    return distance <= bound * max(expected.double().norm().item(), 1e-300)


def _gradients(outputs, values, cotangents) -> tuple[torch.Tensor, ...]:
    """torch's own, zeros where torch sees no connection."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(v) for v in values)
    outputs, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, values, cotangents, allow_unused=True, materialize_grads=True)


ALL = [*STDLIB, "plain", "scaled", "halves", "wide", "forgetful", "stopped", "add2", "counts", "copies"]


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_load_by_path_text_and_name(tmp_path):
    file = tmp_path / "odd name"
    file.write_text("epilogue f(acc: tile[M, N]) { store y: tile[M, N] = acc }")
    a, w = torch.randn(3, 4), torch.randn(5, 4)
    for program in (file, str(ROOT / "stdlib" / "swiglu.coda"), ROOT / "stdlib" / "swiglu.coda", "swiglu", PROGRAM):
        module = codalang.load(program)
        assert len(module) >= 1 and set(module) <= set(dir(module)) and list(module) == [module[n].name for n in module]
    assert torch.equal(codalang.load(file).f(a, w), a @ w.T)
    assert codalang.load("swiglu") is codalang.load("swiglu")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("swigl", "did you mean `swiglu`"),
        ("no/such/file.coda", "cannot read"),
        ("missing.coda", "cannot read"),
        ("not a name", "neither a path"),
        (Path("/"), "cannot read"),
        (12, "got int"),
        ("", "neither a path"),
    ],
)
def test_load_what_is_not_there(program, words):
    with pytest.raises(CodaError, match=words):
        codalang.load(program)


def test_load_a_wrong_program():
    with pytest.raises(CodaSyntaxError, match=r"<string>:1:"):
        codalang.load("epilogue f(acc: tile[M, N]) { store }")


def test_an_unknown_epilogue(m):
    assert not hasattr(m, "nothing")
    with pytest.raises(CodaError, match="defines no epilogue `nothing`; it defines plain, scaled"):
        _ = m.nothing
    with pytest.raises(CodaError, match="defines no epilogue"):
        _ = m["nothing"]


def test_import_is_lazy():
    script = (
        "import sys, codalang\n"
        "assert not {'torch', 'cutlass', 'lark'} & set(sys.modules), 'import codalang'\n"
        "import codalang.cli.text, codalang.cli.kernels, codalang.cli.trial\n"
        "assert not {'torch', 'cutlass'} & set(sys.modules), 'import codalang.cli'\n"
        "codalang.load('swiglu')\n"
        "assert 'cutlass' not in sys.modules, 'load'\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, cwd=ROOT)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("lead", [(5,), (), (1,), (2, 3), (2, 1, 3)])
def test_values(name, hosted, lead):
    function = _function(name)
    values = _inputs(function, hosted=hosted, lead=lead, grad=False)
    ours = _outputs((function.hosted if hosted else function)(*values))
    for mine, expected in zip(ours, _by_torch(function, values, hosted=hosted), strict=True):
        assert _close(mine, expected) and mine.is_contiguous() and mine.dtype is torch.float64


def test_swiglu_by_hand():
    a, w = torch.randn(2, 3, 8), torch.randn(8, 8)  # F = 4: halves taken for pairs would show
    acc = a @ w.T
    gate, up = acc[..., 0::2], acc[..., 1::2]
    assert _close(codalang.load("swiglu").swiglu(a, w), torch.nn.functional.silu(gate) * up, 1e-6)


def test_several_outputs_are_a_named_tuple(m):
    values = _inputs(m.halves, lead=(2, 3))
    result = m.halves(*values)
    assert type(result).__name__ == "halves" and result._fields == ("y", "rows", "columns")
    assert [tuple(r.shape) for r in result] == [(2, 3, 6), (2, 3), (6,)]
    assert torch.equal(m.halves(values[0], values[1], b=values[3], t=values[2]).y, result.y)


def test_numbers_and_flat_cols(m):
    a, w, _, r, g = _inputs(m.scaled, lead=(2, 3), grad=False)
    number = m.scaled(a, w, 0.5, r, g)
    tensor = m.scaled(a, w, torch.tensor(0.5, dtype=torch.float64), r.reshape(6), g)
    assert torch.equal(number.y, tensor.y) and torch.equal(number.total, tensor.total)
    assert not torch.equal(number.y, m.scaled(a, w, 2, r, g).y)  # a number is no part of what is remembered


def test_keywords_may_be_called_a_and_w():
    f = codalang.load("epilogue f(acc: tile[M, N], a: row[N], w: scalar) { store y: tile[M, N] = acc * a + w }").f
    a, w, row = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    assert torch.equal(f(a, w, a=row, w=2.0), f(a, w, row, 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STDLIB)
def test_low_precision_imitates_the_kernel(name, dtype):
    function = _function(name)
    values = _inputs(function, rows=16, columns=16, k=64, dtype=dtype, grad=False)
    acc = values[0].float() @ values[1].float().T
    named = {p.name: v for p, v in zip(function.epilogue.params, [acc, *values[2:]], strict=True)}
    storage = reference.Storage(dtype)
    expected = reference.run(function.epilogue, named, dtype=torch.float32, storage=storage)
    for output, mine in zip(function.epilogue.outputs, _outputs(function(*values)), strict=True):
        assert mine.dtype is (dtype if output in function.epilogue.stores else torch.float32)
        assert torch.equal(mine, expected[output.name])


def test_annotated_dtypes(m):
    a, w = torch.randn(3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    result = m.annotated(a, w, torch.randn(3, 5))
    assert (result.y.dtype, result.s.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("lead", [(0,), (0, 3), (3, 0)])
def test_no_rows(m, lead):
    values = _inputs(m.halves, lead=lead)
    result = m.halves(*values)
    assert result.y.shape == (*lead, 6) and result.rows.shape == lead
    gradients = torch.autograd.grad([r.sum() for r in result], values)
    assert all(torch.equal(g, torch.zeros_like(v)) for g, v in zip(gradients, values, strict=True))


def test_no_k(m):
    values = _inputs(m.halves, k=0)
    result = m.halves(*values)
    assert _close(result.y, _by_torch(m.halves, values)[0])
    assert torch.autograd.grad(result.y.sum(), values)[1].shape == (12, 0)


def test_no_columns(m):
    values = _inputs(m.plain, columns=0)
    assert m.plain(*values).shape == (5, 0)
    assert torch.equal(torch.autograd.grad(m.plain(*values).sum(), values)[0], torch.zeros(5, 4, dtype=torch.float64))


def test_any_strides(m):
    values = _inputs(m.halves, lead=(2, 3))
    odd = [v.detach().mT.contiguous().mT if v.dim() > 1 else torch.stack([v, v], -1)[..., 0].detach() for v in values]
    odd[2] = torch.stack([odd[2], odd[2]])[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert any(not o.is_contiguous() for o in odd)
    odd = [o.requires_grad_() for o in odd]
    for mine, expected in zip(m.halves(*odd), m.halves(*values), strict=True):
        assert _close(mine, expected)
    ours = torch.autograd.grad([o.sum() for o in m.halves(*odd)], odd)
    expected = torch.autograd.grad([o.sum() for o in m.halves(*values)], values)
    assert all(_close(o, e) for o, e in zip(ours, expected, strict=True))


def test_expanded_inputs(m):
    a, w, t, b = _inputs(m.halves, grad=False)
    row = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    y = m.halves(a, w, row.expand(5, 6), b).y
    assert _close(y, m.halves(a, w, row.detach().expand(5, 6).contiguous(), b).y)
    assert torch.autograd.grad(y.sum(), row)[0].shape == (1, 6)


def test_outputs_are_new_tensors(m):
    a, w, t = _inputs(m.copies, rows=1, columns=1, grad=False)
    before = t.clone()
    x, y, z = m.copies(a, w, t)
    hosted = m.plain.hosted(t)
    for result in (x, y, z, hosted):
        result.add_(1)
    assert torch.equal(t, before) and torch.equal(x, before + 1) and torch.equal(y, before + 1)


def test_hosted_without_an_accumulator(m):
    r, g = torch.randn(3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    assert _close(m.vectors.hosted(r, g), torch.sigmoid(r)[:, None] * g)
    assert m.vectors.hosted(r.expand(2, 3), g).shape == (2, 3, 4)
    counts = codalang.load("epilogue c(s: scalar) { store y: tile[M, N] = s\nreduce n: scalar = sum(s) }").c
    result = counts.hosted(2.0, extents=(3, 5))
    assert torch.equal(result.y, torch.full((3, 5), 2.0)) and result.n.item() == 30


# ---- wrong calls -----------------------------------------------------------------------------------------------------

A, W, T, B = torch.zeros(2, 3, 4), torch.zeros(12, 4), torch.zeros(2, 3, 6), torch.zeros(12)

WRONG_CALLS = [
    ("missing", lambda m: m.halves(A, W, T), r"is missing `b`: row\[2\*N\]", "b"),
    ("missing a", lambda m: m.halves(), "is missing `a`", "a"),
    ("too many", lambda m: m.plain(A, W, T), r"`plain\(a, w\)` takes 2 arguments, got 3", "argument 3"),
    ("unknown", lambda m: m.halves(A, W, T, bias=B), "has no parameter `bias`", "bias"),
    ("twice", lambda m: m.halves(A, W, T, B, t=T), "got `t` twice", "t"),
    ("not a tensor", lambda m: m.halves(A, W, T, [1.0]), "`b` of `halves` must be row.*, got list", "b"),
    ("a number for a tile", lambda m: m.halves(A, W, 1.0, B), "must be tile.*, got the float 1.0", "t"),
    ("a bool", lambda m: m.scaled(A, W, True, T[..., 0], B), "or a number, got the bool True", "s"),
    ("None", lambda m: m.halves(A, W, None, B), "got NoneType", "t"),
    ("K", lambda m: m.plain(A, torch.zeros(6, 5)), r"`a` is \[2, 3, 4\], so K = 4, but `w` is \[6, 5\], so K = 5", "w"),
    ("w.T", lambda m: m.plain(A, torch.zeros(4, 6)), "pass w.T", "w"),
    ("w axes", lambda m: m.halves(A, W[0], T, B), r"`w` must be \[2\*N, K\], got shape \[4\]", "w"),
    ("a axes", lambda m: m.plain(torch.zeros(()), W), r"`a` must be \[..., K\]", "a"),
    ("w rows", lambda m: m.halves(A, W[:11], T, B), "`w` has 11 rows", "w"),
    ("odd", lambda m: codalang.load("swiglu").swiglu(A, W[:11]), "splits N columns.*, but `w` makes N = 11", "w"),
    (
        "tile columns",
        lambda m: m.halves(A, W, T[..., :5], B),
        r"`t` of `halves` is tile\[M, N\], here \[2, 3, 6\] \(M = 6 from `a`, N = 6 from `w`\), got shape \[2, 3, 5\]",
        "t",
    ),
    ("tile lead", lambda m: m.halves(A, W, T.reshape(3, 2, 6), B), r"here \[2, 3, 6\]", "t"),
    ("flat tile", lambda m: m.halves(A, W, T.reshape(6, 6), B), r"here \[2, 3, 6\]", "t"),
    ("row", lambda m: m.halves(A, W, T, B[:6]), r"`b` of `halves` is row\[2\*N\], here \[12\]", "b"),
    ("row hint", lambda m: m.halves(A, W, T, B[None]), "call .reshape", "b"),
    ("col hint", lambda m: m.scaled(A, W, 1, T[..., :1], B), "call .squeeze", "r"),
    ("scalar hint", lambda m: m.scaled(A, W, torch.ones(1), T[..., 0], B), "call .reshape", "s"),
    ("integers", lambda m: m.halves(A, W, T.long(), B), "got torch.int64", "t"),
    ("complex", lambda m: m.plain(A.cfloat(), W.cfloat()), "got torch.complex64", "a"),
    ("matmul dtypes", lambda m: m.plain(A, W.double()), "`a` is torch.float32, but `w` is torch.float64", "w"),
    ("annotation", lambda m: m.annotated(A, W, torch.zeros(2, 3, 12).half()), "declared f32.*got torch.float16", "t"),
    ("devices", lambda m: m.plain(A, W.to("meta")), "`w` of `plain` is on meta, but `a` is on cpu", "w"),
    ("sparse", lambda m: m.plain(A, W.to_sparse()), "must be a strided tensor", "w"),
    ("no accumulator", lambda m: m.vectors(A, W, T, B), "has no accumulator", None),
    ("undetermined", lambda m: codalang.load("epilogue c(s: scalar) { store y: tile[M, N] = s }").c.hosted(1.0),
     "determines M", "extents"),
    ("extents", lambda m: m.plain.hosted(T, extents=(7, 6)), r"extents = \[7, 6\], but `acc` makes M = 6", "extents"),
    ("hosted lead", lambda m: m.halves.hosted(torch.zeros(2, 3, 12), torch.zeros(5, 6), B), "M = 6 from `acc`", "t"),
    ("hosted 0-d", lambda m: m.plain.hosted(torch.zeros(())), r"is tile\[M, N\], got shape \[\]", "acc"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words", "argument"), [c[1:] for c in WRONG_CALLS], ids=[c[0] for c in WRONG_CALLS])
def test_wrong_calls(m, call, words, argument):
    with pytest.raises(CodaCallError, match=words) as caught:
        call(m)
    assert caught.value.argument == argument
    assert isinstance(caught.value, TypeError)
    with pytest.raises(CodaCallError, match=words), torch.no_grad():
        call(m)  # what is wrong stays wrong


def test_a_wrong_name_of_a_derivative(m):
    with pytest.raises(CodaCallError, match="nothing"):
        m.plain.derivative(wrt=["nothing"])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name != "stopped"])  # not the derivative of its values
@pytest.mark.parametrize("hosted", [False, True])
def test_gradcheck(name, hosted):
    function = _function(name)
    values = _inputs(function, rows=3, columns=4, k=2, hosted=hosted)

    def run(*values):
        return tuple(_outputs((function.hosted if hosted else function)(*values)))

    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values)


def _strange_cotangents(outputs, seed: int):
    """Strided, of stride 0, transposed: what gradcheck never feeds."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    cotangents = []
    for number, output in enumerate(outputs):
        shape = output.shape
        if output.dim() == 2:
            wide = (noise(*shape, 2)[..., 0], noise(1, shape[1]).expand(shape), noise(shape[1], shape[0]).T)
        elif output.dim() == 1:
            wide = (noise(*shape, 2)[..., 0], noise(1).expand(shape), noise(shape[0] + 3)[3:])
        else:
            wide = (noise(3)[1],)
        cotangents.append(wide[(number + seed) % len(wide)])
    return cotangents


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("hosted", [False, True])
def test_strange_cotangents(name, seed, hosted):
    function = _function(name)
    values = _inputs(function, seed=seed, hosted=hosted)
    ours = _outputs((function.hosted if hosted else function)(*values))
    cotangents = _strange_cotangents(ours, seed)
    before = [c.clone() for c in cotangents]
    gradients = _gradients(ours, values, cotangents)
    assert all(torch.equal(c, b) for c, b in zip(cotangents, before, strict=True))
    plain = [v.detach().requires_grad_() for v in values]
    expected = _gradients(_by_torch(function, plain, hosted=hosted), plain, cotangents)
    assert all(_close(g, e) for g, e in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("name", ["halves", "scaled", "residual_rms", "copies"])
def test_missing_cotangents(name):
    function = _function(name)
    values = _inputs(function, lead=(2, 3))
    for chosen in range(len(function.epilogue.outputs)):
        ours = _outputs(function(*values))[chosen]
        theirs = _by_torch(function, values)[chosen]
        gradients = torch.autograd.grad(ours.sin().sum(), values)
        expected = torch.autograd.grad(theirs.sin().sum(), values, allow_unused=True, materialize_grads=True)
        assert all(_close(g, e) for g, e in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("name", ["halves", "scaled", "residual_rms", "scaled_swiglu"])
def test_gradients_with_leading_dimensions(name, lead):
    function = _function(name)
    values = _inputs(function, lead=lead)
    gradients = torch.autograd.grad([o.sin().sum() for o in _outputs(function(*values))], values)
    expected = torch.autograd.grad([o.sin().sum() for o in _by_torch(function, values)], values)
    assert all(_close(g, e) for g, e in zip(gradients, expected, strict=True))


def test_one_cotangent_for_two_calls_twice(m):
    values = _inputs(m.halves)
    shared = torch.randn(5, 6, dtype=torch.float64)
    first, second = m.halves(*values).y, m.halves(*values).y
    once = torch.autograd.grad([first, second], values, [shared, shared], retain_graph=True)
    again = torch.autograd.grad([first, second], values, [shared, shared])
    alone = torch.autograd.grad(m.halves(*values).y, values, shared)
    for one, two, three in zip(once, again, alone, strict=True):
        assert torch.equal(one, two) and _close(one, 2 * three)


def test_only_what_is_needed_is_computed(m, monkeypatch):
    ran: list[tuple[str, bool, int]] = []
    real = execute._execute

    def record(job, values, *rest):
        ran.append((job.epilogue.name, job.on_gemm, len(job.epilogue.outputs)))
        return real(job, values, *rest)

    monkeypatch.setattr(execute, "_execute", record)
    a, w, t, b = _inputs(m.halves)
    for frozen, gemms in (((w,), 1), ((a,), 1), ((a, w), 0), ((), 2)):
        for value in (a, w, t, b):
            value.requires_grad_(all(value is not f for f in frozen))
        y = m.halves(a, w, t, b).y
        ran.clear()
        y.sum().backward()
        assert [r for r in ran if r[0] == "matmul"] == [("matmul", True, 1)] * gemms
        assert len(ran) == gemms + 1 and all((f.grad is None) for f in frozen)
        for value in (a, w, t, b):
            value.grad = None
    # the gradient of a plain matmul's accumulator is the cotangent: no epilogue runs
    a.requires_grad_()
    y = m.plain(a, w.requires_grad_())
    ran.clear()
    y.sum().backward()
    assert [r[0] for r in ran] == ["matmul", "matmul"]
    # without gradients nothing is saved
    ran.clear()
    with torch.no_grad():
        _function("swiglu")(a, w)
    _function("swiglu")(a, w)
    assert [r[2] for r in ran] == [1, 2]


# For each: kernels of the forward and of the backward; activation-sized loads and stores of each, in units of M * N.
# The backward's kernels are the derived epilogue and two GEMMs; what the forward stores beyond its outputs is saved.
GOLDEN_COUNTS = {
    "swiglu": (1, 3, (0, 1.5), (1.5, 1)),  # saves acc
    "bias_gelu": (1, 3, (0, 2), (2, 1)),  # saves acc
    "residual_rms": (1, 3, (1, 2), (3, 1)),  # saves nothing; d_acc is d_res
    "scaled_swiglu": (1, 3, (0, 1.5), (1.5, 1)),  # saves acc before its row scale
}


@pytest.mark.parametrize("name", STDLIB)
def test_golden_counts(name, monkeypatch):
    rows, columns, k = 6, 10, 1000  # no operand of a matmul is as large as an activation
    jobs = []
    real = execute._execute

    def record(job, values, *rest):
        outputs = real(job, values, *rest)
        loaded = values[2:] if job.on_gemm else values
        moved = [sum(t.numel() for t in ts if t.dim() == 2) / (rows * columns) for ts in (loaded, outputs)]
        jobs.append((job.epilogue.name, tuple(moved)))
        return outputs

    monkeypatch.setattr(execute, "_execute", record)
    function = _function(name)
    values = _inputs(function, rows=rows, columns=columns, k=k)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = _outputs(function(*values))
    forward, forward_moved, backward_moved = len(jobs), jobs[0][1], None
    torch.autograd.grad(outputs, values, [torch.randn_like(o) for o in outputs])
    (backward_moved,) = (moved for job, moved in jobs[1:] if job.endswith("_backward"))
    assert (forward, len(jobs) - forward, forward_moved, backward_moved) == GOLDEN_COUNTS[name]
    # Kept are `a`, `w`, and exactly what the derived epilogue loads beside the cotangents: nothing twice.
    assert len({t.data_ptr() for t in kept}) == len(kept)
    activations = sum(t.numel() for t in kept if t.shape not in (values[0].shape, values[1].shape) and t.dim() == 2)
    cotangents = sum(o.numel() for o in outputs if o.dim() == 2)
    assert (activations + cotangents) / (rows * columns) == backward_moved[0]


def test_a_new_shape_derives_nothing(m, monkeypatch):
    """And runs the very same epilogues, so that their kernels are found by identity."""
    epilogues = []
    real = execute._execute
    monkeypatch.setattr(execute, "_execute", lambda job, *rest: epilogues.append(job.epilogue) or real(job, *rest))
    runs = []
    for rows in (3, 4, 5):
        epilogues.clear()
        values = _inputs(m.halves, rows=rows)
        y, per_row, _ = m.halves(*values)
        torch.autograd.grad([y.sum(), per_row.sum()], values[1:])
        runs.append([id(e) for e in epilogues])
        monkeypatch.setattr("codalang.torch.program_autograd.derive_program", None)
    assert runs[0] == runs[1] == runs[2]


def test_a_cotangent_that_cannot_be_left_out():
    """Without `h`'s cotangent the backward would widen `s`'s by a tile that was not kept: it takes zeros for `h`'s."""
    text = """
epilogue f(acc: tile[M, N]) {
    let (u, v) = split(acc)
    store h: tile[M, N/2] = u
    reduce s: col[M] = sum(u)
}"""
    f = codalang.load(text).f
    values = _inputs(f)
    for run in (f, lambda *values: f.hosted(values[0] @ values[1].T)):
        gradients = torch.autograd.grad(run(*values).s.sin().sum(), values)
        expected = torch.autograd.grad(_by_torch(f, values)[1].sin().sum(), values)
        assert all(_close(g, e) for g, e in zip(gradients, expected, strict=True))


def test_zero_gradients(m):
    values = _inputs(m.forgetful)
    gradients = torch.autograd.grad(m.forgetful(*values).sum(), values)
    for gradient, value in zip(gradients, values, strict=True):
        assert gradient.shape == value.shape and gradient.any() == (value is values[2])
    assert not m.stopped(*_inputs(m.stopped)).requires_grad


def test_scalar_parameters_have_gradients(m):
    a, w, s, r, g = _inputs(m.scaled)
    y = m.scaled(a, w, s, r, g).y
    (gradient,) = torch.autograd.grad(y.sum(), s)
    (expected,) = torch.autograd.grad(_by_torch(m.scaled, [a, w, s, r, g])[0].sum(), s)
    assert gradient.shape == () and _close(gradient, expected)
    y = m.scaled(a, w, 0.5, r, g).y  # a number in its place
    assert len(torch.autograd.grad(y.sum(), (a, w, r, g))) == 4


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("matmul", DTYPES)
@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_gradients_have_the_dtype_of_their_input(m, matmul, first, second):
    """`add2` has one gradient for three inputs: each must get its own, rounded once."""
    a, w, t, u = _inputs(m.add2, rows=8, columns=8, k=16, grad=False)
    values = [a.to(matmul), w.to(matmul), t.to(first), u.to(second)]
    values = [v.requires_grad_() for v in values]
    y = m.add2(*values)
    cotangent = torch.randn(8, 8).to(matmul)
    gradients = torch.autograd.grad(y, values, cotangent)
    assert [g.dtype for g in gradients] == [v.dtype for v in values]
    assert torch.equal(gradients[2], cotangent.to(first)) and torch.equal(gradients[3], cotangent.to(second))
    exact = cotangent.double() @ values[1].detach().double()
    assert _close(gradients[0], exact, 2 * torch.finfo(matmul).eps)

    f = codalang.load("epilogue f(acc: tile[M, N], t: row[N], u: row[N]) { store y: tile[M, N] = acc * (t + u) }").f
    rows = [torch.randn(8).to(d).requires_grad_() for d in (first, second)]
    one, two = torch.autograd.grad(f(values[0], values[1], *rows), rows, cotangent)
    assert (one.dtype, two.dtype) == (first, second)
    acc = values[0].detach().double() @ values[1].detach().double().T
    exact = (acc * cotangent.double()).sum(0)
    assert _close(one, exact, 2 * torch.finfo(matmul).eps + torch.finfo(first).eps)
    assert _close(two, exact, 2 * torch.finfo(matmul).eps + torch.finfo(second).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STDLIB)
def test_low_precision_gradients(name, dtype):
    """Within a few roundings of float64: of the saved value, of d_acc, and of the gradient itself."""
    function = _function(name)
    values = _inputs(function, rows=16, columns=32, k=64, dtype=dtype, grad=False)
    values = [(v * (0.125 if i == 1 else 1)).requires_grad_() for i, v in enumerate(values)]
    outputs = _outputs(function(*values))
    exact_values = [v.detach().double().requires_grad_() for v in values]
    exact = _by_torch(function, exact_values, columns=32)
    cotangents = [torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype) for o in outputs]
    ours = torch.autograd.grad(outputs, values, cotangents)
    expected = torch.autograd.grad(exact, exact_values, [c.double() for c in cotangents])
    assert all(g.dtype is dtype for g in ours)
    assert all(_close(g, e, torch.finfo(dtype).eps) for g, e in zip(ours, expected, strict=True))


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "halves", "scaled", "residual_rms", "scaled_swiglu", "wide"])
def test_second_derivatives_with_strange_cotangents(name, hosted):
    """The gradient of a gradient, with a cotangent of stride 0, through the values that the forward saved."""
    function = _function(name)

    def penalty(run, values):
        outputs = run(values)
        first = torch.autograd.grad([o.sum() for o in outputs], values, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(
            [g.sum() if i % 2 else (g * g).sum() for i, g in enumerate(first) if g.requires_grad],
            values,
            allow_unused=True,
            materialize_grads=True,
        )

    values = _inputs(function, hosted=hosted)
    ours = penalty(lambda v: _outputs((function.hosted if hosted else function)(*v)), values)
    expected = penalty(lambda v: _by_torch(function, v, hosted=hosted), values)
    assert all(_close(g, e, 1e-11) for g, e in zip(ours, expected, strict=True))


@given(epilogues(max_steps=10, annotated=False), extents, st.integers(0, 1000), st.data())
def test_gradients_of_random_programs(epilogue, extents, seed, data):
    """For any choice of inputs that require gradients, of outputs that were used, and of gradients wanted."""
    function = EpilogueFunction(epilogue)
    extents = strategies.fitted(epilogue, extents)
    inputs = strategies.inputs_for(epilogue, extents, seed)
    floats = [name for name, value in inputs.items() if value.is_floating_point()]
    leaves = dict(inputs)
    leaves |= {n: inputs[n].requires_grad_(data.draw(st.booleans(), label=f"{n} requires grad")) for n in floats}
    first = epilogue.accumulator
    if first and not epilogue.has_samples and data.draw(st.booleans(), label="on a GEMM"):  # by the identity
        rest = {name: value for name, value in leaves.items() if name != first.name}
        eye = torch.eye(inputs[first.name].shape[1], dtype=torch.float64)
        outputs = _outputs(function(leaves[first.name], eye, **rest))
    else:
        outputs = _outputs(function.hosted(**leaves, extents=extents[: len(epilogue.dims)]))
    by_name = {o.name: t for o, t in zip(epilogue.outputs, outputs, strict=True) if t.requires_grad}
    used = [name for name in by_name if data.draw(st.booleans(), label=f"{name} is used")]
    wanted = [n for n, v in leaves.items() if v.requires_grad and data.draw(st.booleans(), label=f"d_{n} is wanted")]
    if not used or not wanted:
        return
    cotangents = {n: c for n, c in strategies.cotangents_for(epilogue, extents, seed).items() if n in used}
    ours = torch.autograd.grad(
        [by_name[n] for n in used],
        [leaves[n] for n in wanted],
        [cotangents[n] for n in used],
        create_graph=data.draw(st.booleans(), label="differentiated again"),
    )
    plain = {name: value.detach() for name, value in inputs.items()}
    expected = oracles.autograd(epilogue, plain, cotangents, extents)
    scales = oracles.absolute_contributions(epilogue, plain, cotangents, extents)
    for name, gradient in zip(wanted, ours, strict=True):
        oracles.assert_within(gradient.detach(), expected[name], scales[name], 1e-9, name)


def _second(outputs, values, cotangents, seed: int) -> list[torch.Tensor]:
    """The gradient of a random linear function of the gradient."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    zeros = [torch.zeros_like(v) for v in values]
    if not pairs:
        return zeros
    outputs, cotangents = zip(*pairs, strict=True)
    first = torch.autograd.grad(
        outputs, values, cotangents, create_graph=True, allow_unused=True, materialize_grads=True
    )
    generator = torch.Generator().manual_seed(seed)
    total = sum((g * torch.rand(g.shape, generator=generator, dtype=g.dtype)).sum() for g in first)
    if not total.requires_grad:
        return zeros
    return list(torch.autograd.grad(total, values, allow_unused=True, materialize_grads=True))


@given(epilogues(max_steps=10, annotated=False), extents, st.integers(0, 1000), st.data())
def test_second_derivatives_of_random_programs(epilogue, extents, seed, data):
    function = EpilogueFunction(epilogue)
    extents = strategies.fitted(epilogue, extents)
    inputs = strategies.inputs_for(epilogue, extents, seed)
    values = [v.requires_grad_() for v in inputs.values() if v.is_floating_point()]
    cotangents = strategies.cotangents_for(epilogue, extents, seed)
    used = [name for name in cotangents if data.draw(st.booleans(), label=f"{name} is used")]
    if not values or not used:
        return
    outputs = _outputs(function.hosted(**inputs, extents=extents[: len(epilogue.dims)]))
    ours = {o.name: t for o, t in zip(epilogue.outputs, outputs, strict=True)}
    theirs = reference.run(epilogue, inputs, extents=extents)
    given = [cotangents[name] for name in used]
    mine, expected = (_second([run[n] for n in used], values, given, seed) for run in (ours, theirs))
    scale = max(e.norm().item() for e in expected)
    for one, two in zip(mine, expected, strict=True):
        # where all of it cancels, what is left is the rounding of terms near 1
        assert (one - two).norm().item() <= 1e-8 * scale + 1e-12


def test_third_derivative():
    swiglu = codalang.load("swiglu").swiglu
    values = _inputs(swiglu, rows=2, columns=2, k=2)

    def third(run):
        result = run(values).sin().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(result, values[0], create_graph=True)
            result = (gradient * gradient).sum()
        return gradient

    assert _close(third(lambda v: swiglu(*v)), third(lambda v: _by_torch(swiglu, v, columns=2)[0]), 1e-11)


def test_a_saved_tensor_that_was_written_into_is_noticed():
    f = codalang.load("epilogue f(acc: tile[M, N]) { let y = exp(acc)\nstore y: tile[M, N] }").f
    a, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y = f(a, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what torch does around a call -----------------------------------------------------------------------------------


def test_no_grad_and_inference_mode():
    swiglu = codalang.load("swiglu").swiglu
    values = _inputs(swiglu)
    expected = swiglu(*values)
    assert expected.requires_grad
    with torch.no_grad():
        assert torch.equal(swiglu(*values), expected) and not swiglu(*values).requires_grad
    with torch.inference_mode():
        result = swiglu(*values)
        assert result.is_inference() and torch.equal(result, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    function = _function("residual_rms")
    values = _inputs(function)

    def run(*values):
        return tuple(function(*values))

    ours = (
        torch.autograd.grad([o.sin().sum() for o in checkpoint(run, *values, use_reentrant=False)], values)
        if not reentrant
        else None
    )
    if reentrant:
        leaves = [v.detach().requires_grad_() for v in values]
        sum(o.sin().sum() for o in checkpoint(run, *leaves, use_reentrant=True)).backward()
        ours = [v.grad for v in leaves]
    expected = torch.autograd.grad([o.sin().sum() for o in run(*values)], values)
    assert all(torch.equal(o, e) for o, e in zip(ours, expected, strict=True))


def test_saved_tensor_hooks():
    swiglu = codalang.load("swiglu").swiglu
    values = _inputs(swiglu)
    with torch.autograd.graph.save_on_cpu():
        y = swiglu(*values)
    expected = torch.autograd.grad(swiglu(*values).sum(), values)
    assert all(torch.equal(g, e) for g, e in zip(torch.autograd.grad(y.sum(), values), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    function = _function("residual_rms")
    values = [v.detach().float().requires_grad_() for v in _inputs(function, rows=8, columns=8, k=16)]
    with torch.autocast("cpu", dtype):
        result = function(*values)
        inside = torch.autograd.grad([r.sum() for r in result], values, retain_graph=True)
    explicit = function(values[0].to(dtype), values[1].to(dtype), *values[2:])
    assert (result.x.dtype, result.h.dtype, result.ss.dtype) == (dtype, dtype, torch.float32)
    assert all(torch.equal(r, e) for r, e in zip(result, explicit, strict=True))
    outside = torch.autograd.grad([r.sum() for r in result], values)
    expected = torch.autograd.grad([r.sum() for r in explicit], values)
    for one, two, three in zip(inside, outside, expected, strict=True):
        assert one.dtype is torch.float32 and torch.equal(one, three) and torch.equal(two, three)
    doubles = _inputs(function)
    with torch.autocast("cpu", dtype):
        assert function(*doubles).x.dtype is torch.float64  # as torch.matmul


def test_transforms_are_refused_clearly(m):
    a, w = torch.randn(3, 2, 4), torch.randn(6, 4)
    with pytest.raises(CodaUnsupportedError, match=r"torch\.func"):
        torch.vmap(lambda a: m.plain(a, w))(a)
    with pytest.raises(CodaUnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda a: m.plain(a, w).sum())(a)
    with pytest.raises(CodaUnsupportedError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        m.plain(torch.autograd.forward_ad.make_dual(a, a), w)
    with pytest.raises(CodaUnsupportedError, match=r"torch\.jit"):
        torch.jit.trace(lambda a: m.plain(a, w), (a,))


def test_batches_of_gradients_are_refused_clearly(m):
    a, w = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    y = m.plain(a, w)
    sent = torch.randn(2, *y.shape)
    with pytest.raises(CodaUnsupportedError, match="in a batch"):
        torch.autograd.grad(y, a, sent, is_grads_batched=True, retain_graph=True)
    with pytest.raises(CodaUnsupportedError, match="in a batch"):
        torch.vmap(lambda c: torch.autograd.grad(y, a, c, retain_graph=True)[0])(sent)
    with pytest.raises(CodaUnsupportedError, match="in a batch"):
        torch.autograd.functional.jacobian(lambda a: m.plain(a, w), a, vectorize=True)
    jacobian = torch.autograd.functional.jacobian(lambda a: m.plain(a, w), a)
    one_by_one = [torch.autograd.grad(y, a, c, retain_graph=True)[0] for c in torch.eye(y.numel()).view(-1, *y.shape)]
    assert torch.equal(jacobian.view(-1, *a.shape), torch.stack(one_by_one))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_numbers_of_any_type(is_compiled):
    """What Python calls a real number is one; what is none is told, compiled or not."""
    f = codalang.load("epilogue f(acc: tile[M, N], s: scalar) { store y: tile[M, N] = acc * s }").f
    a, w = torch.randn(3, 4), torch.randn(6, 4)

    def run(s, a=a):
        torch._dynamo.reset()
        function = torch.compile(f, backend="eager") if is_compiled else f
        return function(a, w, s)

    for number in (Fraction(1, 4), 0.25, 3):
        assert torch.equal(run(number), f(a, w, float(number)))
    for s, other in (("1", a), (None, a), ([1.0], a), (1.0, [1.0])):
        with pytest.raises(CodaCallError, match=r"`(s|a)` of `f` must be"):
            run(s, other)


def test_copies_and_pickles(m):
    a, w = torch.randn(3, 4), torch.randn(6, 4)
    for thing in (m, m.plain, codalang.load("swiglu")):
        assert copy.deepcopy(thing) is thing
    assert torch.equal(pickle.loads(pickle.dumps(m)).plain(a, w), m.plain(a, w))
    assert torch.equal(pickle.loads(pickle.dumps(m.plain))(a, w), m.plain(a, w))


def test_a_module_knows_when_a_file_that_it_imports_changes(tmp_path):
    program, imported = tmp_path / "main.coda", tmp_path / "lib.coda"
    imported.write_text("fn f(x) = x + 1\n")
    program.write_text('import "lib.coda"\nepilogue e(acc: tile[M, N]) {\n    store y: tile[M, N] = f(acc)\n}\n')
    m = codalang.load(program)
    assert codalang.load(program) is m
    a, w = torch.randn(3, 4), torch.randn(6, 4)
    imported.write_text("fn f(x) = x + 2\n")
    torch.testing.assert_close(codalang.load(program).e(a, w), m.e(a, w) + 1)
    imported.unlink()
    torch.testing.assert_close(pickle.loads(pickle.dumps(m)).e(a, w), m.e(a, w))
    with pytest.raises(CodaError, match="cannot read"):
        codalang.load(program)


def test_meta_tensors(m):
    result = m.halves(*(v.detach().to("meta") for v in _inputs(m.halves, lead=(2, 3))))
    assert [r.device.type for r in result] == ["meta"] * 3 and result.y.shape == (2, 3, 6)


def test_source_and_backward_are_programs(m):
    for name in STDLIB:
        function = _function(name)
        for text in (function.source, function.backward.source):
            (again,) = codalang.load(text)
            assert codalang.load(text)[again].source == text
    values = _inputs(m.plain)
    derivative = m.scaled.derivative(wrt=["r"], cotangents=["y"])
    assert list(derivative.gradients) == ["r"] and set(derivative.cotangents) <= {"y"}
    assert m.plain.backward(*values).shape == (5, 6)  # it can be hosted by the matmul that makes its cotangent
    assert "plain(a, w)" in repr(m.plain) and "plain" in repr(m)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def _compiled_inputs(tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, 8), (16, 8), (2, tokens, 16), (16,), (2, tokens)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend):
    """No graph break, right values and gradients, and two compilations for any number of sequence lengths."""
    torch._dynamo.reset()
    functions = (_function("residual_rms"), codalang.load(PROGRAM).scaled, codalang.load("swiglu").swiglu)

    def program(a, w, res, gamma, r):
        x, h, ss = functions[0](a * 2, w, res=res, gamma=gamma)
        y = functions[1](a, w, 0.5, r, gamma)
        z = functions[2].hosted(h)
        return (x * h).sum() + ss.sin().sum() + y.y.cos().sum() + y.total + (z * z).sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for tokens in (3, 4, 6, 9):
        values = _compiled_inputs(tokens)
        expected, result = program(*values), compiled(*values)
        assert _close(result, expected)
        ours, theirs = torch.autograd.grad(result, values), torch.autograd.grad(expected, values)
        assert all(_close(o, t) for o, t in zip(ours, theirs, strict=True))
    assert counter.frame_count <= 2


def test_torch_compile_as_the_first_call(monkeypatch):
    """Nothing that an eager call would have prepared is left to be traced, the printing of the program for instance."""
    torch._dynamo.reset()
    text = "epilogue first(acc: tile[M, N]) {\nlet (u, v) = split(acc)\nstore y: tile[M, N/2] = tanh(u) * v\n}"
    f = codalang.load(text).first
    monkeypatch.setattr("codalang.torch.module.print_epilogue", None)
    a, w = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(a, w)
    ours, expected = (torch.autograd.grad(y.sum(), (a, w)) for y in (compiled, f(a, w)))
    assert all(torch.equal(o, e) for o, e in zip(ours, expected, strict=True))


def test_torch_compile_reports_a_wrong_call(m):
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, w: m.plain(a, w), backend="eager")
    with pytest.raises(Exception, match="so K = 4, but `w`"):
        compiled(torch.randn(3, 4), torch.randn(6, 5))


def test_torch_compile_without_gradients_saves_nothing():
    torch._dynamo.reset()
    texts = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def look(graph, inputs):
            texts.extend(n.args[0] for n in graph.graph.nodes if n.target is torch.ops.codalang.run_program.default)
            return graph.forward

        return aot_autograd(fw_compiler=look)(graph, inputs)

    swiglu = codalang.load("swiglu").swiglu
    compiled = torch.compile(swiglu, backend=backend, fullgraph=True)
    a, w = torch.randn(3, 4), torch.randn(6, 4)
    assert torch.equal(compiled(a, w), swiglu(a, w))
    assert len(texts) == 1 and "saved" not in texts[0]
    assert texts[0].startswith(
        swiglu.source.replace("\n", "\\n")
    )  # a traced graph holds the epilogue itself, in one line


def test_torch_export():
    """What is exported holds the program, takes any number of tokens, and survives being saved."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(16, 8))
            self.activation = codalang.load("swiglu").swiglu

        def forward(self, x):
            return self.activation(x, self.w)

    layer, x = Layer(), torch.randn(2, 3, 8)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("tokens")}})
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    for longer in (x, torch.randn(2, 5, 8)):
        assert torch.equal(torch.export.load(buffer).module()(longer), layer(longer))
        buffer.seek(0)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_torch_compile_of_any_number_of_rows(dynamic):
    """One row and none, too, where sizes are symbols."""
    torch._dynamo.reset()
    f = codalang.load("epilogue f(acc: tile[M, N], r: col[M]) { store y: tile[M, N] = acc * r }").f
    compiled = torch.compile(f, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    w = torch.randn(6, 4, requires_grad=True)
    for rows in (3, 5, 1, 0):
        a, r = torch.randn(rows, 4), torch.randn(rows)
        found, expected = (g(a, w, r) for g in (compiled, f))
        assert torch.equal(found, expected)
        ours, theirs = (torch.autograd.grad(y.sin().sum(), w)[0] for y in (found, expected))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_of_what_no_argument_determines(backend):
    torch._dynamo.reset()
    f = codalang.load("epilogue f(s: scalar, r: col[M]) { store y: tile[M, N] = s * r\nreduce n: col[M] = sum(s) }").f
    compiled = torch.compile(lambda s, r: f.hosted(s, r, extents=(r.shape[0], 4)), backend=backend, fullgraph=True)
    for rows in (3, 5):
        s, r = torch.randn((), requires_grad=True), torch.randn(rows, requires_grad=True)
        found, expected = compiled(s, r), f.hosted(s, r, extents=(rows, 4))
        assert torch.equal(found.y, (s * r)[:, None].expand(rows, 4)) and torch.equal(found.n, expected.n)
        ours, theirs = (torch.autograd.grad(x.y.sum() + x.n.sin().sum(), (s, r)) for x in (found, expected))
        assert all(torch.equal(o, t) for o, t in zip(ours, theirs, strict=True))


def test_a_backward_that_computes_nothing():
    """All gradients are zero: it can be shown, called and pickled like any other."""
    f = codalang.load("epilogue f(acc: tile[M, N], r: col[M]) { store y: tile[M, N] = stop_gradient(acc) }").f
    backward = f.backward
    assert "f_backward" in repr(backward) and backward.source.startswith("# `f_backward` computes nothing")
    assert len(backward.hosted()) == 0
    assert pickle.loads(pickle.dumps(backward)).source == backward.source


@pytest.mark.parametrize(
    "extents", [(3, -2), (-1, 3), (3, "a"), (3, 2.5), 3, (5, 10**30), (5, 10**5000), (5, True), (5,), "ab", {5: 1}, ()]
)
def test_extents_are_two_sizes(extents):
    f = codalang.load("epilogue f(r: col[M]) { store y: tile[M, N] = r * r }").f
    with pytest.raises(CodaCallError, match="two integers") as caught:
        f.hosted(torch.ones(5), extents=extents)
    assert caught.value.argument == "extents" and len(str(caught.value)) < 300
    assert f.hosted(torch.ones(5), extents=[5, 2]).shape == (5, 2)


@pytest.mark.parametrize(("rows", "columns"), [(5, 0), (0, 4), (0, 0), (5, 4)])
def test_stored_vectors_have_gradients_where_the_other_axis_is_empty(rows, columns):
    """Of the first two orders, beside outputs that have no elements."""
    f = codalang.load(
        "epilogue f(acc: tile[M, N], r: col[M], g: row[N], s: scalar) {\n    store y: tile[M, N] = acc * r * g\n"
        "    store c: col[M] = exp(r) * s\n    store w: row[N] = g * g * g * s\n    store z: scalar = s * s * s\n"
        "    reduce total: col[M] = sum(acc * r)\n}\n"
    ).f
    shapes = ((rows, columns), (rows,), (columns,), ())
    mine = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def plain(acc, r, g, s):
        return acc * r[:, None] * g, r.exp() * s, g**3 * s, s**3, (acc * r[:, None]).sum(1)

    found = []
    for outputs in (f.hosted(*mine), plain(*mine)):
        loss = sum(o.sum() for o in outputs)
        first = torch.autograd.grad(loss, mine, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.sum() for g in first[1:]), mine[1:], materialize_grads=True)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cap", [10**400, -(10**400), 10**5000], ids=["large", "negative", "huge"])
def test_a_number_that_is_no_float_is_refused(cap):
    with pytest.raises(CodaCallError, match="a number, got the int") as caught:
        codalang.load("softcap").softcap(torch.ones(3, 4), torch.ones(5, 4), cap)
    assert caught.value.argument == "cap" and len(caught.value.message) < 200


@pytest.mark.parametrize("name", [0, None, slice(1)])
def test_epilogues_are_asked_for_by_name(name):
    with pytest.raises(CodaCallError, match="by its name, a str, got .*; it defines swiglu"):
        codalang.load("swiglu")[name]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    f = codalang.load("softcap").softcap
    for call, argument in ((lambda: f(nested, torch.ones(5, 4), 1.0), "a"), (lambda: f.hosted(nested, 1.0), "acc")):
        with pytest.raises(CodaCallError, match="got a nested tensor") as caught:
            call()
        assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["amax", "lambda"])
def test_several_results_can_be_pickled(name):
    text = (
        f"epilogue {name}(acc: tile[M, N]) {{\n    store class: tile[M, N] = acc\n    reduce m: col[M] = max(acc)\n}}\n"
    )
    results = codalang.load(text)[name](torch.rand(3, 4), torch.rand(5, 4))
    for again in (pickle.loads(pickle.dumps(results)), copy.deepcopy(results)):
        assert type(again) is type(results) and again.m.equal(results.m) and again[0].equal(results[0])


def test_results_are_read_in_another_process():
    results = codalang.load("residual_rms").residual_rms.hosted(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))
    command = "import pickle, sys; print(pickle.load(sys.stdin.buffer)._fields)"
    done = subprocess.run([sys.executable, "-c", command], input=pickle.dumps(results), capture_output=True, cwd=ROOT)
    assert done.stdout.decode().strip() == str(results._fields), done.stderr.decode()


def test_parameters_called_self_and_extents():
    text = "epilogue f(acc: tile[M, N], self: row[N], extents: scalar) { store y: tile[M, N] = acc * self + extents }"
    f = codalang.load(text).f
    acc, row, number = torch.randn(3, 4), torch.randn(4), torch.tensor(2.0)
    expected = acc * row + 2
    assert torch.equal(f.hosted(acc=acc, self=row, extents=number), expected)
    assert torch.equal(f.hosted(acc, row, extents=2.0), expected)
    assert torch.equal(f.hosted(acc, row, 2.0, extents=(3, 4)), expected)
    assert torch.equal(f(acc, torch.eye(4), self=row, extents=2.0), expected)
