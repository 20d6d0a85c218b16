"""The standard library: every epilogue of every file against an independent formula in torch, and as a program.

A new file is covered as soon as it is there: each test runs for each epilogue found, and one that has no formula in
`FORMULAS` fails.  What the lowering does not cover it says by itself (CodaUnsupportedError); no list of that is kept.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import oracles
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import codalang
from codalang.autodiff import Derivative, derive
from codalang.cli.specs import backward_spec, forward_spec
from codalang.errors import CodaError, CodaUnsupportedError, Source
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue, Param
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.ir.types import Dtype, Kind
from codalang.ir.verify import verify
from codalang.lower.codegen import generate
from codalang.lower.compile import compile_object
from codalang.lower.spec import KernelSpec
from codalang.parser import format_source, parse
from codalang.sources import library_names

FILES = sorted((Path(__file__).parents[1] / "stdlib").glob("*.coda"))
# Three heads of 128 columns, and tiles that divide neither rows nor columns.
ROWS, COLUMNS = 6, 384
SAMPLES = 3  # of two rows
TILE = (5, 256)
# Both sides compute in float64, and differ in the order of operations only.
TOLERANCE = 1e-9

Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def read(path: Path) -> Source:
    """A file as a source that is named as users see it."""
    return Source(path.name, path.read_text())


def epilogues_of(path: Path) -> dict[str, Epilogue]:
    """The epilogues of a file by key.  None of a file that is wrong: a test of its own says what is."""
    try:
        found = parse(read(path)).epilogues.values()
    except CodaError:
        return {}
    return {e.name if e.name == path.stem else f"{path.stem}.{e.name}": e for e in found}


EPILOGUES: dict[str, Epilogue] = {key: e for path in FILES for key, e in epilogues_of(path).items()}


def name_of(key: str) -> tuple[str, str]:
    """The file and the epilogue that a key of EPILOGUES means."""
    file, _, epilogue = key.partition(".")
    return file, epilogue or file


# ---------------------------------------------------------------- formulas


@attrs.frozen
class Formula:
    """What an epilogue computes: its outputs in order, from its parameters in order, in torch.

    `inputs` overrides the drawn value of a parameter: (generator) -> tensor or number.
    """

    compute: Callable[..., Outputs | Tensor]
    inputs: Mapping[str, Callable[[torch.Generator], Tensor | float]] = attrs.field(factory=dict)


def positive(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Numbers in [0.5, 1.5): variances, scales."""
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) + 0.5


def number(value: float) -> Callable[[torch.Generator], float]:
    """A fixed scalar."""
    return lambda g: value


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up of an interleaved projection."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return pairs[..., 0], pairs[..., 1]


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """activation(gate) * up."""
    return lambda acc: activation(halves(acc)[0]) * halves(acc)[1]


def column(x: Tensor) -> Tensor:
    """A col against the columns of a tile."""
    return x.unsqueeze(-1)


def clamped_swiglu(acc: Tensor, bias: Tensor, alpha: Tensor, limit: Tensor) -> Tensor:
    """As gpt-oss's reference code has it."""
    gate, up = halves(acc + bias)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def residual_rms(acc: Tensor, res: Tensor, gamma: Tensor) -> Outputs:
    x = acc + res
    return x, x * gamma, x.square().sum(-1)


