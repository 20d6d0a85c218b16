"""Derived programs against torch.autograd in float64, what they keep, and what they move.

The gradients of random programs are compared to 1e-9 of the largest of the program: a gradient may cancel to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from program_strategies import SIZES, cotangents_for, inputs_for, programs
from torch import Tensor

from codalang.autodiff import ProgramDerivative, derive_program
from codalang.ir import program_reference as reference
from codalang.ir.printer import print_program
from codalang.ir.program import Program
from codalang.ir.verify_program import verify_program
from codalang.parser import parse

RELATIVE = 1e-9
ROOT = Path(__file__).parent.parent
Tensors = dict[str, Tensor]
seeds = st.integers(0, 2**20)


def as_leaf(value: Tensor) -> Tensor:
    """A copy that requires a gradient, where it is of floats."""
    return value.detach().clone().requires_grad_(value.is_floating_point())


def autograd(program: Program, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]) -> Tensors:
    """The gradient of every parameter that has one."""
    leaves = {name: as_leaf(value) for name, value in inputs.items()}
    results = reference.run(program, leaves)
    chosen = [name for name in results if name in cotangents and results[name].requires_grad]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not chosen or not wanted:
        return {}
    found = torch.autograd.grad(
        [results[n] for n in chosen], list(wanted.values()), [cotangents[n] for n in chosen], allow_unused=True
    )
    return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def derived(
    program: Program,
    derivative: ProgramDerivative,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    sizes: Mapping[str, int],
) -> dict[str, Tensor | None]:
    """The gradient of each parameter asked for, in its declared shape, from what the backward declares that it loads."""
    stored = reference.run(derivative.forward, inputs)
    assert tuple(stored) == program.results + derivative.saved
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    assert list(derivative.loads) == [p.name for p in derivative.backward.params]
    loaded = {name: sources[load.source][load.name] for name, load in derivative.loads.items()}
    results = reference.run(derivative.backward, loaded)
    types = {p.name: p.type for p in program.params}
    gradients: dict[str, Tensor | None] = {}
    for name, result in derivative.gradients.items():
        value = None if result is None else results[result]
        if value is not None and value.shape != inputs[name].shape:
            value = reference.unview(value, types[name], sizes)
        gradients[name] = value
    return gradients


def check_text(program: Program) -> None:
    """A program that verifies, prints, and parses back to itself."""
    verify_program(program)
    if program.results:
        assert parse(print_program(program)).programs[program.name] == program


def check_gradients(
    program: Program,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    *,
    wrt: Collection[str] | None = None,
    present: Collection[str] | None = None,
    seed: int = 0,
    relative: float = RELATIVE,
) -> ProgramDerivative:
    """The forward that saves gives the same results, and every gradient that was asked for is autograd's."""
    derivative = derive_program(program, wrt=wrt, cotangents=present)
    for part in (derivative.forward, derivative.backward):
        check_text(part)
    results = reference.run(program, inputs)
    cotangents = cotangents_for(results, seed)
    if present is not None:
        cotangents = {name: value for name, value in cotangents.items() if name in present}
    expected = autograd(program, inputs, cotangents)
    found = derived(program, derivative, inputs, cotangents, sizes)
    kept = reference.run(derivative.forward, inputs)
    for name, value in results.items():
        assert torch.equal(kept[name], value)
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    for name, value in found.items():
        want = expected.get(name)
        if value is None:
            assert want is None or not want.any(), f"the gradient of {name} is not zero"
            continue
        want = torch.zeros_like(inputs[name]) if want is None else want
        assert value.shape == want.shape
        assert float((value - want).abs().max()) <= relative * largest, name
    return derivative


@settings(max_examples=60, deadline=None)
@given(programs(), seeds, st.data())
def test_random_programs(program: Program, seed: int, data: st.DataObject) -> None:
    """Gradients for any subset of the parameters from any subset of the results."""
    names = [p.name for p in program.params]
    wrt = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(names), unique=True)))
    present = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(program.results), unique=True)))
    note(f"wrt {wrt} from {present}")
    check_gradients(program, inputs_for(program, seed), SIZES, wrt=wrt, present=present, seed=seed)


@settings(max_examples=25, deadline=None)
@given(programs(max_steps=3, steps=4), seeds)
def test_second_derivatives_of_random_programs(program: Program, seed: int) -> None:
    """The derived backward is a program like any other."""
    first = derive_program(program)
    if not first.backward.results:
        return
    inputs = inputs_for(program, seed)
    stored = reference.run(first.forward, inputs)
    cotangents = cotangents_for({n: stored[n] for n in program.results}, seed)
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    loaded = {name: sources[load.source][load.name] for name, load in first.loads.items()}
    check_gradients(first.backward, loaded, SIZES, seed=seed)
