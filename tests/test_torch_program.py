"""Programs as torch functions: calls and their errors, gradients of any order, memory, what torch does around them."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from effort import examples
from emulation import emulated
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import TIED, cotangents_for, inputs_for, programs
from strategies import JUMPS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import codalang
from codalang.errors import CodaCallError, CodaError, CodaUnsupportedError
from codalang.ir import program_reference
from codalang.ir.epilogue import Reduce
from codalang.ir.program import Program
from codalang.lower import call, results
from codalang.torch import execute, program_plan, program_planner, program_step
from codalang.torch.opaque import one_line
from codalang.torch.program import ProgramFunction

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

LAYERS = """
epilogue gated(acc: tile[M, N], r: col[M], b: row[N], s: scalar) {
    let (u, v) = split(acc * r + b)
    store y: tile[M, N/2] = tanh(u) * v * s
}
epilogue plus(acc: tile[M, N], t: tile[M, N], g: row[N]) {
    let x = acc + t
    store x: tile[M, N]
    store h: tile[M, N] = x * g
    reduce ss: col[M] = sum(x * x)
}
"""

# Every sort of statement, host and argument; a value read by several matmuls; a result that is a parameter.
TEXT = (
    LAYERS
    + """epilogue norm(x: tile[M, N], mean: col[M]) { store y: tile[M, N] = sigmoid(x - mean) }
epilogue picked(acc: tile[M, N], target: col[M]: i64) {
    state lse: col[M] = online_logsumexp(acc)
    reduce at: col[M] = sum(where(col_index() == target, acc, 0))
}
epilogue total(acc: tile[M, N]) { reduce n: scalar = sum(acc * acc) }
epilogue best(acc: tile[M, N]) {
    store y: tile[M, N] = acc
    state (top, place): col[M] = argmax(acc, col_index())
}

program block(
    y: [T, H], x: [T, D], w0: [D, H], w1: [2, F, D], w2: [D, F], g: [D], b: [2, F], s: scalar = 0.5, eps: scalar = 0.1
) {
    (x1, h1, ss1) = plus(y @ w0.T, t = x, g = g)
    r1 = rsqrt(ss1 / D + eps)
    a = gated(h1 @ w1.T, r = r1, b = b, s = s)
    (x2, h2, ss2) = plus(a @ w2.T, t = x1, g = g)
    m2 = sqrt(ss2 / D)
    z = norm(x2, mean = m2)
    q = z @ w0
    return (x2, q, r1)
}
program loss(h: [T, D], w: [V, D], target: [T]: i64, weight: [T]) {
    (lse, at) = picked(h @ w.T, target = target)
    losses = where(target >= 0, lse - at, 0) * weight
    mean = sum(losses) / sum(where(target >= 0, 1, 0))
    return (losses, mean)
}
program passes(x: [T, D], w: [D, D], unused: [D]) {
    q = x @ w.T
    n = total(q @ w)
    return (x, q, n)
}
program stopped(x: [T, D], w: [D, D]) {
    q = x @ w.T
    y = detached(q @ w, t = q)
    return y
}
epilogue detached(acc: tile[M, N], t: tile[M, N]) { store y: tile[M, N] = stop_gradient(acc * t) }
program rows(x: [T, K], w: [N, K]) {
    (y, top, place) = best(x @ w.T)
    return (y, top, place)
}
program batched(x: [B, S, D], w: [E, D]) {
    y = x @ w.T
    return y
}
program widths(x: [T, D], w: [D, D], v: [D]) {
    (y, h, ss) = plus(x @ w.T, t = x, g = v)
    return (y, h, ss)
}
program outer(x: [T, D], w: [D, D]) {
    q = x.T @ x
    p = q @ w
    return p
}
"""
)

D, F, H, V = 8, 6, 4, 7


@pytest.fixture(scope="module")
def m():
    return codalang.load(TEXT)


def values(
    name: str, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = (5,), grad: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Random arguments of a program by name; floats require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    def target() -> Tensor:
        return torch.randint(0, V, lead, generator=generator)

    made: dict[str, Callable[[], dict[str, Tensor]]] = {
        "block": lambda: {
            "y": normal(*lead, H),
            "x": normal(*lead, D),
            "w0": normal(D, H),
            "w1": normal(2, F, D),
            "w2": normal(D, F),
            "g": normal(D),
            "b": normal(2, F),
            "s": normal(),
        },
        "loss": lambda: {"h": normal(*lead, D), "w": normal(V, D), "target": target(), "weight": normal(*lead)},
        "passes": lambda: {"x": normal(*lead, D), "w": normal(D, D), "unused": normal(D)},
        "stopped": lambda: {"x": normal(*lead, D), "w": normal(D, D)},
        "rows": lambda: {"x": normal(*lead, D), "w": normal(V, D)},
        "widths": lambda: {"x": normal(*lead, D), "w": normal(D, D), "v": normal(D)},
        "outer": lambda: {"x": normal(*lead, D), "w": normal(D, D)},
    }
    return made[name]()


NAMES = ("block", "loss", "passes", "stopped", "rows", "widths", "outer")


def results_of(made: object) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def by_torch(function: ProgramFunction, given: dict[str, Tensor]) -> list[Tensor]:
    """The same program by the reference interpreter alone, which torch differentiates; batch dimensions joined."""
    flat = {}
    for param in function.program.params:
        if param.name in given:
            value = given[param.name]
            extra = value.dim() - len(param.type.shape)
            flat[param.name] = value.flatten(0, extra) if extra > 0 else value
    return list(program_reference.run(function.program, flat, dtype=torch.float64).values())


def close(ours: Tensor, expected: Tensor, bound: float = 1e-12) -> bool:
    distance = (ours.double().reshape(expected.shape) - expected.double()).norm().item()
    return distance <= bound * max(expected.double().norm().item(), 1e-300)


def cotangents(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]


def gradients(outputs: list[Tensor], wanted: list[Tensor], given: list[Tensor], **options: bool) -> list[Tensor]:
    """Zeros where torch sees no connection."""
    pairs = [(o, c) for o, c in zip(outputs, given, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(w) for w in wanted]
    ours, theirs = zip(*pairs, strict=True)
    theirs = [c.reshape(o.shape) for o, c in zip(ours, theirs, strict=True)]
    found = torch.autograd.grad(ours, wanted, theirs, allow_unused=True, materialize_grads=True, **options)
    return list(found)


def floats(given: dict[str, Tensor]) -> list[Tensor]:
    return [v for v in given.values() if v.is_floating_point()]


def counted(job: object) -> tuple[str, bool]:
    return job.epilogue.name, job.on_gemm


@contextmanager
def recorded() -> Iterator[list[tuple[object, list[object], dict[str, Tensor]]]]:
    """The jobs that programs run within, with their arguments and the buffers that they write."""
    ran: list[tuple[object, list[object], dict[str, Tensor]]] = []
    real = program_step.execute

    def record(job, given, out=None):
        ran.append((job, list(given), dict(out or {})))
        return real(job, given, out)

    program_step.execute = record
    try:
        yield ran
    finally:
        program_step.execute = real


# ---- results and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(m, name):
    given = values(name)
    function = m[name]
    ours, theirs = results_of(function(**given)), by_torch(function, given)
    assert all(close(o, t) and o.is_contiguous() for o, t in zip(ours, theirs, strict=True))
    some = cotangents(ours)
    found, wanted = gradients(ours, floats(given), some), gradients(theirs, floats(given), some)
    for value, one, two in zip(floats(given), found, wanted, strict=True):
        assert one.shape == value.shape and one.dtype is value.dtype and close(one, two)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients(m, name):
    """To the third order, by a chain of scalars that depends on everything."""
    given = values(name)

    def third(outputs: list[Tensor]) -> list[Tensor]:
        wanted = floats(given)
        found = gradients(outputs, wanted, cotangents(outputs), create_graph=True)
        made = []
        for order in range(2):
            terms = [(g.reshape(-1) * torch.arange(1.0 + order, 1 + order + g.numel()).sin()).sum() for g in found]
            terms = [t for t in terms if t.requires_grad]
            if not terms:
                break
            found = list(
                torch.autograd.grad(sum(terms), wanted, create_graph=True, allow_unused=True, materialize_grads=True)
            )
            made += found
        return made

    ours, theirs = third(results_of(m[name](**given))), third(by_torch(m[name], given))
    assert all(close(o, t, 1e-10) for o, t in zip(ours, theirs, strict=False))
    assert all(not o.any() for o in ours[len(theirs) :])


@pytest.mark.parametrize("name", ["block", "loss", "passes", "rows", "widths"])
def test_each_cotangent_alone(m, name):
    """The others missing: no zeros are made of them, and the gradients are right."""
    given = values(name)
    function = m[name]
    theirs = by_torch(function, given)
    for index, expected in enumerate(theirs):
        ours = results_of(function(**given))[index]
        assert ours.requires_grad == expected.requires_grad or name == "rows"
        if expected.requires_grad:
            cotangent = cotangents([ours])
            found = gradients([ours], floats(given), cotangent)
            wanted = gradients([expected], floats(given), cotangent, retain_graph=True)
            assert all(close(o, t) for o, t in zip(found, wanted, strict=True))


def test_subsets_of_gradients(m):
    given = values("block")
    expected = by_torch(m.block, given)
    some = cotangents(expected)
    wanted = dict(zip(given, gradients(expected, list(given.values()), some), strict=True))
    for names in (["x"], ["w1"], ["s", "b"], ["y", "w0", "g"], ["w2", "x"]):
        made = results_of(m.block(**given))
        found = gradients(made, [given[n] for n in names], some)
        assert all(close(o, wanted[n]) for o, n in zip(found, names, strict=True))
        frozen = {n: v if n in names else v.detach() for n, v in given.items()}
        made = results_of(m.block(**frozen))
        found = gradients(made, [given[n] for n in names], some)
        assert all(close(o, wanted[n]) for o, n in zip(found, names, strict=True))


def test_frozen_weights_cost_no_work(m):
    """A GEMM for the gradient of a weight is run where it is wanted, and nothing of it is kept where it is not."""
    given = values("block")

    def backward(frozen: tuple[str, ...]) -> tuple[int, int]:
        leaves = {n: v.detach().requires_grad_(n not in frozen) for n, v in given.items()}
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            made = results_of(m.block(**leaves))
        with recorded() as ran:
            torch.autograd.backward(made, cotangents(made))
        assert all((leaves[n].grad is None) == (n in frozen) for n in leaves)
        return sum(job.on_gemm for job, _, _ in ran), sum(kept)

    everything, kept = backward(())
    without, less = backward(("w0", "w1", "w2"))
    assert everything - without == 4  # w0 is read by two matmuls
    assert less < kept
    only_weights, _ = backward(("y", "x", "g", "b", "s"))
    assert only_weights == everything - 1  # the gradient of y


def test_no_gradients_are_recorded_where_none_are_asked_for(m):
    given = values("block")
    with torch.no_grad():
        assert not any(o.requires_grad for o in m.block(**given))
    assert not any(o.requires_grad for o in m.block(**values("block", grad=False)))
    with torch.inference_mode():
        made = m.block(**given)
    assert all(torch.equal(o, t) for o, t in zip(made, m.block(**given), strict=True))


def _near(ours: Tensor | None, expected: Tensor, scale: float) -> bool:
    value = torch.zeros_like(expected) if ours is None else ours
    return value.shape == expected.shape and float((value - expected).abs().max()) <= scale if value.numel() else True


@examples(40)
@given(programs(without=TIED), st.integers(0, 2**31), st.data())
def test_random_programs(program: Program, seed: int, data: st.DataObject) -> None:
    """Results, gradients for any subset of the arguments from any subset of the results, twice, and those of gradients:
    as the reference has them."""
    function = ProgramFunction(program)
    inputs = inputs_for(program, seed)
    chosen = data.draw(st.sets(st.sampled_from([p.name for p in program.params])))
    inputs = {n: v.requires_grad_(n in chosen and v.is_floating_point()) for n, v in inputs.items()}
    expected = program_reference.run(program, inputs)
    found = dict(zip(program.results, results_of(function(**inputs)), strict=True))
    assert all(found[n].is_contiguous() for n in expected)
    # Not equal: constants are folded, where libraries differ in the last bit.
    torch.testing.assert_close([found[n] for n in expected], list(expected.values()), rtol=1e-12, atol=1e-12)
    leaves = [v for v in inputs.values() if v.requires_grad]
    given_ = cotangents_for(expected, seed)
    present = [n for n in data.draw(st.sets(st.sampled_from(program.results))) if expected[n].requires_grad]
    if not leaves or not present:
        return

    def first(made: dict[str, Tensor], **options: bool) -> list[Tensor | None]:
        outputs, cotangents_ = [made[n] for n in present], [given_[n] for n in present]
        return list(torch.autograd.grad(outputs, leaves, cotangents_, allow_unused=True, **options))

    wanted = first(expected, create_graph=True)
    largest = max((float(w.detach().abs().max()) for w in wanted if w is not None and w.numel()), default=0.0)
    for options in ({"retain_graph": True}, {"create_graph": True}, {}):
        ours = first(found, **options)
        for one, two, leaf in zip(ours, wanted, leaves, strict=True):
            assert _near(one, torch.zeros_like(leaf) if two is None else two, 1e-9 * largest)
        for value in (v for v in ours if v is not None):
            assert value.is_contiguous()


@examples(6)
@given(programs(without=JUMPS), st.integers(0, 2**31))
def test_random_programs_on_kernels(program: Program, seed: int) -> None:
    """By what stands in for kernels, in f64, from poisoned buffers: bf16 results are those of the reference.

    Its f32 differs by 1e-7, which rounds one value in ten thousand to its neighbour in bf16; where that value nearly
    cancels, results differ.  With other numbers they do not, where kernels are right.
    """
    differing = _unlike_on_kernels(program, seed)
    assert not differing or not _unlike_on_kernels(program, seed + 1), differing


def _unlike_on_kernels(program: Program, seed: int) -> list[str]:
    """The results and gradients that differ from the reference's, and by how much."""
    inputs = {
        n: v.to(torch.bfloat16).requires_grad_() if v.is_floating_point() else v
        for n, v in inputs_for(program, seed).items()
    }
    leaves = [v for v in inputs.values() if v.requires_grad]

    def run() -> list[Tensor]:
        function = ProgramFunction(program)
        found = []
        for _ in range(2):
            results = results_of(function(**inputs))
            floats_ = [r for r in results if r.requires_grad]
            found = [r.detach() for r in results]
            if floats_:
                some = [torch.ones_like(r) for r in floats_]
                found += torch.autograd.grad(floats_, leaves, some, allow_unused=True, materialize_grads=True)
        return found

    try:
        expected = run()
    except CodaCallError as error:  # a reduction, in f32, by a bf16 matrix
        assert "a matmul takes one dtype" in str(error)
        return []
    with on_kernels():
        found = run()
    largest = max((float(two.double().norm()) for two in expected if two.is_floating_point()), default=0.0)
    differing = []
    for place, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype is two.dtype and one.shape == two.shape
        if one.is_floating_point():
            error, size = float((one.double() - two.double()).norm()), float(two.double().norm())
            if not error <= 1e-2 * size + 1e-5 * max(1.0, largest):  # inputs are around 1: f32's 0 is 1e-6 of them
                differing.append(f"{place}: {error} of {size}, the largest is {largest}")
        else:
            assert torch.equal(one, two)
    return differing


