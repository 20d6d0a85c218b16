"""Calls that were made before are looked up: they must do what is done step by step, bit for bit."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from test_torch_program import LAYERS, close, on_kernels, results_of
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import codalang
from codalang.bench.tune import recording
from codalang.torch import execute, program_plan

TEXT = (
    LAYERS
    + """program block(x: [T, D], w0: [D, D], w1: [2, F, D], w2: [D, F], g: [D], b: [2, F], s: scalar = 0.5) {
    (x1, h1, ss1) = plus(x @ w0.T, t = x, g = g)
    a = gated(h1 @ w1.T, r = rsqrt(ss1 / D + 0.1), b = b, s = s)
    (x2, h2, ss2) = plus(a @ w2.T, t = x1, g = g)
    return (x2, h1, ss2)
}
"""
)
WIDE = {"w0": (8, 8), "w1": (2, 6, 8), "w2": (8, 6), "g": (8,), "b": (2, 6)}
LIES = (
    lambda t: t,
    lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),  # at another address
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],  # of a wider pitch
    lambda t: t[:1].expand(t.shape),
    lambda t: torch.stack((t, t), -1)[..., 0],  # every second element
)
MODES = (
    torch.enable_grad,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.float16),
    lambda: torch.autocast("cpu", torch.bfloat16),
)
NUMBERS = (0.5, 1, Fraction(1, 4), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16), True)
m = codalang.load(TEXT)


@contextmanager
def looked_up_or_step_by_step() -> Iterator[None]:
    """On kernels, as ever, but for who looks at each step."""
    with on_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_plan, "launches_repeat", lambda device: not execute.stepwise)
        yield


FACETS = ("rows", "dtype", "lie", "which", "mode", "number", "sent", "asked")
Way = dict[str, int]  # how each facet of a call is chosen


def outcome(way: Way, seed: int) -> list[Any]:
    """What a call of a program and its backward give: chosen by `way`, of values chosen by `seed`."""
    generator, draw = torch.Generator().manual_seed(seed), {facet: random.Random(way[facet]) for facet in FACETS}
    shapes = {"x": (draw["rows"].choice((5, 16, 1)), 8), **WIDE}
    dtype = draw["dtype"].choice((torch.bfloat16, torch.float16))
    whole = {n: (torch.randn(s, generator=generator) / 2).to(dtype) for n, s in shapes.items()}
    if draw["dtype"].random() < 0.3:
        whole["b"] = whole["b"].float()
    arguments: dict[str, Any] = {n: laid(v, draw["lie"]) for n, v in whole.items()}
    for value in arguments.values():
        value.requires_grad_(draw["which"].random() < 0.6)
    arguments["s"] = draw["number"].choice(NUMBERS)
    wanted = [v for v in arguments.values() if isinstance(v, Tensor) and v.requires_grad]
    try:
        with draw["mode"].choice(MODES)():
            made = results_of(m.block(**arguments))
    except codalang.CodaError as error:
        return [str(error)]
    found: list[Any] = [(o.requires_grad, o.is_inference(), o.stride()) for o in made]
    recorded = [o for o in made if o.requires_grad]
    if recorded:
        for last in (False, True):
            some = draw["asked"].choice((recorded, recorded[:1], recorded[1:] or recorded))
            asked = [w for w in wanted if draw["asked"].random() < 0.8] or wanted
            sent = [laid(torch.randn(o.shape, generator=generator).to(o.dtype), draw["sent"]) for o in some]
            found += torch.autograd.grad(some, asked, sent, allow_unused=True, retain_graph=not last)
    return found + [o.detach() for o in made]


def laid(tensor: Tensor, draw: random.Random) -> Tensor:
    return LIES[draw.choice((0, draw.randrange(len(LIES))))](tensor)


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    def one(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return bool(a == b)
        return a.dtype is b.dtype and torch.equal(a, b)

    return len(ours) == len(theirs) and all(map(one, ours, theirs))


@examples(60)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.sampled_from(FACETS), st.integers(0, 5)), min_size=2, max_size=2))
def test_what_is_looked_up_is_what_is_done_step_by_step(seed: int, changes: list[tuple[str, int]]) -> None:
    """Of calls that differ in rows, dtypes, strides, addresses, numbers, what is around them or asked of them."""
    first = dict.fromkeys(FACETS, seed % 20)
    ways = [first, *(first | {facet: other} for facet, other in changes)]
    with looked_up_or_step_by_step(), pytest.MonkeyPatch.context() as patch:
        for way in (*ways, *ways, *ways):  # of the third of a kind all is looked up
            found = outcome(way, seed)
            patch.setattr(execute, "stepwise", True)
            expected = outcome(way, seed)
            patch.setattr(execute, "stepwise", False)
            assert alike(found, expected), way


def drawn(seed: int = 0, rows: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (rows, 8), **WIDE, "s": ()}
    return {n: (torch.randn(s, generator=generator) / 2).bfloat16().requires_grad_() for n, s in shapes.items()}


@pytest.mark.parametrize("surroundings", [on_kernels, nullcontext])
def test_cotangents_may_be_sparse(surroundings: Any) -> None:
    """As an embedding sends them to its table."""
    rows = torch.tensor([1, 3, 3])
    arguments = drawn()

    def gradients(sparse: bool, **options: bool) -> tuple[Tensor, ...]:
        picked = torch.nn.functional.embedding(rows, m.block(**arguments)[0], sparse=sparse)
        return torch.autograd.grad(picked.sum(), list(arguments.values()), **options)

    with surroundings():
        for _ in range(3):
            expected = gradients(sparse=False)
            assert all(map(torch.equal, gradients(sparse=True), expected))
        recorded = gradients(sparse=True, create_graph=True)
        assert recorded[0].requires_grad and all(close(r, e, 2e-2) for r, e in zip(recorded, expected, strict=True))


@pytest.mark.parametrize("surroundings", [on_kernels, nullcontext])
def test_a_tensor_that_does_operators_itself_is_never_launched_on(surroundings: Any) -> None:
    """It has no memory; it is given one operator, outside of any mode, too."""
    arguments = drawn()
    detached = {n: v.detach() for n, v in arguments.items()}
    pairs = {n: TwoTensor(v, 2 * v).requires_grad_() for n, v in detached.items()}
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v).requires_grad_() for n, v in detached.items()}
    with surroundings(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            expected = m.block(**arguments)
            expected.x2.sum().backward()
            made = m.block(**pairs)
            assert torch.equal(made.x2.a, expected.x2) and not torch.equal(made.x2.b, expected.x2)
            made.x2.sum().backward()
            assert torch.equal(pairs["x"].grad.a, arguments["x"].grad)
            fake = m.block(**fakes)
            assert mode.is_our_fake(fake.x2) and fake.x2.shape == expected.x2.shape
            fake.x2.sum().backward()
            assert mode.is_our_fake(fakes["x"].grad)
            assert math.isfinite(expected.x2.sum().item())


@pytest.mark.parametrize("surroundings", [on_kernels, nullcontext])
def test_gradients_of_arguments_that_share_a_cotangent_are_apart(surroundings: Any) -> None:
    """Whoever scales or accumulates one in place must not change the others."""
    params = "acc: tile[M, N], c: col[M], d: col[M], e: col[M]"
    text = f"epilogue shifted({params}) {{ store y: tile[M, N] = acc + c + d + e }}"
    function, a, w = codalang.load(text).shifted, torch.randn(2, 3, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    for shapes in itertools.product([(6,), (2, 3)], repeat=3):
        vectors = [torch.randn(shape).requires_grad_() for shape in shapes]
        with surroundings():
            for count in (1, 2, 3):
                function(a, w, *vectors).float().sum().backward()
                assert all(torch.equal(v.grad, torch.full_like(v, 8 * count)) for v in vectors), shapes
        assert len({v.grad.data_ptr() for v in vectors}) == 3


@pytest.mark.parametrize("surroundings", [on_kernels, nullcontext])
@pytest.mark.parametrize("rows", [(16,), (2, 8)])
def test_results_may_be_written_into(surroundings: Any, rows: tuple[int, ...]) -> None:
    """As those of a linear layer may; not so what the backward reads."""
    text = "epilogue both(acc: tile[M, N]) { store y: tile[M, N] = 3 * acc\n reduce s: col[M] = sum(acc) }"
    function, x, w = codalang.load(text).both, torch.ones(*rows, 8).bfloat16().requires_grad_(), torch.eye(8).bfloat16()
    arguments = drawn() | {"x": x}
    with surroundings():
        for _ in range(3):
            y, s = function(x, w)
            y += y
            s.mul_(5)
            (found,) = torch.autograd.grad(y.float().sum() + s.sum(), x)
            assert torch.equal(found, torch.full_like(x, 2 * 3 + 5))
            made = m.block(**arguments)
            made.x2.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                made.ss2.sum().backward()


@pytest.mark.parametrize("surroundings", [on_kernels, nullcontext])
def test_arguments_made_in_inference_mode(surroundings: Any) -> None:
    """They will do where no backward reads them, as for torch's own functions."""
    function, x, w = codalang.load("residual").residual, drawn()["x"], torch.eye(8).bfloat16()
    with torch.inference_mode():
        residual = torch.ones(16, 8).bfloat16()
    with surroundings():
        for _ in range(3):
            (found,) = torch.autograd.grad(function(x, w, residual).sum(), x, create_graph=True)
            assert torch.equal(found, torch.ones_like(x))
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                function(x, residual[:8], residual)


def test_gemms_of_calls_that_were_made_before_are_recorded() -> None:
    arguments = {n: v.detach() for n, v in drawn().items()}
    with looked_up_or_step_by_step():
        for _ in range(3):
            m.block(**arguments)
        with recording() as calls:
            m.block(**arguments)
    assert len(calls) == 3
