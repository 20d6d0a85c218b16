"""Derived programs against torch.autograd in float64, what they keep, and what they move.

The gradients of random programs are compared to 1e-9 of the largest of the program: a gradient may cancel to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import example_formulas
import golden_cases
import pytest
import torch
from effort import examples
from hypothesis import given, note
from hypothesis import strategies as st
from program_strategies import SIZES, TIED, cotangents_for, inputs_for, programs, shape_of, with_row_scales
from torch import Tensor

from codalang.autodiff import ProgramDerivative, derive_program
from codalang.errors import CodaCallError, CodaUnsupportedError
from codalang.ir import program_reference as reference
from codalang.ir.printer import print_program
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, Vector
from codalang.ir.types import Kind
from codalang.ir.verify_program import verify_program
from codalang.parser import parse

RELATIVE = 1e-9
ROOT = Path(__file__).parent.parent
Tensors = dict[str, Tensor]
seeds = st.integers(0, 2**20)
EXTENTS = {"T": 6, "H": 8, "D": 4, "F": 6, "R": 3, "V": 7, "Q": 2, "KV": 1, "P": 3}


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
    **rounding: Any,
) -> dict[str, Tensor | None]:
    """The gradient of each parameter asked for, in its declared shape, from what the backward says that it loads."""
    stored = reference.run(derivative.forward, inputs, **rounding)
    assert tuple(stored) == program.results + derivative.saved
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    assert list(derivative.loads) == [p.name for p in derivative.backward.params]
    loaded = {name: sources[load.source][load.name] for name, load in derivative.loads.items()}
    results = reference.run(derivative.backward, loaded, **rounding)
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
    delay_scales: bool = False,
) -> ProgramDerivative:
    """The forward that saves gives the same results, and every gradient that was asked for is autograd's."""
    derivative = derive_program(program, wrt=wrt, cotangents=present, delay_scales=delay_scales)
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


def backward_call(
    program: Program, inputs: Tensors, seed: int, *, delay_scales: bool = False
) -> tuple[ProgramDerivative, Tensors]:
    """A program's derivative, and what its backward loads."""
    derivative = derive_program(program, delay_scales=delay_scales)
    stored = reference.run(derivative.forward, inputs)
    cotangents = cotangents_for({n: stored[n] for n in program.results}, seed)
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    return derivative, {name: sources[load.source][load.name] for name, load in derivative.loads.items()}


@examples(60)
@given(programs(without=TIED), seeds, st.data())
def test_random_programs(program: Program, seed: int, data: st.DataObject) -> None:
    """Gradients for any subset of the parameters from any subset of the results."""
    names = [p.name for p in program.params]
    wrt = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(names), unique=True)))
    present = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(program.results), unique=True)))
    note(f"wrt {wrt} from {present}")
    check_gradients(program, inputs_for(program, seed), SIZES, wrt=wrt, present=present, seed=seed)


@examples(25)
@given(programs(max_steps=3, steps=4, without=TIED), seeds)
def test_second_derivatives_of_random_programs(program: Program, seed: int) -> None:
    """The derived backward is a program like any other."""
    inputs = inputs_for(program, seed)
    first, loaded = backward_call(program, inputs, seed)
    check_gradients(first.backward, loaded, SIZES, seed=seed)


@examples(60)
@given(programs(without=TIED).map(with_row_scales), seeds, st.data())
def test_random_programs_with_delayed_scales(program: Program, seed: int, data: st.DataObject) -> None:
    """Gradients for any subset of the parameters, where matmuls are scaled by rows."""
    wrt = data.draw(st.one_of(st.none(), st.lists(st.sampled_from([p.name for p in program.params]), unique=True)))
    note(f"wrt {wrt}")
    check_gradients(program, inputs_for(program, seed), SIZES, wrt=wrt, seed=seed, delay_scales=True)


@examples(25)
@given(programs(max_steps=3, steps=4, without=TIED).map(with_row_scales), seeds)
def test_second_derivatives_with_delayed_scales(program: Program, seed: int) -> None:
    inputs = inputs_for(program, seed)
    first, loaded = backward_call(program, inputs, seed, delay_scales=True)
    check_gradients(first.backward, loaded, SIZES, seed=seed, delay_scales=True)


# ---- text ------------------------------------------------------------------------------------------------------------