NOTHING_READ = """
epilogue two(acc: tile[M, N]: i32) {
    store unused: tile[M, N] = float(acc)
    store y: tile[M, N] = 2
}
program length(x: [P, Q], i: [P, Q]: i32) {
    z = sqrt(P) * 1.0
    return z
}
program constant(x: [P, Q], i: [P, Q]: i32) {
    (_, y) = two(acc = i)
    return y
}
"""


@pytest.mark.parametrize("name", ["length", "constant"])
def test_what_reads_no_tensor_is_where_the_arguments_are(name):
    function = codalang.load(NOTHING_READ)[name]
    x, i = torch.ones(4, 8), torch.ones(4, 8, dtype=torch.int32)
    assert function(x.to("meta"), i.to("meta")).is_meta
    with on_kernels():
        found = function(x.bfloat16(), i)
    wanted = 2.0 if name == "length" else torch.full((4, 8), 2.0)
    assert torch.equal(found.float(), torch.as_tensor(wanted))


# ---- cotangents ------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda c: c,
    "transposed": lambda c: c.t().contiguous().t() if c.dim() == 2 else c,
    "a slice of something wider": lambda c: torch.cat((c, c), -1)[..., : c.shape[-1]],
    "stride 0": lambda c: c.reshape(-1)[:1].reshape([1] * c.dim()).expand(c.shape),
    "every other row": lambda c: torch.stack((c, c), 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("private", [True, False])
def test_cotangents_of_any_strides_are_only_read(m, case, private):
    given = values("block")
    ours = results_of(m.block(**given))
    some = [CASES[case](c) for c in cotangents(ours)]
    before = [c.clone() for c in some]
    inputs = {n: v.detach().clone() for n, v in given.items()}
    results = [o.detach().clone() for o in ours]
    found = gradients(ours, floats(given), some, retain_graph=not private)
    wanted = gradients(by_torch(m.block, given), floats(given), before)
    assert all(close(o, t) for o, t in zip(found, wanted, strict=True))
    assert all(torch.equal(c, b) for c, b in zip(some, before, strict=True))
    assert all(torch.equal(given[n], v) for n, v in inputs.items())
    assert all(torch.equal(o, r) for o, r in zip(ours, results, strict=True))


def test_one_cotangent_for_two_results(m):
    given = values("passes")
    ours = results_of(m.passes(**given))
    shared = torch.randn(5, D, dtype=torch.float64)
    before = shared.clone()
    found = torch.autograd.grad(ours[:2], [given["x"], given["w"]], [shared, shared])
    wanted = torch.autograd.grad(by_torch(m.passes, given)[:2], [given["x"], given["w"]], [before, before])
    assert all(close(o, t) for o, t in zip(found, wanted, strict=True)) and torch.equal(shared, before)


def test_backward_twice(m):
    given = values("block")
    ours = results_of(m.block(**given))
    some = cotangents(ours)
    first = gradients(ours, floats(given), some, retain_graph=True)
    second = gradients(ours, floats(given), some, retain_graph=True)
    last = gradients(ours, floats(given), some)
    for one, two, three in zip(first, second, last, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    with pytest.raises(RuntimeError, match="second time|freed"):
        gradients(ours, floats(given), some)


def test_twice_in_one_graph(m):
    """The output of one call is an input of the next, and all weights are shared."""
    given = values("widths")
    x2 = m.widths(**given).h
    ours = results_of(m.widths(**given | {"x": x2}))
    x2 = by_torch(m.widths, given)[1]
    theirs = by_torch(m.widths, given | {"x": x2})
    some = cotangents(ours)
    found, wanted = gradients(ours, floats(given), some), gradients(theirs, floats(given), some)
    assert all(close(o, t) for o, t in zip(found, wanted, strict=True))


def test_gradients_are_apart(m):
    """The gradient of each argument is memory of its own, but for cotangents that are handed on as they are."""
    given = {n: v.detach().requires_grad_() for n, v in values("block").items()}
    made = results_of(m.block(**given))
    torch.autograd.backward(made, cotangents(made))
    for value in given.values():
        value.grad.add_(1)
    before = {n: v.grad.clone() for n, v in given.items()}
    given["x"].grad.zero_()
    assert all(torch.equal(v.grad, before[n]) for n, v in given.items() if n != "x")


# ---- what arguments may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 3), (6,), (1,), (0,), (0, 3), ()])
def test_leading_dimensions(m, lead):
    given = values("block", lead=lead)
    if not lead:
        with pytest.raises(CodaCallError, match=r"`y` is declared \[T, H\], got shape \[4\]"):
            m.block(**given)
        return
    ours, theirs = results_of(m.block(**given)), by_torch(m.block, given)
    assert [tuple(o.shape) for o in ours] == [(*lead, D), (*lead, H), lead]
    assert all(close(o, t) and o.is_contiguous() for o, t in zip(ours, theirs, strict=True))
    some = cotangents(ours)
    found, wanted = gradients(ours, floats(given), some), gradients(theirs, floats(given), some)
    assert all(o.shape == v.shape and close(o, t) for o, t, v in zip(found, wanted, floats(given), strict=True))


def test_flat_vectors_beside_batch_dimensions(m):
    given = values("loss", lead=(2, 3))
    flat = given | {"target": given["target"].flatten(), "weight": given["weight"].flatten()}
    assert torch.equal(m.loss(**given).losses, m.loss(**flat).losses)
    assert m.loss(**given).losses.shape == (2, 3)


def test_declared_batch_dimensions(m):
    x, w = torch.randn(2, 3, D, requires_grad=True), torch.randn(5, D)
    y = m.batched(x, w)
    assert y.shape == (2, 3, 5) and close(y, x.double() @ w.double().T, 1e-6)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert close(found, w.sum(0).expand(2, 3, D), 1e-6)


def test_pairs_are_halves_of_what_checkpoints_hold(m):
    """F = 4 and distinct numbers: gate and up one after the other, their bias and their gradients, too."""
    given = values("block")
    w1, b = given["w1"], given["b"]
    made = m.block(**given).x2

    def plain(y, x, w0, w1, w2, g, b, s):
        x1 = x + y @ w0.T
        r = (x1.square().mean(-1, keepdim=True) + 0.1).rsqrt()
        acc = (x1 * g) @ w1.flatten(0, 1).T * r + b.flatten()
        u, v = acc.chunk(2, -1)
        return x1 + (torch.tanh(u) * v * s) @ w2.T

    expected = plain(**given)
    assert close(made, expected)
    cotangent = cotangents([made])
    found, wanted = gradients([made], [w1, b], cotangent), gradients([expected], [w1, b], cotangent)
    assert all(close(o, t) and o.is_contiguous() for o, t in zip(found, wanted, strict=True))


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed memory": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t,
    "a slice": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]] if t.dim() else t,
    "an odd offset": lambda t: torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[1:].view(t.shape),
    "stride 0": lambda t: t[:1].expand(t.shape) if t.dim() else t,
    "a column": lambda t: torch.stack((t, t), -1)[..., 0],
}