def normalized(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:
    return (x - column(mean)) / (column(var) + eps).sqrt() * weight + bias


def statistics(x: Tensor) -> Outputs:
    """Mean and biased variance of each row."""
    var, mean = torch.var_mean(x, dim=-1, correction=0)
    return mean, var


def per_token(row: Tensor) -> Tensor:
    """Each sample's row at each of its tokens."""
    return row.repeat_interleave(ROWS // SAMPLES, dim=0)


def gated_residual(acc: Tensor, res: Tensor, gate: Tensor) -> Outputs:
    x = res + gate * acc
    return x, *statistics(x)


def per_head_norm(acc: Tensor, gamma: Tensor, eps: Tensor, size: int) -> Tensor:
    """RMSNorm of each group of `size` columns."""
    heads = acc.unflatten(-1, (-1, size))
    return (heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * gamma


def rotated(x: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
    """Pairs of adjacent columns as complex numbers, times exp(i * position * frequency)."""
    angle = torch.outer(position.to(x.dtype), frequency)
    pairs = torch.complex(*halves(x)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(pairs).flatten(-2)


def targets(generator: torch.Generator) -> Tensor:
    """A column for each row, but for one that is to be ignored."""
    target = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
    target[2] = -100
    return target


def target_logit(logits: Tensor, target: Tensor) -> Outputs:
    """The logsumexp of each row, and its logit at the target, 0 where there is none."""
    picked = logits.gather(-1, column(target.clamp(min=0))).squeeze(-1)
    return torch.logsumexp(logits, -1), picked.masked_fill(target < 0, 0.0)


def token_loss(
    lse: Tensor,
    logit: Tensor,
    total: Tensor,
    target: Tensor,
    weight: Tensor,
    smoothing: Tensor,
    z: Tensor,
    classes: Tensor,
) -> Tensor:
    nll, uniform = lse - logit, lse - total / classes
    return torch.where(target < 0, 0, weight * ((1 - smoothing) * nll + smoothing * uniform + z * lse**2))


FORMULAS: dict[str, Formula] = {
    "relu": Formula(functional.relu),
    "relu_squared": Formula(lambda acc: functional.relu(acc) ** 2),
    "silu": Formula(functional.silu),
    "gelu": Formula(functional.gelu),
    "gelu_tanh": Formula(lambda acc: functional.gelu(acc, approximate="tanh")),
    "sigmoid": Formula(torch.sigmoid),
    "tanh": Formula(torch.tanh),
    "softplus": Formula(
        lambda acc: functional.softplus(acc, threshold=1e9),
        {"acc": lambda g: 20 * torch.randn(ROWS, COLUMNS, generator=g, dtype=torch.float64)},
    ),
    "softcap": Formula(lambda acc, cap: cap * torch.tanh(acc / cap), {"cap": number(1.5)}),
    "swiglu": Formula(gated(functional.silu)),
    "scaled_swiglu": Formula(lambda acc, r: gated(functional.silu)(acc * column(r))),
    "geglu": Formula(gated(functional.gelu)),
    "geglu_tanh": Formula(gated(lambda x: functional.gelu(x, approximate="tanh"))),
    "reglu": Formula(gated(functional.relu)),
    "glu": Formula(lambda acc: functional.glu(torch.cat(halves(acc)[::-1], dim=-1))),
    "swiglu_oai": Formula(clamped_swiglu, {"alpha": number(1.702), "limit": number(1.0)}),
    "bias": Formula(torch.add),
    "bias_gelu": Formula(lambda acc, bias: functional.gelu(acc + bias)),
    "residual": Formula(torch.add),
    "residual_rms": Formula(residual_rms),
    "scaled": Formula(lambda acc, r: torch.diag(r) @ acc),
    "dequant": Formula(lambda acc, token, channel: torch.diag(token) @ acc @ torch.diag(channel)),
    "layernorm_stats": Formula(lambda acc, res: (acc + res, *statistics(acc + res))),
    "residual_gate": Formula(lambda acc, res, gate: gated_residual(acc, res, per_token(gate))),
    "qk_norm": Formula(lambda acc, gamma, eps: per_head_norm(acc, gamma, eps, 128), {"eps": number(1e-2)}),
    "qk_norm.qk_norm_64": Formula(lambda acc, gamma, eps: per_head_norm(acc, gamma, eps, 64), {"eps": number(1e-2)}),
    "rope": Formula(rotated),
    "scaled_rope": Formula(lambda acc, r, position, frequency: rotated(acc * column(r), position, frequency)),
    "qk_norm_rope": Formula(
        lambda acc, gamma, position, frequency, eps: rotated(per_head_norm(acc, gamma, eps, 128), position, frequency),
        {"eps": number(1e-2)},
    ),
    "logsumexp": Formula(lambda acc: torch.logsumexp(acc, -1)),
    "logsumexp_target": Formula(target_logit, {"target": targets}),
    "capped_logsumexp_target": Formula(
        lambda acc, cap, target: target_logit(cap * torch.tanh(acc / cap), target),
        {"cap": number(1.5), "target": targets},
    ),
    "cross_entropy": Formula(
        lambda acc, target: (*target_logit(acc, target), acc.sum(-1)),
        {"target": targets},
    ),
    "cross_entropy.token_loss": Formula(
        token_loss, {"target": targets, "smoothing": number(0.1), "z": number(1e-2), "classes": number(float(COLUMNS))}
    ),
    "amax": Formula(lambda acc: (acc, acc.abs().max())),
    "amax.token_amax": Formula(lambda acc: (acc, acc.abs().max(-1).values)),
    "layernorm_apply": Formula(normalized, {"var": positive(ROWS), "eps": number(1e-2)}),
    "adaln_apply": Formula(
        lambda x, mean, var, scale, shift, eps: normalized(x, mean, var, 1 + per_token(scale), per_token(shift), eps),
        {"var": positive(ROWS), "eps": number(1e-2)},
    ),
}


def draw(param: Param, generator: torch.Generator) -> Tensor:
    """Normal numbers in the shape of a parameter, in float64."""
    columns = [] if param.type.width is None else [int(param.type.width * COLUMNS)]
    rows = [SAMPLES] if param.type.kind is Kind.ROWS else [ROWS] if param.type.kind.has_rows else []
    shape = rows + columns
    if param.type.dtype is Dtype.I32:
        return torch.randint(0, COLUMNS, shape, generator=generator)
    if param.type.dtype is Dtype.BOOL:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs_of(key: str) -> Tensors:
    """The parameters of an epilogue by name."""
    generator = torch.Generator().manual_seed(0)
    overrides = FORMULAS[key].inputs if key in FORMULAS else {}
    values = {p.name: overrides.get(p.name, lambda g, p=p: draw(p, g))(generator) for p in EPILOGUES[key].params}
    return {name: v if isinstance(v, Tensor) else as_tensor(v) for name, v in values.items()}


def as_tensor(value: float) -> Tensor:
    """A scalar as a tensor, so that it has a gradient where it is no index."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def formula(key: str) -> Formula:
    """The formula of an epilogue."""
    assert key in FORMULAS, f"stdlib epilogue `{key}` has no formula here: add what it computes, in torch"
    return FORMULAS[key]


def by_formula(key: str, inputs: Mapping[str, Tensor]) -> Tensors:
    """The outputs as the formula has them."""
    outputs = formula(key).compute(*inputs.values())
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return {o.name: value for o, value in zip(EPILOGUES[key].outputs, outputs, strict=True)}


def assert_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Equal by relative 2-norm; integers exactly."""
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        value = got[name]
        assert value.shape == wanted.shape, name
        if not wanted.is_floating_point():
            assert torch.equal(value.to(wanted.dtype), wanted), name
            continue
        assert bool(wanted.isfinite().all()), f"{name}: the formula is not finite"
        error = (value - wanted).norm() / wanted.norm()
        assert error <= TOLERANCE, f"{name}: relative difference {error:.1e}"


def differentiable(key: str, inputs: Mapping[str, Tensor]) -> Tensors:
    """The inputs that have a gradient."""
    return {name: value for name, value in inputs.items() if value.is_floating_point()}


def cotangents_of(outputs: Mapping[str, Tensor]) -> Tensors:
    """A random cotangent for each output that can have one."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in outputs.items()
        if value.is_floating_point()
    }


def gradients_by_formula(key: str, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]) -> Tensors:
    """torch's autograd of the formula."""
    leaves = {
        name: value.detach().requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    outputs = by_formula(key, leaves)
    wanted = differentiable(key, leaves)
    found = torch.autograd.grad(
        [outputs[name] for name in cotangents],
        list(wanted.values()),
        list(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(wanted, found, strict=True))


each_epilogue = pytest.mark.parametrize("key", EPILOGUES)
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


# ---------------------------------------------------------------- what they compute


@each_epilogue
def test_computes_the_formula(key: str) -> None:
    inputs = inputs_of(key)
    assert_close(reference.run(EPILOGUES[key], inputs, extents=(ROWS, COLUMNS)), by_formula(key, inputs))


@each_epilogue
def test_computes_the_formula_tile_by_tile(key: str) -> None:
    inputs = inputs_of(key)
    tiled = reference.run_tiled(EPILOGUES[key], inputs, tile=TILE, extents=(ROWS, COLUMNS))
    assert_close(tiled, by_formula(key, inputs))


@each_epilogue
def test_the_derived_backward_is_the_formula_s(key: str) -> None:
    inputs = inputs_of(key)
    cotangents = cotangents_of(by_formula(key, inputs))
    derivative = derive(EPILOGUES[key], wrt=list(differentiable(key, inputs)))
    got = oracles.derived(derivative, inputs, cotangents, (ROWS, COLUMNS, SAMPLES))
    assert_close(got, gradients_by_formula(key, inputs, cotangents))


@each_epilogue
def test_a_call_from_pytorch_is_the_formula_differentiably(key: str) -> None:
    """As users call it, by name: on a GEMM where it has an accumulator and is not made for plain tensors."""
    file, name = name_of(key)
    function = codalang.load(file)[name]
    inputs = {
        name: value.requires_grad_() if value.is_floating_point() else value for name, value in inputs_of(key).items()
    }
    leaves = list(differentiable(key, inputs).values())
    result = function.hosted(*inputs.values(), extents=(ROWS, COLUMNS))
    outputs = EPILOGUES[key].outputs
    got = dict(zip([o.name for o in outputs], result if len(outputs) > 1 else (result,), strict=True))
    want = by_formula(key, inputs)
    assert_close(got, want)
    cotangents = cotangents_of(want)
    arguments = leaves, list(cotangents.values())
    options = {"allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad([got[name] for name in cotangents], *arguments, **options)
    theirs = torch.autograd.grad([want[name] for name in cotangents], *arguments, **options)
    names = list(differentiable(key, inputs))
    assert_close(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True)))


@pytest.mark.parametrize("key", [key for key, e in EPILOGUES.items() if e.accumulator is not None])
def test_on_a_gemm_it_is_the_formula_of_the_matmul(key: str) -> None:
    file, name = name_of(key)
    inputs = inputs_of(key)
    generator = torch.Generator().manual_seed(2)
    wide = next(iter(inputs.values())).shape[1]
    a = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    w = torch.randn(wide, 8, generator=generator, dtype=torch.float64)
    on_matmul = {**inputs, EPILOGUES[key].params[0].name: a @ w.T}
    result = codalang.load(file)[name](a, w, *list(inputs.values())[1:])
    outputs = EPILOGUES[key].outputs
    got = dict(zip([o.name for o in outputs], result if len(outputs) > 1 else (result,), strict=True))
    assert_close(got, by_formula(key, on_matmul))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu(x)": functional.relu,
    "relu_squared(x)": lambda x: functional.relu(x) ** 2,
    "silu(x)": functional.silu,
    "gelu(x)": functional.gelu,
    "gelu_tanh(x)": lambda x: functional.gelu(x, approximate="tanh"),
    "log_1_plus(exp(x))": lambda x: torch.log1p(x.exp()),
    "softplus(x)": lambda x: functional.softplus(x, threshold=1e9),
    "softcap(x, 2.5)": lambda x: 2.5 * torch.tanh(x / 2.5),
    "at_most(x, 1.5)": lambda x: x.clamp(max=1.5),
    "at_least(x, -1.5)": lambda x: x.clamp(min=-1.5),
    "clamp(x, -1.5, 2)": lambda x: x.clamp(-1.5, 2),
}


def test_every_function_to_import_is_tried() -> None:
    defined = re.findall(r"^fn (\w+)", (FILES[0].parent / "activations.coda").read_text(), re.MULTILINE)
    assert defined == [call.partition("(")[0] for call in FUNCTIONS]


@pytest.mark.parametrize("call", FUNCTIONS)
def test_a_function_to_import_is_its_formula_where_it_bends_too(call: str) -> None:
    """Values and gradients, at random places and at 0, the limits, infinities and NaN."""
    text = f"import activations\nepilogue f(x: tile[M, N]) {{\n    store y: tile[M, N] = {call}\n}}"
    special = torch.tensor([0.0, -0.0, 1.5, -1.5, 2.0, 1e-3, -1e-3, 30.0, -30.0, math.nan], dtype=torch.float64)
    x = torch.cat([special, 5 * torch.randn(246, generator=torch.Generator().manual_seed(3), dtype=torch.float64)])
    x = x.reshape(1, -1).requires_grad_()
    got, want = codalang.load(text).f.hosted(x), FUNCTIONS[call](x)
    cotangent = torch.randn_like(x)
    gradients = torch.autograd.grad(got, x, cotangent)[0], torch.autograd.grad(want, x, cotangent)[0]
    assert torch.equal(got.isnan(), want.isnan())
    for value, wanted in ((got, want), gradients):  # of what is no number there is no gradient to agree on
        value, wanted = value[~x.isnan()], wanted[~x.isnan()]
        assert (value - wanted).norm() <= TOLERANCE * wanted.norm()


def test_softplus_is_precise_where_it_is_small() -> None:
    """By relative error: in float32, log(1 + exp(x)) would be 0 from x = -17 on."""
    x = torch.linspace(-30, 5, 701, dtype=torch.float32).reshape(1, -1)
    want = functional.softplus(x.double(), threshold=1e9)
    assert ((codalang.load("softplus").softplus.hosted(x) - want) / want).abs().max() < 1e-4


def test_weights_of_the_half_split_convention_are_reordered_as_rope_says() -> None:
    heads, size, depth = 2, 128, 8
    half = size // 2
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(ROWS, depth, generator=generator, dtype=torch.float64)
    w = torch.randn(heads * size, depth, generator=generator, dtype=torch.float64)
    position = torch.tensor([0, 1, 2, 131072, 5, 7])
    frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    reordered = w.view(heads, 2, size // 2, depth).transpose(1, 2).reshape(heads * size, depth)
    got = codalang.load("rope").rope(a, reordered, position, frequency.repeat(heads))
    x = (a @ w.T).view(ROWS, heads, size)
    angle = torch.outer(position.double(), frequency).repeat(1, 2).unsqueeze(1)
    want = x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()
    scores = torch.einsum("mhd,nhd->hmn", want, want)
    got = got.view(ROWS, heads, size)
    assert (torch.einsum("mhd,nhd->hmn", got, got) - scores).norm() <= TOLERANCE * scores.norm()
    assert (got.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2) - want).norm() <= TOLERANCE * want.norm()


def test_cross_entropy_is_torch_s() -> None:
    """The two steps together, with smoothing, weights and an ignored token; logits with a common offset of 1e4."""
    library = codalang.load("cross_entropy")
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(COLUMNS, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    target, weight = targets(generator), torch.rand(ROWS, generator=generator, dtype=torch.float64)
    a_offset = torch.cat([a, torch.full((ROWS, 1), 100.0, dtype=torch.float64)], dim=1)
    w_offset = torch.cat([w, torch.full((COLUMNS, 1), 100.0, dtype=torch.float64)], dim=1)
    parts = library.cross_entropy(a_offset, w_offset, target)
    loss = library.token_loss.hosted(*parts, target, weight, 0.1, 0.0, float(COLUMNS), extents=(ROWS, 1)).sum()
    per_token = functional.cross_entropy(a @ w.T, target, label_smoothing=0.1, reduction="none")
    want = (weight * per_token).sum()
    assert abs(loss - want) <= 1e-7 * abs(want)  # an offset of 1e4 costs four digits
    for got, wanted in zip(torch.autograd.grad(loss, (a, w)), torch.autograd.grad(want, (a, w)), strict=True):
        assert (got - wanted).norm() <= 1e-7 * wanted.norm()
    ignored = library.cross_entropy(a, w, torch.full_like(target, -100))
    nothing = library.token_loss.hosted(*ignored, target - COLUMNS, weight, 0.1, 0.1, 2.0, extents=(ROWS, 1)).sum()
    assert nothing == 0 and not any(g.any() for g in torch.autograd.grad(nothing, (a, w)))


@pytest.mark.parametrize("columns", [1, 127, 129, 1000])
def test_no_column_beyond_the_last_is_counted(columns: int) -> None:
    """A vocabulary that no tile divides, all logits negative: a padding column of 0 would be the largest."""
    generator = torch.Generator().manual_seed(6)
    acc = -1000 - torch.rand(ROWS, columns, generator=generator, dtype=torch.float64)
    target = torch.randint(0, columns, (ROWS,), generator=generator)
    inputs = {"acc": acc, "target": target}
    for tile in ((2, 1), (3, 64), (64, 128)):
        got = reference.run_tiled(EPILOGUES["cross_entropy"], inputs, tile=tile)
        assert_close(got, by_formula("cross_entropy", inputs))
        assert_close(reference.run_tiled(EPILOGUES["amax"], {"acc": acc}, tile=tile), by_formula("amax", {"acc": acc}))


def test_statistics_are_precise_far_from_zero() -> None:
    """In float32, values near 1000 with a deviation of 1: a difference of squares would lose the variance."""
    generator = torch.Generator().manual_seed(7)
    x = (1000 + torch.randn(ROWS, 769, generator=generator)).float()
    got = codalang.load("layernorm_stats").layernorm_stats.hosted(x, torch.zeros_like(x))
    want = x.double().var(-1, correction=0)
    assert (got.var - want).norm() <= 1e-4 * want.norm()
    assert torch.equal(got.x, x)


# ---------------------------------------------------------------- as programs


@each_file
def test_a_file_is_laid_out_and_found_by_name(path: Path) -> None:
    assert format_source(read(path)) == path.read_text()
    assert path.stem in library_names()
    assert all(verify(e) is None for e in parse(read(path)).epilogues.values())


@each_epilogue
def test_nothing_in_it_is_superfluous(key: str) -> None:
    """Simplification finds nothing to do, and the printed form parses to the same."""
    assert simplify(EPILOGUES[key]) == EPILOGUES[key]
    (again,) = parse(print_epilogue(EPILOGUES[key])).epilogues.values()
    assert again == EPILOGUES[key]


# ---------------------------------------------------------------- kernels


def kernels(key: str) -> Iterator[KernelSpec]:
    """The forward, on a GEMM where there is one, and the derived backward.

    Raises CodaUnsupportedError where the lowering does not cover it.
    """
    derivative = derive(simplify(EPILOGUES[key]))
    if derivative.forward.accumulator is not None:
        yield forward_spec(derivative.forward, "bf16", 8192, 8192, 4096)
    yield backward_spec(derivative, "bf16")


def covered(key: str) -> list[KernelSpec]:
    """The kernels of an epilogue; skips the test where the lowering says that it does not cover one."""
    try:
        specs = list(kernels(key))
        for spec in specs:
            generate(spec)
    except CodaUnsupportedError as error:
        pytest.skip(f"the lowering does not cover it: {error.message}")
    return specs


def constructs(derivative: Derivative) -> set[object]:
    """What of the language a forward and its backward use: ops with their dtypes, kinds of inputs and outputs."""
    found: set[object] = set()
    for epilogue in (derivative.forward, derivative.backward):
        found |= {(node.op, node.type.dtype, node.type.kind is Kind.TILE) for node in epilogue.nodes}
        found |= {("in", p.type.kind, p.type.width, p.dtype) for p in epilogue.params}
        found |= {(type(o), o.type.kind, getattr(o, "how", None), o.dtype) for o in epilogue.outputs}
        found |= {(state.definition.name, state.type.kind) for state in epilogue.states}
    return found


def used_by(epilogue: Epilogue) -> set[object]:
    """What an epilogue uses; one without a derivative is chosen, and its test then says why it has none."""
    try:
        return constructs(derive(simplify(epilogue)))
    except CodaError:
        return {epilogue.name}


def representatives() -> list[str]:
    """Few epilogues that use between them every construct that the library uses: compiling takes seconds each.

    CODALANG_ALL=1 compiles all of them.
    """
    if os.environ.get("CODALANG_ALL"):
        return list(EPILOGUES)
    uses = {key: used_by(epilogue) for key, epilogue in EPILOGUES.items()}
    missing = set().union(*uses.values())
    chosen = []
    while missing:
        best = max(uses, key=lambda key: len(uses[key] & missing))
        chosen.append(best)
        missing -= uses[best]
    return chosen


@each_epilogue
def test_kernels_are_generated(key: str) -> None:
    assert all("class Epilogue" in generate(spec) for spec in covered(key))


@pytest.mark.parametrize("key", representatives())
def test_kernels_compile_without_spills(key: str, tmp_path: Path) -> None:
    for index, spec in enumerate(covered(key)):
        report = compile_object(spec, tmp_path / f"{index}.o")
        assert (report.spill_bytes, report.serialized) == (0, None)


@pytest.mark.parametrize("rows", [1024, 8192])  # a cooperative kernel, and one of ping-pong
def test_a_gated_forward_that_saves_does_not_spill(rows: int, tmp_path: Path) -> None:
    """Beside the accumulators, two tiles of different widths are on their way to memory."""
    forward = derive(simplify(EPILOGUES["scaled_swiglu"])).forward
    report = compile_object(forward_spec(forward, "bf16", rows, 28672, 4096), tmp_path / "kernel.o")
    assert (report.spill_bytes, report.serialized) == (0, None)