def last_program(text: str) -> Program:
    """The last program of a source text."""
    return list(parse(text).programs.values())[-1]


def derivative_text(text: str) -> str:
    """What is kept, whose gradient is which result, and the backward."""
    derivative = derive_program(last_program(text))
    kept = f"# kept: {', '.join(derivative.saved) or 'nothing'}\n"
    gradients = "".join(f"# {name} <- {result}\n" for name, result in derivative.gradients.items())
    return kept + gradients + "\n" + print_program(derivative.backward)


@pytest.mark.parametrize("name", golden_cases.load("programs.txt"))
def test_golden_derivative(name: str) -> None:
    golden_cases.check("programs.txt", name, derivative_text)
    program = last_program(golden_cases.load("programs.txt")[name][0])
    derivative = check_gradients(program, inputs_for(program, 0, EXTENTS), EXTENTS)
    for part in (derivative.forward, derivative.backward):
        check_text(part)


# ---- what is kept and moved ------------------------------------------------------------------------------------------


def example(file: str, name: str) -> Program:
    """A program of the examples."""
    return parse((ROOT / "examples" / file).read_text()).programs[name]


def moved(statement: Statement) -> tuple[str, int, int]:
    """What hosts a kernel, and how many tiles its epilogue loads and stores, the host not counted."""
    if isinstance(statement, Product):
        return "matmul", 0, 1
    assert isinstance(statement, Apply)
    params = {p.name: p for p in statement.epilogue.params}
    loads = sum(params[name].type.kind is Kind.TILE for name, _ in statement.inputs)
    outputs = zip(statement.results, statement.epilogue.outputs, strict=True)
    stores = sum(result is not None and output.type.kind is Kind.TILE for result, output in outputs)
    return ("matmul" if isinstance(statement.host, Matmul) else "hosted"), loads, stores


def kernels(program: Program) -> list[tuple[str, int, int]]:
    """The kernels of a program that move activations; auxiliary steps do not."""
    return [moved(s) for s in program.statements if not isinstance(s, Vector)]


def weights(program: Program) -> list[str]:
    """Parameters but for frequencies, positions and scalars."""
    return [p.name for p in program.params if p.type.shape and "frequency" not in p.name and p.name != "positions"]


def test_the_backward_of_mlp_moves_what_it_must() -> None:
    """Six matmuls; both derived epilogues are on one, and load what the forward stored and one accumulator."""
    program = example("mlp.coda", "mlp")
    derivative = derive_program(program, wrt=weights(program))
    assert [name for name in derivative.saved if name.startswith("saved")] == ["saved_acc_y1"]
    assert kernels(derivative.forward) == [("matmul", 1, 2), ("matmul", 0, 2), ("matmul", 1, 1)]
    assert kernels(derivative.backward) == [
        ("matmul", 0, 1),  # d_w2
        (
            "matmul",
            1,
            1,
        ),  # SwiGLU and the row scale of the norm, on d_x2 @ w2: loads the accumulator, stores its cotangent
        ("matmul", 0, 1),  # d_w1
        ("matmul", 2, 1),  # the norm and the residual, on d_acc @ w1: loads d_x2 and x1, stores d_x0
        ("matmul", 0, 1),  # d_w0
        ("matmul", 0, 1),  # d_y0
    ]


def test_the_backward_of_a_llama_block_moves_what_it_must() -> None:
    """No kernel for a norm, a residual or SwiGLU; the three of RoPE and the scale are on what attention gives."""
    program = example("llama_block.coda", "llama_block")
    derivative = derive_program(program, wrt=weights(program))
    assert [name for name in derivative.saved if name.startswith("saved")] == ["saved_acc_a"]
    assert kernels(derivative.backward) == [
        *[("hosted", 1, 1), ("matmul", 0, 1)] * 3,  # v, k, q: loads the result, stores its cotangent; then d_w
        ("matmul", 0, 1),  # d_h2 of v
        ("matmul", 1, 1),  # and of k
        ("matmul", 3, 1),  # the norm and the residual, on that of q
        ("matmul", 0, 1),  # d_w_down
        ("matmul", 1, 1),  # SwiGLU
        ("matmul", 0, 1),  # d_w_gate_up
        ("matmul", 2, 1),  # the norm and the residual
        ("matmul", 0, 1),  # d_w_o
        ("matmul", 0, 1),  # d_y
    ]