@pytest.mark.parametrize("how", ODD)
def test_arguments_in_any_memory(m, how):
    """After contiguous ones of the same shapes: nothing of their plan may be wrong for these."""
    plain = values("block", grad=False)
    m.block(**plain)
    odd = {n: ODD[how](v).requires_grad_() for n, v in plain.items()}
    ours, theirs = results_of(m.block(**odd)), by_torch(m.block, odd)
    assert all(close(o, t) for o, t in zip(ours, theirs, strict=True))
    some = cotangents(ours)
    found, wanted = gradients(ours, list(odd.values()), some), gradients(theirs, list(odd.values()), some)
    assert all(close(o, t) for o, t in zip(found, wanted, strict=True))


def test_scalars_as_numbers_tensors_and_defaults(m):
    given = values("block", grad=False)
    one = m.block(**given | {"s": 0.25})
    two = m.block(**given | {"s": torch.tensor(0.25, dtype=torch.float64)})
    assert all(torch.equal(o, t) for o, t in zip(one, two, strict=True))
    del given["s"]
    assert all(torch.equal(o, t) for o, t in zip(m.block(**given), m.block(**given, s=0.5, eps=0.1), strict=True))
    assert all(
        torch.equal(o, t) for o, t in zip(m.block(*given.values()), m.block(*given.values(), 0.5, 0.1), strict=True)
    )
    s = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    with recorded():
        (found,) = torch.autograd.grad(m.block(**given, s=s).x2.sum(), s)
    difference = (m.block(**given, s=0.25 + 1e-6).x2.sum() - m.block(**given, s=0.25 - 1e-6).x2.sum()) / 2e-6
    assert abs(float(found - difference)) < 1e-6 * abs(float(difference))


def test_results_that_are_arguments_are_copies(m):
    given = values("passes", grad=False)
    x = m.passes(**given).x
    assert torch.equal(x, given["x"]) and x.data_ptr() != given["x"].data_ptr()
    x.zero_()
    assert given["x"].any()