def test_delayed_scales_of_a_llama_block() -> None:
    """No cotangent is scaled before it is stored; h1 and h2 are, once each, and that of v is not stored again."""
    program = example("llama_block.coda", "llama_block")
    derivative = derive_program(program, wrt=weights(program), delay_scales=True)
    assert kernels(derivative.backward) == [
        ("hosted", 1, 0),  # v: the gradient of its scale alone
        ("hosted", 0, 1),  # h2 * r2
        ("matmul", 0, 1),  # d_w_v
        *[("hosted", 1, 1), ("matmul", 0, 1)] * 2,  # k, q
        ("matmul", 0, 1),  # d_h2 of v
        ("matmul", 1, 1),  # and of k
        ("matmul", 3, 1),  # the norm and the residual, on that of q, all to be scaled
        ("matmul", 0, 1),  # d_w_down
        ("matmul", 1, 1),  # SwiGLU
        ("hosted", 0, 1),  # h1 * r1
        ("matmul", 0, 1),  # d_w_gate_up
        ("matmul", 2, 1),  # the norm and the residual
        ("matmul", 0, 1),  # d_w_o
        ("matmul", 0, 1),  # d_y
    ]
    plain = derive_program(program, wrt=weights(program))
    assert derivative == attrs.evolve(plain, backward=derivative.backward)


SCALED = """
import scaled

program p(a: [T, D], w: [F, D], v: [D, F], u: [F, T], c: [D, T], r: [T], d: [D]) {
    %s
    return y
}
"""


@pytest.mark.parametrize(
    ("body", "wrt", "delays"),
    [
        ("y = scaled(a @ w.T, r = r)", ("a", "w"), True),
        ("y = scaled(a @ v, r = r)", ("a", "v"), True),  # d_v = (a * r).T @ d_y
        ("y = scaled(c.T @ v, r = r)", ("v",), False),  # d_v = c @ (d_y * r): r belongs to columns of c
        ("y = scaled(c.T @ v, r = r)", ("c",), False),  # d_c = v @ (d_y * r).T
        ("y = scaled(c.T @ w.T, r = r)", ("w",), False),  # d_w = (d_y * r).T @ c.T
        ("h = scaled(a, r = r)\n    y = h @ w.T", ("a", "w"), False),  # d_a = (d_y @ w) * r is a result
    ],
)
def test_which_scales_are_delayed(body: str, wrt: Sequence[str], delays: bool) -> None:
    """Those behind which something is computed that the scale commutes with."""
    program = last_program(SCALED % body)
    plain, delayed = (derive_program(program, wrt=wrt, delay_scales=value) for value in (False, True))
    assert (plain != delayed) == delays
    check_gradients(program, inputs_for(program, 0, EXTENTS), EXTENTS, delay_scales=True)


def test_frozen_weights_cost_nothing() -> None:
    """No matmul for them, and nothing is kept for them."""
    program = example("mlp.coda", "mlp")
    derivative = derive_program(program, wrt=["x0"])
    assert derivative.saved == ("x1", "ss1", "r1", "saved_acc_y1")
    assert kernels(derivative.backward) == [("matmul", 1, 1), ("matmul", 2, 1)]
    assert list(derivative.gradients) == ["x0"]


def test_logits_are_stored_once_at_most() -> None:
    """Recomputed, the forward stores no tile; saved, the backward has no further matmul of the logits."""
    for name, stores, products in (("cross_entropy_mean", 0, 3), ("cross_entropy_mean_saved", 1, 2)):
        program = example("lm_head_cross_entropy.coda", name)
        derivative = derive_program(program, wrt=["h", "w"])
        assert [stored for _, _, stored in kernels(derivative.forward)] == [stores]
        assert sum(kind == "matmul" for kind, _, _ in kernels(derivative.backward)) == products


@pytest.mark.parametrize("delay_scales", [False, True])
@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "examples").glob("*.coda")))
def test_examples_twice(file: str, delay_scales: bool) -> None:
    """First and second derivatives of every program of the examples."""
    for program in parse((ROOT / "examples" / file).read_text()).programs.values():
        sizes = {name: EXTENTS.get(name, 4) for name in program.dims}
        inputs = inputs_for(program, 0, sizes)
        check_gradients(program, inputs, sizes, delay_scales=delay_scales)
        first, loaded = backward_call(program, inputs, 0, delay_scales=delay_scales)
        check_gradients(first.backward, loaded, sizes, delay_scales=delay_scales)