RETURNED = """
program returned(x: [T, D], s: scalar = 2, n: scalar: i32 = 3) {
    y = x @ x.T
    return (y, s, n)
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_that_are_numbers_are_tensors(dtype):
    function = codalang.load(RETURNED).returned
    x = torch.randn(3, D, dtype=dtype, requires_grad=True)
    for made, s in ((function(x), 2.0), (function(x, 0.5), 0.5), (function(x, s=1), 1.0)):
        assert made.s.dtype is dtype and made.s.shape == () and made.s == s
        assert made.n.dtype is torch.int32 and made.n == 3
        (found,) = torch.autograd.grad(made.y.sum(), x)
        assert close(found, 2 * x.sum(0).expand_as(x), 1e-5)
    given = torch.tensor(2.0, requires_grad=True)
    (found,) = torch.autograd.grad(function(x, given).s * 3, given)
    assert found == 3
    with pytest.raises(CodaCallError, match="`s` of `returned` must be a tensor scalar or a number, got str"):
        function(x, "2")
    alone = codalang.load("program p(s: scalar = 2) {\n return s\n}").p
    assert torch.equal(alone(), torch.tensor(2.0)) and torch.equal(alone(3), torch.tensor(3.0))


def test_another_default_device(m):
    """Numbers are made where the arguments are."""
    given = values("block") | {"s": 0.25}
    expected = results_of(m.block(**given))
    wanted = torch.autograd.grad(expected[0].sum(), given["x"])
    try:
        torch.set_default_device("meta")
        ours = results_of(m.block(**given))
        found = torch.autograd.grad(ours[0].sum(), given["x"])
        run = program_reference.run(m.block.program, {n: v for n, v in given.items() if n != "s"})
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(o, e) for o, e in zip((*ours, *found), (*expected, *wanted), strict=True))
    assert run["x2"].device.type == "cpu"


def test_results_may_be_written_into(m):
    """What was returned and then overwritten cannot be used by the backward in silence."""
    given = values("block")
    made = m.block(**given)
    made.r1.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        made.x2.sum().backward()


def test_arguments_of_no_float(m):
    given = values("loss")
    losses = m.loss(**given).losses
    assert losses.requires_grad
    made = m.rows(**values("rows"))
    assert made.place.dtype is torch.int32 and not made.place.requires_grad and made.top.requires_grad


def test_all_targets_ignored_is_what_torch_says(m):
    given = values("loss")
    given["target"] = torch.full_like(given["target"], -100)
    made = m.loss(**given)
    assert not made.losses.any() and math.isnan(made.mean)
    theirs = by_torch(m.loss, given)
    for ours, expected in ((made.losses, theirs[0]), (made.mean, theirs[1])):
        pairs = zip(
            *(torch.autograd.grad(o.sum(), floats(given), retain_graph=True) for o in (ours, expected)), strict=True
        )
        assert all(torch.allclose(o, t, equal_nan=True) for o, t in pairs)


# ---- dtypes ----------------------------------------------------------------------------------------------------------

LOW = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("matrices", LOW)
@pytest.mark.parametrize("vector", LOW)
def test_gradients_have_their_argument_s_dtype(m, matrices, vector):
    given = values("widths", matrices)
    given["v"] = given["v"].detach().to(vector).requires_grad_()
    ours = results_of(m.widths(**given))
    assert [o.dtype for o in ours] == [matrices, matrices, torch.float32]
    some = cotangents(ours)
    wide = {n: v.detach().double().requires_grad_() for n, v in given.items()}
    found = gradients(ours, floats(given), some)
    wanted = gradients(by_torch(m.widths, wide), floats(wide), [c.double() for c in some])
    precision = max(torch.finfo(matrices).eps, torch.finfo(vector).eps)
    for value, one, two in zip(floats(given), found, wanted, strict=True):
        assert one.dtype is value.dtype and close(one, two, 4 * precision)


def test_a_sum_is_rounded_once(m):
    """The gradient of a bf16 weight is within half a unit of the exact sum over many rows."""
    given = values("widths", torch.bfloat16, lead=(4096,))
    made = m.widths(**given).ss
    cotangent = torch.ones_like(made)
    (found,) = torch.autograd.grad(made, given["w"], cotangent)
    wide = {n: v.detach().double().requires_grad_() for n, v in given.items()}
    x1 = wide["x"] @ wide["w"].T + wide["x"]
    # what is stored of x1, and of its gradient, is in bf16
    (exact,) = torch.autograd.grad((x1 * x1).sum(), wide["w"])
    assert close(found, exact, 3e-3)


def test_operands_of_two_dtypes_are_refused(m):
    given = values("widths", torch.bfloat16)
    with pytest.raises(CodaCallError, match=r"`x @ w.T` of `widths` multiplies torch.bfloat16 with torch.float32"):
        m.widths(**given | {"w": given["w"].float()})


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast(m, lower):
    """Operands are cast as torch.matmul casts them; everything else stays; gradients are the arguments' own."""
    given = values("widths", torch.float32)
    with torch.autocast("cpu", lower):
        ours = results_of(m.widths(**given))
    assert ours[0].dtype is lower and ours[2].dtype is torch.float32
    rounded = {n: v.detach() for n, v in given.items()}
    acc = rounded["x"].to(lower).double() @ rounded["w"].to(lower).double().T
    expected = acc + rounded["x"].double()  # the residual is not cast
    eps = torch.finfo(lower).eps
    assert close(ours[0], expected, eps) and close(ours[2], expected.square().sum(1), 1e-5)
    found = gradients(ours, floats(given), [torch.ones_like(o) for o in ours])
    assert all(g.dtype is torch.float32 for g in found)
    wide = {n: v.detach().double().requires_grad_() for n, v in given.items()}
    theirs = by_torch(m.widths, wide)
    wanted = gradients(theirs, floats(wide), [torch.ones_like(o) for o in theirs])
    assert all(close(o, t, 8 * eps) for o, t in zip(found, wanted, strict=True))


def test_autocast_casts_what_a_program_makes(m):
    given = values("block", torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16), recorded() as ran:
        m.block(**given)
    operands = [v for job, args, _ in ran if job.on_gemm for v in args[:2]]
    dtypes = {(v if isinstance(v, Tensor) else v.tensor).dtype for v in operands}
    assert dtypes == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert m.block(**values("block", torch.float64)).x2.dtype is torch.float64
    assert m.block(**given).x2.dtype is torch.float32


SMALL_SCALES = """
import scaled

program normed(x: [T, D], w: [F, D], r: [T]) {
    y = scaled(x @ w.T, r = r)
    return y
}
"""


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_small_scales_of_rows(lower, autocast):
    """d_y * r is below the range of f16, d_y and x * r are not: f16 delays the scale, bf16 has no need to."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (256, 32), "w": (16, 32), "r": (256,), "d": (256, 16)}
    given = {n: torch.randn(s, generator=generator).to(lower) for n, s in shapes.items()}
    x, w, d = given["x"] * 1000, given["w"] / 32, given["d"] * 1e-4
    r = (given["r"].float().abs() + 1) / 1000
    expected = (d.double() * r.double()[:, None]).T @ x.double()
    if autocast:
        x, w = x.float(), w.float()
    x, w = x.requires_grad_(), w.requires_grad_()
    with torch.autocast("cpu", lower, enabled=autocast), recorded() as ran:
        y = codalang.load(SMALL_SCALES).normed(x, w, r)
        found_x, found = torch.autograd.grad(y, (x, w), d, create_graph=False)
    assert y.dtype is lower and found_x.dtype is x.dtype and found.dtype is w.dtype
    assert close(found, expected, torch.finfo(lower).eps)
    assert ("scale_rows" in {job.epilogue.name for job, _, _ in ran}) == (lower is torch.float16)


def test_a_single_epilogue_runs_the_derivative_that_is_printed_of_it_in_f16_too():
    module = codalang.load("scaled_rope")
    given = {"a": torch.randn(6, 8), "w": torch.randn(8, 8), "r": torch.rand(6)}
    given |= {"position": torch.arange(6), "frequency": torch.rand(4)}
    for dtype in (torch.bfloat16, torch.float16):
        a, w = (given[name].to(dtype).requires_grad_() for name in "aw")
        with recorded() as ran:
            y = module.scaled_rope(a, w, given["r"], given["position"], given["frequency"])
            torch.autograd.grad(y, (a, w), torch.ones_like(y))
        assert {job.epilogue.name for job, _, _ in ran} == {"scaled_rope", "scaled_rope_backward", "matmul"}, dtype


def test_second_derivatives_in_f16():
    """Those of a backward that delays scales."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, 8), "w": (4, 8), "r": (6,), "d": (6, 4)}
    exact = {n: torch.randn(s, generator=generator).half().double().requires_grad_() for n, s in shapes.items()}
    halves = {n: v.detach().half().requires_grad_() for n, v in exact.items()}
    function = codalang.load(SMALL_SCALES).normed
    seconds = []
    for v in (exact, halves):
        firsts = torch.autograd.grad(function(v["x"], v["w"], v["r"]), (v["x"], v["w"]), v["d"], create_graph=True)
        total = sum((f.double() * f.double().detach()).sum() for f in firsts)
        seconds.append(torch.autograd.grad(total, list(v.values())))
    for wanted, found in zip(*seconds, strict=True):
        assert found.dtype is torch.float16 and close(found, wanted, 8 * torch.finfo(torch.float16).eps)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _wrong(name: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, Tensor]], dict[str, object]]:
    return lambda given: given | {name: change(given[name])}


WRONG = {
    "a missing one": (lambda g: {n: v for n, v in g.items() if n != "w2"}, "w2", r"is missing `w2`: \[D, F\]"),
    "an unknown one": (lambda g: g | {"w3": 1}, "w3", "has no parameter `w3`"),
    "a near miss": (lambda g: {("w_1" if n == "w1" else n): v for n, v in g.items()}, "w_1", "did you mean `w1`"),
    "a number for a matrix": (_wrong("w1", lambda w: 3.0), "w1", r"must be a tensor \[2, F, D\], got float"),
    "a string for a scalar": (_wrong("s", lambda s: "1"), "s", "a tensor scalar or a number, got str"),
    "True for a number": (_wrong("s", lambda s: True), "s", "or a number, got bool"),
    "a dimension": (_wrong("w2", lambda w: w[:, :-1]), "w2", r"axis of 5 where `block` declares F, and F = 6 by `w1`"),
    "transposed": (_wrong("w2", lambda w: w.T), "w2", r"an axis of 6 (.|\n)*hint: `w2` is \[D, F\]: pass w2\.T"),
    "rows": (_wrong("x", lambda x: x[:-1]), "x", r"axis of 4 where `block` declares T, and T = 5 by `y`"),
    "batches of other rows": (
        _wrong("x", lambda x: torch.stack((x, x))),
        "x",
        r"`x` of shape \[2, 5, 8\], with its leading dimensions joined \[10, 8\], has an axis of 10 where `block`",
    ),
    "too few axes": (_wrong("w1", lambda w: w[0]), "w1", r"`w1` is declared \[2, F, D\], got shape \[6, 8\]"),
    "halves joined": (_wrong("w1", lambda w: w.flatten(0, 1)), "w1", r"got shape \[12, 8\](.|\n)*\.view\(2, F, D\)"),
    "a scalar of one element": (_wrong("s", lambda s: s[None]), "s", r"call \.reshape\(\(\)\)"),
    "too many axes": (_wrong("w1", lambda w: w[None]), "w1", r"`w1` is declared \[2, F, D\], got shape"),
    "three halves": (_wrong("w1", lambda w: torch.cat((w, w))[:3]), "w1", "an axis of 3 where `block` declares 2"),
    "a scalar with an axis": (_wrong("s", lambda s: s[None]), "s", "declared scalar, got shape"),
    "integers": (_wrong("g", lambda g: g.long()), "g", "must have one of the dtypes bfloat16"),
    "sparse": (_wrong("w0", lambda w: w.detach().to_sparse()), "w0", "must be a strided tensor"),
    "another device": (_wrong("w0", lambda w: w.to("meta")), "w0", "but `y` is on cpu(.|\n)*hint: .*one device"),
    "another dtype": (_wrong("w0", lambda w: w.float()), "w0", "takes one dtype(.|\n)*hint: cast one of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(m, case):
    change, argument, words = WRONG[case]
    with pytest.raises(CodaCallError, match=words) as caught:
        m.block(**change(values("block")))
    assert caught.value.argument == argument


def test_a_wrong_shape_shows_both_declarations(m):
    given = values("block")
    with pytest.raises(CodaCallError) as caught:
        m.block(**given | {"w0": given["w0"][:, 1:]})
    first, line, carets, note, *_ = str(caught.value).splitlines()
    assert first.endswith("`w0` of shape [8, 3] has an axis of 3 where `block` declares H, and H = 4 by `y`")
    assert line.partition("| ")[2][carets.index("^") - line.index("| ") - 2 :].startswith("w0: [D, H]")
    assert carets.count("^") == len("w0: [D, H]") and note.endswith("note: `y` is [T, H], here [5, 4]")


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_a_statistic_that_kept_its_dimension_is_no_batch(m, lead):
    given = values("loss", lead=lead)
    for name in ("weight", "target"):
        with pytest.raises(CodaCallError, match=f"`{name}` of `loss`(.|\n)*hint: .*call .squeeze\\(-1\\)") as caught:
            m.loss(**given | {name: given[name].unsqueeze(-1)})
        assert caught.value.argument == name
    flat = given | {"h": given["h"].reshape(-1, D), "weight": given["weight"].reshape(1, -1)}
    with pytest.raises(CodaCallError, match=r"`weight` of `loss` .* for T, but `h` has \[\d\] for T"):
        m.loss(**flat | {"target": given["target"].reshape(-1)})


def test_leading_dimensions_of_vectors_alone():
    scaled = codalang.load("program scaled(x: [T], w: [D, D]) {\n y = x * 2\n q = w @ w\n return (y, q)\n}").scaled
    x, w = torch.randn(2, 3), torch.randn(4, 4)
    assert torch.equal(scaled(x, w).y, x * 2)


SAMPLES = """
epilogue gated(acc: tile[M, N], gate: row[B, N]) { store y: tile[M, N] = acc * gate }
program samples(x: [T, D], w: [D, D], gate: [B, D]) {
    y = gated(x @ w.T, gate)
    return y
}
"""


def test_samples_are_leading_dimensions():
    function = codalang.load(SAMPLES).samples
    x, w = torch.randn(4, 2, 3, D), torch.randn(D, D)
    for count in (1, 4, 8):
        gate = torch.randn(count, D)
        expected = (x @ w.T).reshape(count, -1, D) * gate[:, None]
        assert close(function(x, w, gate), expected.reshape(x.shape), 1e-6)
    for count in (2, 3, 12):
        with pytest.raises(CodaCallError, match=rf"B = {count} samples, but the leading .* are \[4, 2, 3\]") as caught:
            function(x, w, torch.randn(count, D))
        assert caught.value.argument == "gate"
        assert function(x.flatten(0, 2), w, torch.randn(count, D)).shape == (24, D)


def test_a_parameter_called_self():
    text = "program p(self: [T, D], w: [D, D]) {\n y = self @ w.T\n return y\n}"
    x, w = torch.randn(3, D), torch.randn(D, D)
    assert close(codalang.load(text).p(self=x, w=w), x @ w.T, 1e-6)


def test_results_that_python_has_no_fields_for():
    text = "program p(x: [T, D], w: [D, D]) {\n class = x @ w\n _h = class @ w\n return (class, _h, x)\n}"
    x, w = torch.randn(3, D), torch.randn(D, D)
    made = codalang.load(text).p(x, w)
    assert made._fields == ("class_", "field_h", "x") and close(made.field_h, made.class_ @ w, 1e-6)
    assert pickle.loads(pickle.dumps(made))._fields == made._fields
    both = codalang.load(text.replace("_h", "class_")).p(x, w)
    assert both._fields == ("class__", "class_", "x") and close(both.class_, both.class__ @ w, 1e-6)


def test_too_many_arguments_and_one_twice(m):
    given = values("passes")
    with pytest.raises(CodaCallError, match="takes 3 arguments, got 4"):
        m.passes(*given.values(), 1)
    with pytest.raises(CodaCallError, match="got `x` twice"):
        m.passes(*given.values(), x=given["x"])


def test_batch_dimensions_that_disagree(m):
    given = values("block", lead=(2, 3))
    with pytest.raises(CodaCallError, match=r"leading dimensions \[3, 2\] for T, but `y` has \[2, 3\] for T"):
        m.block(**given | {"x": given["x"].view(3, 2, D)})
    with pytest.raises(CodaCallError, match="axis of 5 where `block` declares T"):
        m.block(**given | {"x": given["x"].flatten(0, 1)[:5]})
    with pytest.raises(CodaCallError, match=r"leading dimensions \[2, 4\] for D"):
        m.block(**given | {"w0": given["w0"].view(2, 4, H)})


def test_an_annotated_dtype(m):
    given = values("loss")
    with pytest.raises(CodaCallError, match=r"`target` of `loss` is declared i64 \(torch.int64\), got torch.int32"):
        m.loss(**given | {"target": given["target"].int()})


def test_transforms_are_refused(m):
    given = values("outer", grad=False)
    with pytest.raises(CodaUnsupportedError, match="torch.func"):
        torch.func.grad(lambda x: m.outer(x, given["w"]).sum())(given["x"])
    with pytest.raises(CodaUnsupportedError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        m.outer(torch.autograd.forward_ad.make_dual(given["x"], given["x"]), given["w"])


def test_an_unknown_program(m):
    with pytest.raises(CodaError, match="no_such"):
        _ = m.no_such


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_values_are_dropped_after_their_last_use(m):
    given = values("block", grad=False)
    alive: list[int] = []
    made: list[weakref.ref] = []
    real = program_step.execute

    def record(job, args, out=None):
        alive.append(sum(r() is not None for r in made))
        outputs = real(job, args, out)
        made.extend(weakref.ref(o) for o in outputs)
        return outputs

    program_step.execute = record
    try:
        results = m.block(**given)
    finally:
        program_step.execute = real
    left = {id(r()) for r in made if r() is not None}
    assert len(made) == 10 and len(left) == 3 and results is not None
    # x1, h1, ss1 | r1 instead of ss1 | a instead of h1 | x2, ss2 instead of a and x1 (h2 is dead at once) ...
    assert max(alive) <= 4


def test_what_was_saved_is_dropped_as_the_backward_uses_it(m):
    """Unless the graph is retained, nothing but the last step's values is there at the end."""
    given = values("block")
    made = results_of(m.block(**given))
    some = cotangents(made)
    left: dict[bool, int] = {}
    for retained in (True, False):
        seen: dict[int, weakref.ref] = {}
        real = program_step.execute

        def record(job, args, out=None, seen=seen, real=real):
            for value in args:
                if isinstance(value, Tensor):
                    seen.setdefault(value.untyped_storage().data_ptr(), weakref.ref(value))
            return real(job, args, out)

        program_step.execute = record
        counts: list[int] = []
        real_run = program_step.Step.run

        def run(self, slots, counts=counts, seen=seen, real_run=real_run):
            real_run(self, slots)
            counts.append(sum(r() is not None for r in seen.values()))

        program_step.Step.run = run
        try:
            gradients(made, floats(given), some, retain_graph=retained)
        finally:
            program_step.execute, program_step.Step.run = real, real_run
        left[retained] = counts[-1]
    assert left[False] < left[True]


def test_saved_values_are_overwritten_only_where_nobody_else_has_them(m):
    given = values("block")

    def buffers(**options: bool) -> int:
        made = results_of(m.block(**given))
        with recorded() as ran:
            found = gradients(made, floats(given), cotangents(made), **options)
        theirs = by_torch(m.block, given)
        assert all(
            close(o, t) for o, t in zip(found, gradients(theirs, floats(given), cotangents(theirs)), strict=True)
        )
        return sum(
            any(isinstance(a, Tensor) and a.data_ptr() == o.data_ptr() for a in args)
            for _, args, out in ran
            for o in out.values()
        )

    private = buffers()
    kept = buffers(retain_graph=True)
    assert 0 < kept < private
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # somebody may hold them
        assert buffers() == kept


def test_the_gradient_of_a_weight_with_pairs_is_written_in_place(m):
    given = values("block")
    made = results_of(m.block(**given))
    with recorded() as ran:
        found = dict(zip(given, gradients(made, list(given.values()), cotangents(made)), strict=True))
    written = {o.untyped_storage().data_ptr() for _, _, out in ran for o in out.values()}
    assert found["w1"].untyped_storage().data_ptr() in written and found["w1"].is_contiguous()


def test_nothing_is_kept_after_the_backward(m):
    given = values("block")
    given |= {name: given[name].detach() for name in ("y", "x", "b")}  # leaves with gradients stay with their nodes
    refs = [weakref.ref(given[name]) for name in ("y", "x", "b")]
    made = m.block(**given).x2.sum()
    made.backward()
    del given
    assert made.grad_fn is not None and not any(r() is not None for r in refs)


# ---- kernels, by what stands in for them -----------------------------------------------------------------------------


@contextmanager
def merges_apart(monkeypatch) -> Iterator[list[str]]:
    """Within it, the sums, maxima and minima that are merged by a launch of their own."""
    seen: list[str] = []
    merge_spec = results.merge_spec

    def noted(output, precise):
        if isinstance(output, Reduce):
            seen.append(output.name)
        return merge_spec(output, precise)

    with monkeypatch.context() as patch:
        patch.setattr(results, "merge_spec", noted)
        yield seen


@contextmanager
def on_kernels() -> Iterator[list[object]]:
    """Calls go through `codalang.lower.run`, as on a Hopper GPU."""

    def takes(job, given, device):
        operands = [getattr(v, "tensor", v) for v in given[:2]] if job.on_gemm else []
        return all(t.dtype in (torch.bfloat16, torch.float16) for t in operands)

    with pytest.MonkeyPatch.context() as patch, emulated() as specs:
        patch.setattr(execute, "_takes_kernel", takes)
        patch.setattr(program_plan, "launches_repeat", lambda device: True)
        patch.setattr(execute, "current_device", lambda: None)
        yield specs


def test_kernels_do_what_the_reference_does(m, monkeypatch):
    """Folded weights, gradients in place, buffers overwritten; launches repeated on other addresses and other forms."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    shapes = {"y": (64, 16), "x": (64, 32), "w0": (32, 16), "w1": (2, 64, 32), "w2": (32, 64), "g": (32,), "b": (2, 64)}
    expected: list[list[Tensor]] = []
    calls = []
    for kind in ("plain", "other addresses", "other strides", "plain"):
        given = {n: normal(*shape) / 4 for n, shape in shapes.items()}
        if kind == "other strides":
            given |= {n: torch.cat((given[n], given[n]), -1)[..., : given[n].shape[-1]] for n in ("x", "w2")}
        calls.append({n: v.requires_grad_() for n, v in given.items()})

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        made = results_of(m.block(**given))
        some = cotangents(made)
        return [*(o.detach() for o in made), *gradients(made, floats(given), some)]

    expected = [run(given) for given in calls]
    function = ProgramFunction(m.block.program)
    monkeypatch.setattr(m, "block", function)
    with on_kernels() as specs:
        found = [run(given) for given in calls]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(close(o, t, 2e-2) and o.dtype is t.dtype for o, t in zip(ours, theirs, strict=True))
        assert all(close(o, t, 4e-3) for o, t in zip(ours[:2], theirs[:2], strict=True))
    assert any(spec.operand and spec.operand.b_folding.rows for spec in specs)
    assert {spec.parts for spec in specs if spec.parts is not None} >= {("sum", "", ""), ("sum", "")}
    (tape,) = next(iter(function._calls._found.values()))[1]._tapes.values()
    assert len(tape.plan._repeated) == 2
    assert "execute" not in next(iter(tape.plan._repeated.values())).__doc__  # all are launches
    backward = next(iter(tape._steps.values())).plan(True)
    assert len(backward._repeated) == 2


CHAIN = """
epilogue both(acc: tile[M, N]) {
    store y: tile[M, N] = acc
    reduce most: col[M] = max(acc)
    reduce least: row[N] = min(acc)
    reduce s: col[M] = sum(acc)
}
epilogue scaled(acc: tile[M, N], r: col[M]) { store y: tile[M, N] = acc * r }
program chain(x: [T, D], w: [E, D], v: [E, E], c: [T]) {
    (y, most, least, s) = both(x @ w.T)
    a = most * 2 + c
    b = a * a - s
    d = exp(least) + 1
    e = d * d
    z = scaled(y @ v.T, r = s)
    total = sum(b)
    return (z, b, s, e, total)
}
"""


def test_auxiliary_steps_become_one_and_merge_what_reductions_leave(monkeypatch):
    """Two launches for four steps and three reductions; `s`, which others read, is stored by what merges it."""
    function = codalang.load(CHAIN).chain
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (200, 64), "w": (384, 64), "v": (384, 384), "c": (200,)}
    given = {n: torch.randn(s, generator=generator).to(torch.bfloat16) / 8 for n, s in shapes.items()}
    given["c"] = given["c"].float()
    expected = function(**given)
    exact = [o for o in by_torch(function, {n: v.double() for n, v in given.items()})]
    with recorded() as ran:
        function(**given)
    steps = [(job.epilogue.name, len(job.epilogue.outputs), dict(job.parts or {}), job.unmerged) for job, _, _ in ran]
    assert steps == [
        ("both", 4, {}, ("most", "s", "least")),
        ("vector", 2, {"x0": "max", "x2": "sum"}, ()),
        ("vector", 1, {"x0": "min"}, ()),
        ("scaled", 1, {}, ()),
        ("vector", 1, {}, ()),
    ]
    fresh = ProgramFunction(function.program)
    with merges_apart(monkeypatch) as apart, on_kernels() as specs:
        found = fresh(**given)
    assert not apart
    parts = [spec.parts for spec in specs if spec.parts is not None]
    assert sorted(parts) == sorted([("max", "", "sum"), ("min",)])
    for ours, theirs, truth in zip(found, expected, exact, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and close(ours, truth, 5e-3)
    for name in ("b", "s", "e"):
        assert close(getattr(found, name), exact[function.program.results.index(name)], 1e-5)


def test_a_block_is_its_matmuls_and_a_few_vector_kernels(monkeypatch):
    """Nothing is merged or cast by a launch of its own; both norms' gains get their gradients from one kernel."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"y": (300, 160), "x": (300, 320), "w_o": (320, 160), "g_mlp": (320,), "w_gate_up": (2, 96, 320)}
    shapes |= {"w_down": (320, 96), "g_attention": (320,), "w_qkv": (96, 320), "frequency": (48,)}
    given = {n: torch.randn(s, generator=generator).to(torch.bfloat16) / 8 for n, s in shapes.items()}
    given["frequency"] = given["frequency"].float()
    wanted = [v.requires_grad_() for n, v in given.items() if n != "frequency"]
    program = codalang.load(EXAMPLES / "llama_block.coda").llama_block_fused.program
    sent = [torch.randn(s, generator=generator).to(torch.bfloat16) for s in ((300, 320), (300, 96))]

    def run(function: ProgramFunction) -> tuple[list[Tensor], list[Tensor]]:
        made = function(**given, positions=torch.arange(300))
        return [o.detach() for o in made], list(torch.autograd.grad(made, wanted, sent))

    expected = run(ProgramFunction(program))
    kinds: list[str] = []
    launched = call.Call.run

    def noted(self, values, out):
        kinds.append("GEMM" if self.operands else "vector" if len(self.tail) == 1 else "hosted")
        return launched(self, values, out)

    monkeypatch.setattr(call.Call, "run", noted)
    with merges_apart(monkeypatch) as apart, on_kernels() as specs:
        found = run(ProgramFunction(program))
    assert not apart
    assert kinds[:6] == ["GEMM", "vector", "GEMM", "GEMM", "vector", "GEMM"]
    assert sorted(kinds[6:]) == ["GEMM"] * 8 + ["hosted"] + ["vector"] * 3
    gains = [spec for spec in specs if spec.parts == ("sum", "sum")]
    assert [spec.vector_dtypes for spec in gains] == [("bf16", "bf16")]
    for ours, theirs in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and close(ours, theirs, 1e-2)


ROWS = """
epilogue rows(acc: tile[M, N], g: row[N]) {
    store y: tile[M, N] = acc * g
    reduce s: row[N] = sum(acc)
    reduce most: row[N] = max(acc)
    reduce c: col[M] = min(acc)
}
program many(x: [T, D], w: [D, D], v: [E, D], g: [D]) {
    (y, s0, m0, c0) = rows(x @ w.T, g = g)
    (y1, s1, m1, c1) = rows(y @ w.T, g = g)
    (y2, s2, m2, c2) = rows(y1 @ w.T, g = g)
    (y3, s3, m3, c3) = rows(y2 @ w.T, g = s0)
    (z, s4, m4, c4) = rows(y3 @ v.T, g = 1)
    return (z, s1, m0, m1, c0, s2, m2, c1, c2, s3, m3, c3, s4, m4)
}
"""


def test_reductions_that_are_results_are_merged_together(monkeypatch):
    """Those of a length, up to eight; what else is read is merged by itself."""
    text = ROWS.replace("g = 1)", "g = h)").replace("g: [D])", "g: [D], h: [E])")
    program = codalang.load(text).many.program
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (300, 64), "w": (64, 64), "v": (96, 64), "g": (64,), "h": (96,)}
    given = {n: torch.randn(s, generator=generator).to(torch.bfloat16) / 4 for n, s in shapes.items()}
    expected = ProgramFunction(program)(**given)
    with merges_apart(monkeypatch) as apart, on_kernels() as specs:
        found = ProgramFunction(program)(**given)
    assert len(apart) == 1  # s0, which the fourth reads
    merges = [spec.parts for spec in specs if spec.parts is not None]
    assert sum(map(len, merges)) == 13 and all(len(parts) <= program_planner.MOST_TOGETHER for parts in merges)
    assert len(merges) < 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and close(ours, theirs, 5e-3)


def test_steps_that_differ_in_names_are_one_kernel():
    block = codalang.load(EXAMPLES / "llama_block.coda").llama_block_fused
    shapes = {"y": (9, 8), "x": (9, 8), "w_o": (8, 8), "g_mlp": (8,), "w_gate_up": (2, 6, 8), "w_down": (8, 6)}
    shapes |= {"g_attention": (8,), "w_qkv": (12, 8), "frequency": (6,)}
    with recorded() as ran:
        block(**{n: torch.randn(s) for n, s in shapes.items()}, positions=torch.arange(9))
    steps = [job.epilogue for job, _, _ in ran if job.parts is not None]
    assert len(steps) == 2 and steps[0] is steps[1]


@pytest.mark.parametrize("how", ["sum", "max", "min"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
def test_a_vector_of_parts_and_a_whole_one(how, length):
    from codalang.lower import run

    expression = codalang.load(CHAIN).chain.program.statements[1].expression  # most * 2 + c
    parts, c = torch.randn(7, length) - 3, torch.randn(length)
    merged = {"sum": parts.sum(0), "max": parts.amax(0), "min": parts.amin(0)}[how]
    with emulated():
        for most in (parts, merged):
            (found,) = run.vector(expression, {"most": most, "c": c}, length, parts={"most": how}).values()
            assert found.shape == (length,) and close(found, merged * 2 + c, 1e-6)
        (found,) = run.vector(expression, {"most": merged, "c": c.bfloat16()}, length).values()
        assert close(found, merged * 2 + c.bfloat16(), 1e-6)
    with emulated(), pytest.raises(CodaCallError, match=r"parts \[parts, "):
        run.vector(expression, {"most": torch.zeros(2, length + 1), "c": c}, length, parts={"most": how})


def test_a_launch_is_not_repeated_where_the_reference_is_asked_for(m):
    given = values("widths", torch.bfloat16, lead=(16,), grad=False)
    with on_kernels():
        m.widths(**given)
    with recorded() as ran:
        m.widths(**given)
    assert len(ran) == 1


def test_what_is_repeated_is_the_call_that_was_made(m):
    """Of calls that differ in how tensors lie, in what requires a gradient and in what is recorded, in any order."""
    generator = torch.Generator().manual_seed(0)
    names = list(values("widths"))
    ways = list(itertools.product(("plain", "strides", "address"), ((), names[:1], names), (True, False)))
    calls = []
    for lie, wanted, recorded in random.Random(0).sample(ways * 4, 4 * len(ways)):
        given = {n: torch.randn(v.shape, generator=generator) / 4 for n, v in values("widths", lead=(16,)).items()}
        given = {n: v.bfloat16() for n, v in given.items()}
        if lie == "strides":
            given |= {n: given[n].t().contiguous().t() for n in ("x", "w")}
        if lie == "address":
            given = {n: torch.cat((v.new_zeros(1), v.flatten()))[1:].view(v.shape) for n, v in given.items()}
        calls.append(({n: v.requires_grad_(n in wanted) for n, v in given.items()}, wanted, recorded))

    def run(call: tuple[dict[str, Tensor], list[str], bool]) -> list[Tensor]:
        given, wanted, recorded = call
        with torch.set_grad_enabled(recorded):
            made = results_of(function(**given))
        assert all(o.requires_grad == (recorded and bool(wanted)) for o in made)
        found = gradients(made, [given[n] for n in wanted], cotangents(made)) if recorded and wanted else []
        return [*(o.detach() for o in made), *found]

    function = ProgramFunction(m.widths.program)
    expected = [run(call) for call in calls]
    with on_kernels():
        found = [run(call) for call in calls]
        assert len(function._calls._again) == len(ways)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(close(o, t, 2e-2) for o, t in zip(ours, theirs, strict=True))


def test_backwards_are_repeated_as_they_were_made(m):
    """Retained or not, with cotangents missing, for some of the gradients, and never in batches."""
    function = ProgramFunction(m.widths.program)
    ways = [
        (retained, out, wrt) for retained in (True, False) for out in (0, 1, None) for wrt in (["x", "w", "v"], ["w"])
    ]
    order = random.Random(0).sample(ways * 3, 3 * len(ways))

    def run(way: tuple[bool, int | None, list[str]]) -> list[Tensor]:
        retained, out, wrt = way
        given = values("widths", torch.bfloat16, lead=(16,))
        made = results_of(function(**given))
        some = made if out is None else [made[out]]
        asked = [given[n] for n in wrt]
        first = gradients(some, asked, cotangents(some), retain_graph=retained)
        return [*first, *(gradients(some, asked, cotangents(some)) if retained else ())]

    expected = {str(way): run(way) for way in ways}
    with on_kernels():
        found = [(way, run(way)) for way in order]
        tapes = [again.tape for again in function._calls._again.values()]
        assert (
            len(tapes) == 1 and len(tapes[0]._again) == 6
        )  # cotangents that are there; may what was saved be overwritten?
        given = values("widths", torch.bfloat16, lead=(16,))
        made = results_of(function(**given))
        batch = [torch.stack((c, c)) for c in cotangents(made)]
        with pytest.raises(CodaUnsupportedError, match="in a batch"):
            torch.autograd.grad(made, floats(given), batch, is_grads_batched=True)
    for way, ours in found:
        assert all(close(o, t, 2e-2) for o, t in zip(ours, expected[str(way)], strict=True))


def test_nothing_is_repeated_for_who_looks_at_each_step(m, monkeypatch):
    given, seen = values("widths", torch.bfloat16, lead=(16,), grad=False), []
    real = program_step.execute

    def noting(job, *arguments):
        seen.append(job)
        return real(job, *arguments)

    function = ProgramFunction(m.widths.program)
    monkeypatch.setattr(program_step, "execute", noting)
    with on_kernels():
        for _ in range(3):
            function(**given)
        assert function._calls._again and not seen
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program_plan, "launches_repeat", lambda device: not execute.stepwise)
            patch.setattr(execute, "stepwise", True)
            function(**given)
        assert seen


def test_launches_are_remembered_apart_where_kernels_overlap(m, monkeypatch):
    from codalang.lower import run

    given = values("widths", torch.bfloat16, lead=(16,), grad=False)
    function = ProgramFunction(m.widths.program)
    with on_kernels() as specs:
        for overlap in (False, True):
            before = len(specs)
            monkeypatch.setattr(run, "overlap", overlap)
            function(**given)
            function(**given)
            assert len(specs) > before and {spec.overlap for spec in specs[before:]} == {overlap}


# ---- orders of calls -------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once(m):
    function = ProgramFunction(m.block.program)
    for seed in range(3):
        made = results_of(function(**values("block", seed=seed)))
        gradients(made, floats(values("block", seed=seed)), cotangents(made))
    assert len(function._calls._found) == 1
    function(**values("block", lead=(6,)))
    function(**values("block", torch.float32))
    assert len(function._calls._found) == 3


def test_the_backward_as_a_function(m):
    function = m.mlp_backward if "mlp_backward" in m else m.block.backward
    assert isinstance(function, ProgramFunction) and function.name == "block_backward"
    again = codalang.load(function.source)
    assert again["block_backward"].program == function.program
    assert "program block(" in m.block.source
    derivative = m.block.derivative(wrt=["x"], cotangents=["x2"])
    assert list(derivative.gradients) == ["x"]
    with pytest.raises(CodaCallError):
        m.block.derivative(wrt=["nothing"])


def test_pickle_and_deepcopy(m):
    given = values("block")
    expected = m.block(**given)
    for other in (pickle.loads(pickle.dumps(m.block)), copy.deepcopy(m.block), pickle.loads(pickle.dumps(m)).block):
        assert all(torch.equal(o, t) for o, t in zip(other(**given), expected, strict=True))
    file = io.BytesIO()
    torch.save(expected, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again._fields == ("x2", "q", "r1") and torch.equal(again.q, expected.q)
    assert pickle.loads(pickle.dumps(m.block.backward)).program == m.block.backward.program


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(m, reentrant):
    given = values("block")
    ours = results_of(checkpoint(lambda *a: tuple(m.block(*a)), *given.values(), use_reentrant=reentrant))
    some = cotangents(ours)
    found = gradients(ours, floats(given), some) if not reentrant else None
    if reentrant:
        torch.autograd.backward(ours, some)
        found = [v.grad for v in floats(given)]
    wanted = gradients(results_of(m.block(**given)), floats(given), some)
    assert all(torch.equal(o, t) for o, t in zip(found, wanted, strict=True))


def test_saved_tensor_hooks_see_everything(m):
    """Packed as copies and unpacked again, e.g. offloaded: the same gradients."""
    given = values("block")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().share_memory_(), lambda t: t.clone()):
        ours = results_of(m.block(**given))
    some = cotangents(ours)
    found = gradients(ours, floats(given), some)
    wanted = gradients(results_of(m.block(**given)), floats(given), some)
    assert all(torch.equal(o, t) for o, t in zip(found, wanted, strict=True))


def test_an_argument_that_is_changed_before_its_second_derivative(m):
    given = values("widths")
    made = m.widths(**given).y
    with torch.no_grad():
        given["x"].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(made.sum(), given["w"], create_graph=True)


def test_repeats_bitwise(m):
    given = values("block", torch.bfloat16)
    one, two = results_of(m.block(**given)), results_of(m.block(**given))
    some = cotangents(one)
    pairs = zip([*one, *gradients(one, floats(given), some)], [*two, *gradients(two, floats(given), some)], strict=True)
    assert all(torch.equal(o, t) for o, t in pairs)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["block", "loss", "passes"])
def test_compiled_without_a_graph_break(m, name):
    given = values(name, torch.float32)
    compiled = torch.compile(lambda **named: tuple(m[name](**named)), fullgraph=True, backend="aot_eager")
    ours, theirs = results_of(compiled(**given)), results_of(m[name](**given))
    assert all(torch.equal(o, t) and o.stride() == t.stride() for o, t in zip(ours, theirs, strict=True))
    some = cotangents(ours)
    found, wanted = gradients(ours, floats(given), some), gradients(theirs, floats(given), some)
    assert all(torch.equal(o, t) for o, t in zip(found, wanted, strict=True))


def test_a_program_is_one_operator_in_a_compiled_graph(m):
    seen: list[list[str]] = []

    def backend(graph, _):
        seen.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    from torch._dynamo.backends.common import aot_autograd

    given = values("block", torch.float32)
    compiled = torch.compile(lambda *a: m.block(*a).x2, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    compiled(*given.values()).sum().backward()
    programs = [[t for t in targets if "codalang" in t] for targets in seen]
    assert programs == [["codalang.run_program.default"], ["codalang.run_program.default"]]


def test_one_compilation_for_all_sequence_lengths(m):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *a: m.block(*a).x2, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for rows in (5, 6, 9, 17):
        given = values("block", torch.float32, lead=(rows,))
        made = compiled(*given.values())
        expected = m.block(**given).x2
        assert torch.equal(made, expected)
        some = cotangents([made])
        pairs = zip(gradients([made], floats(given), some), gradients([expected], floats(given), some), strict=True)
        assert all(torch.equal(o, t) for o, t in pairs)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_compiled_with_batch_dimensions_and_autocast(m):
    given = values("block", torch.float32, lead=(2, 3))
    compiled = torch.compile(lambda *a: tuple(m.block(*a)), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(*given.values()), m.block(**given)
    assert all(torch.equal(o, t) and o.dtype is t.dtype for o, t in zip(ours, theirs, strict=True))
    some = cotangents(list(ours))
    pairs = zip(gradients(list(ours), floats(given), some), gradients(list(theirs), floats(given), some), strict=True)
    assert all(close(o, t, 2e-2) for o, t in pairs)


def test_wrong_calls_under_compile(m):
    given = values("block", torch.float32)
    compiled = torch.compile(lambda **named: m.block(**named).x2, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="declares F"):
        compiled(**given | {"w2": given["w2"][:, :-1]})


def test_traced_in_another_process_by_its_text(m):
    from codalang.torch import program_opaque

    text = program_opaque.text_of(m.block.program)
    assert "\n" not in text
    assert program_opaque.Texts().program(text) == m.block.program


# ---- examples --------------------------------------------------------------------------------------------------------


def test_the_llama_block_is_pytorch_s(m):
    """Grouped queries, RoPE at packed positions, checkpoint layouts; f64 against plain PyTorch."""
    block = codalang.load(EXAMPLES / "llama_block.coda").llama_block
    t, q, kv, p, d, f = 6, 2, 1, 2, 8, 6
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    frequency = torch.tensor([1.0, 0.1], dtype=torch.float64)
    given = {
        "y": normal(t, q * 2 * p),
        "x": normal(t, d),
        "w_o": normal(d, q * 2 * p),
        "g_mlp": normal(d),
        "w_gate_up": normal(2, f, d),
        "w_down": normal(d, f),
        "g_attention": normal(d),
        "w_q": normal(q, 2, p, d),
        "w_k": normal(kv, 2, p, d),
        "w_v": normal(kv * 2 * p, d),
    }
    positions = torch.tensor([0, 1, 2, 7, 0, 1])
    made = block(**given, positions=positions, q_frequency=frequency.expand(q, p), k_frequency=frequency.expand(kv, p))

    def norm(x: Tensor, g: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * g

    def rope(z: Tensor, heads: int) -> Tensor:
        a, b = z.view(t, heads, 2, p).unbind(2)
        angle = positions[:, None, None] * frequency
        rotated = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
        return rotated.reshape(t, -1)

    g = given
    x1 = g["x"] + g["y"] @ g["w_o"].T
    gate, up = (norm(x1, g["g_mlp"]) @ g["w_gate_up"].flatten(0, 1).T).chunk(2, -1)
    x2 = x1 + (torch.nn.functional.silu(gate) * up) @ g["w_down"].T
    n = norm(x2, g["g_attention"])
    q_, k_ = rope(n @ g["w_q"].flatten(0, 2).T, q), rope(n @ g["w_k"].flatten(0, 2).T, kv)
    expected = [x2, q_, k_, n @ g["w_v"].T]
    assert all(close(o, e) for o, e in zip(made, expected, strict=True))
    some = cotangents(list(made))
    found, wanted = gradients(list(made), floats(given), some), gradients(expected, floats(given), some)
    assert all(close(o, e) and o.is_contiguous() for o, e in zip(found, wanted, strict=True))


def test_a_plan_is_not_taken_for_that_of_a_derived_program_of_the_same_text() -> None:
    """A derived program brings its operands to one dtype; one that was written must have one."""
    text = one_line("program p(a: [T, D], w: [E, D]) {\n y = a @ w.T\n return y\n}\n")
    values = [torch.ones(3, 4), torch.ones(2, 4, dtype=torch.bfloat16)]

    def run(derived: bool) -> list[Tensor]:
        return torch.ops.codalang.run_program(
            text, values, "D,E,T", [4, 2, 3], "torch.float32", "None", derived, ["torch.float32"]
        )

    assert run(True)[0].shape == (3, 2)
    with pytest.raises(CodaCallError, match="a matmul takes one dtype"):
        run(False)