def test_no_gradient_and_no_cotangent() -> None:
    """Nothing is asked for, or nothing depends on it: nothing is kept, and nothing is computed."""
    program = example("mlp.coda", "mlp")
    for derivative in (derive_program(program, wrt=[]), derive_program(program, cotangents=[])):
        assert derivative.forward == program and not derivative.saved
        assert not derivative.backward.statements and not derivative.backward.results
        assert set(derivative.gradients.values()) <= {None}


def test_unknown_names_are_refused() -> None:
    program = example("mlp.coda", "mlp")
    with pytest.raises(CodaCallError, match="`wrt` of `mlp` must be a collection of names out of y0, x0"):
        derive_program(program, wrt=["w3"])
    with pytest.raises(CodaCallError, match="`cotangents` of `mlp` must be a collection of names out of x2; got 'x2'"):
        derive_program(program, cotangents="x2")


def test_deriving_takes_linear_time() -> None:
    """A chain of matmuls, norms and residuals: eight times the statements take less than sixteen times as long."""

    def seconds(layers: int) -> float:
        program = chain(layers)
        start = time.process_time()
        derivative = derive_program(program)
        assert len(derivative.backward.statements) >= 4 * layers
        return time.process_time() - start

    seconds(2)
    few, many = (min(seconds(layers) for _ in range(3)) for layers in (20, 160))
    assert many < 16 * few


def chain(layers: int) -> Program:
    """x = x + a W^T, h = x * g, a = tanh(h V^T), so many times."""
    head = "epilogue squash(acc: tile[M, N]) {\n    store a: tile[M, N] = tanh(acc)\n}\n"
    lines = [
        f"    (x{i}, h{i}, _) = residual_rms(a{i - 1} @ w{i}.T, res = x{i - 1}, gamma = g{i})\n"
        f"    a{i} = squash(h{i} @ v{i}.T)\n"
        for i in range(1, layers + 1)
    ]
    weights_ = "".join(f", w{i}: [D, F], v{i}: [F, D], g{i}: [D]" for i in range(1, layers + 1))
    text = f"program chain(a0: [T, F], x0: [T, D]{weights_}) {{\n{''.join(lines)}    return a{layers}\n}}\n"
    return last_program("import residual_rms\n" + head + text)


# ---- uses that meet ------------------------------------------------------------------------------------------------

MIXED = """
import bias
import residual

program mixed(x: [T, D], w: [F, D], v: [T, F, D], b: [T, F]) {
    y = bias(x @ v.T, bias = b)
    z = residual(x @ w.T, res = b)
    return (y, z)
}
"""


def test_a_parameter_that_is_a_matrix_and_a_vector() -> None:
    """Its gradient has the shape that it was declared with."""
    program = last_program(MIXED)
    check_gradients(program, inputs_for(program, 0, EXTENTS), EXTENTS)


def test_what_is_made_as_a_matrix_and_read_as_a_vector_is_refused() -> None:
    program = last_program(MIXED)
    first, second = program.statements
    assert isinstance(first, Apply)
    turned = attrs.evolve(program, statements=(second, attrs.evolve(first, inputs=(("bias", "z"),))))
    with pytest.raises(CodaUnsupportedError, match="`z` is used as a matrix and as a vector"):
        derive_program(turned)


def test_names_that_a_derivation_makes_up() -> None:
    """Values, parameters and dimensions called as what is added would be."""
    text = """
import residual

program backward(d_y: [d_x, D], backward: [F, D], x: [d_x, F]) {
    y = residual(d_y @ backward.T, res = x)
    d_d_y = residual(y @ backward, res = d_y)
    return (y, d_d_y)
}
"""
    program = last_program(text)
    sizes = EXTENTS | {"d_x": 5}
    inputs = inputs_for(program, 0, sizes)
    check_gradients(program, inputs, sizes)
    first, loaded = backward_call(program, inputs, 0)
    check_gradients(first.backward, loaded, sizes)


# ---- against plain torch -------------------------------------------------------------------------------------------


def formula_inputs(program: Program, sizes: Mapping[str, int], dtype: torch.dtype, outliers: bool) -> dict[str, Any]:
    """Inputs like those of training, rounded to `dtype`; with outliers every 16th row of x is 100 times as large."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    for param in program.params:
        shape = shape_of(param.type, sizes)
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        if param.name == "positions":
            value = torch.arange(shape[0])
        elif "frequency" in param.name:
            value = (10000.0 ** (-torch.arange(shape[-1]) / shape[-1])).double().expand(shape).contiguous()
        elif param.name.startswith("w"):
            value = (value * shape[-1] ** -0.5).to(dtype).double()
        elif param.name.startswith("g"):
            value = (1 + 0.1 * value).to(dtype).double()
        else:
            value = value.to(dtype).double()
        inputs[param.name] = value if param.default is None else torch.tensor(param.default, dtype=torch.float64)
    if outliers:
        inputs["x"][::16] *= 100
    return inputs


def by_formula(
    program: Program, inputs: Mapping[str, Any], cotangents: Sequence[Tensor] | None, dtype: torch.dtype
) -> tuple[list[Tensor], Tensors]:
    """The results and gradients of the formula in plain torch, eager, in a dtype."""
    learned = weights(program)
    other = torch.float64 if dtype is torch.float64 else torch.float32
    leaves = {
        name: value.to(dtype).requires_grad_()
        if name in learned
        else value.to(other)
        if value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    results = list(getattr(example_formulas, program.name)(**leaves))
    if cotangents is None:
        return results, {}
    seeds_ = [c.to(r.dtype) for c, r in zip(cotangents, results, strict=True)]
    found = torch.autograd.grad(results, [leaves[n] for n in learned], seeds_)
    return results, dict(zip(learned, found, strict=True))


def relative_error(value: Tensor, exact: Tensor) -> float:
    """By norm."""
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("file", "name"), [("mlp.coda", "mlp"), ("llama_block.coda", "llama_block")])
def test_gradients_are_those_of_plain_torch(file: str, name: str) -> None:
    """No code is shared with the formula."""
    program = example(file, name)
    sizes = {"T": 6, "H": 8, "D": 4, "F": 6, "Q": 2, "KV": 1, "P": 3}
    inputs = formula_inputs(program, sizes, torch.float64, False)
    results, _ = by_formula(program, inputs, None, torch.float64)
    cotangents = cotangents_for(dict(zip(program.results, results, strict=True)), 0)
    _, expected = by_formula(program, inputs, list(cotangents.values()), torch.float64)
    found = derived(program, derive_program(program, wrt=weights(program)), inputs, cotangents, sizes)
    for param, gradient in expected.items():
        value = found[param]
        assert value is not None and relative_error(value, gradient) < 1e-12, param


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_as_near_as_eager_torch_s(
    dtype: torch.dtype, outliers: bool, size: float
) -> None:
    """What is kept and what the derived epilogues store is rounded as the kernels round it, for cotangents of any size:
    in f16 the scales of rows are delayed."""
    program = example("llama_block.coda", "llama_block")
    sizes = {"T": 128, "D": 128, "F": 256, "Q": 4, "KV": 2, "P": 16}
    inputs = formula_inputs(program, sizes, dtype, outliers)
    exact_results, _ = by_formula(program, inputs, None, torch.float64)
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(r.shape, dtype=torch.float64, generator=generator) for r in exact_results]
    seeds_ = [(size * n).to(dtype).double() for n in noise]
    _, exact = by_formula(program, inputs, seeds_, torch.float64)
    eager_results, eager = by_formula(program, inputs, seeds_, dtype)
    derivative = derive_program(program, wrt=weights(program), delay_scales=dtype is torch.float16)
    cotangents = dict(zip(program.results, seeds_, strict=True))
    rounding = {"dtype": torch.float32, "storage": dtype}
    found = derived(program, derivative, inputs, cotangents, sizes, **rounding)
    results = reference.run(derivative.forward, inputs, **rounding)
    for name, value, truth in zip(program.results, eager_results, exact_results, strict=True):
        assert relative_error(results[name], truth) <= 1.02 * relative_error(value, truth), name
    for name, truth in exact.items():
        value = found[name]
        assert value is not None
        assert relative_error(value.to(dtype), truth) <= 1.02 * relative_error(eager[name], truth), name
