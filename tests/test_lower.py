"""The lowering without a GPU: generated text against the reference, plans that fit, kernels that compile cleanly.

The generated class is run here with torch in the place of the device: its `apply` is plain Python over tuples of
registers, so a register may as well be a tensor of all the columns that the pairs of a matrix hold at that place.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import epilogues, inputs_for

from codalang.autodiff import derive
from codalang.bench import candidates
from codalang.errors import CodaUnsupportedError, Source
from codalang.ir import evaluate, reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Param, State
from codalang.ir.ops import OPS
from codalang.ir.simplify import simplify
from codalang.ir.types import Dtype, Kind, tile
from codalang.lower import blocks, load, plan, split
from codalang.lower.body import HOST_OPS, Fold
from codalang.lower.codegen import generate
from codalang.lower.compile import Report, compile_object
from codalang.lower.epilogue_loop import load_phase
from codalang.lower.factor import factored
from codalang.lower.spec import KernelSpec, Operand, base_width, folds, loaded_params, merge_spec, relative_width
from codalang.parser import parse

# One of each shape of kernel: gated, vectors in and out, several tiles.  test_stdlib covers the whole library.
STDLIB = [
    Path(__file__).parents[1] / "stdlib" / f"{name}.coda"
    for name in ("bias_gelu", "residual_rms", "scaled_swiglu", "swiglu")
]
EXTENTS = (4, 8, 2)  # columns a multiple of 4, so that each width has whole pairs; two samples
STRUCTURAL = {"even", "odd", "join"}
REDUCTIONS = {torch.sum: "sum", torch.amax: "max", torch.amin: "min"}


def spec_of(epilogue: Epilogue, operand: Operand | None, dtype: str = "bf16") -> KernelSpec:
    """A kernel of the epilogue with tiles in `dtype` and vectors in f32."""
    kinds = {Dtype.F32: "f32", Dtype.I32: "i32", Dtype.BOOL: "bool"}
    inputs = tuple(
        p.dtype or (dtype if p.type.kind is Kind.TILE and p.type.dtype is Dtype.F32 else kinds[p.type.dtype])
        for p in loaded_params(epilogue, operand is not None)
    )
    stores = tuple(s.dtype or dtype for s in epilogue.stores)
    return KernelSpec(epilogue, operand, inputs, stores, None)


def stdlib_epilogue(path: Path) -> Epilogue:
    """The epilogue of a standard-library file."""
    return parse(Source(path.name, path.read_text())).epilogues[path.stem]


# ---------------------------------------------------------------- generated text


def _lift(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """An op of the reference on tuples of registers; a static attribute comes as a last argument."""
    function = {**evaluate.OP_FUNCTIONS, "float": torch.Tensor.double}[name]

    def lifted(*operands: Any) -> tuple[torch.Tensor, ...]:
        registers = [o for o in operands if isinstance(o, tuple)]
        static = [o for o in operands if not isinstance(o, tuple)]
        lanes = max(len(r) for r in registers)
        return tuple(function(*(r[i if len(r) > 1 else 0] for r in registers), *static) for i in range(lanes))

    return lifted


def _join(a: tuple, b: tuple) -> tuple:
    lanes = max(len(a), len(b))
    return tuple(x for i in range(lanes) for x in (a[i if len(a) > 1 else 0], b[i if len(b) > 1 else 0]))


def _constant(value: float | int | bool) -> tuple[torch.Tensor, ...]:
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return (torch.tensor(value, dtype=dtypes[type(value)]),)


def _emulated_device() -> types.SimpleNamespace:
    """`codalang.lower.device` on torch tensors."""
    return types.SimpleNamespace(
        apply_op=_lift,
        even=lambda x: x[0::2],
        odd=lambda x: x[1::2],
        join=_join,
        one_plus_erf=lambda x: tuple(1 + torch.erf(v) for v in x),
        settled=lambda x: x,
        one_plus_tanh=lambda x: tuple(1 + torch.tanh(v) for v in x),
        constant=_constant,
        REDUCTIONS={how: function for function, how in REDUCTIONS.items()},
    )


@attrs.frozen
class EmulatedHost:
    """What a kernel's host offers a body, for registers that are matrices [M, pairs]."""

    pairs: int

    def row_index(self) -> tuple[torch.Tensor, ...]:
        return (torch.arange(EXTENTS[0])[:, None],)

    def col_index(self, registers: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.arange(self.pairs) * registers + r for r in range(registers))

    def group_sum(self, values: tuple, size: int, registers: int) -> tuple:
        return self._grouped("group_sum", values, size)

    def group_max(self, values: tuple, size: int, registers: int) -> tuple:
        return self._grouped("group_max", values, size)

    def _grouped(self, name: str, values: tuple, size: int) -> tuple:
        columns = evaluate.OP_FUNCTIONS[name](self.columns(values, len(values)), size)
        return tuple(columns[..., r :: len(values)] for r in range(len(values)))

    def columns(self, values: tuple, registers: int) -> torch.Tensor:
        """A value's registers as a matrix [M, registers * pairs]."""
        full = [values[i if len(values) > 1 else 0].expand(EXTENTS[0], self.pairs) for i in range(registers)]
        return torch.stack(full, dim=-1).reshape(EXTENTS[0], -1)


def _samples() -> list[slice]:
    """The rows of each sample."""
    size = EXTENTS[0] // EXTENTS[2]
    return [slice(start, start + size) for start in range(0, EXTENTS[0], size)]


def _folded(partial: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a reduction of whole matrices."""
    if partial.kind == "rows":
        parts = [_folded(attrs.evolve(partial, kind="row"), [v[rows] for v in values]) for rows in _samples()]
        return [torch.stack(results) for results in zip(*parts, strict=True)]
    axes = {"col": (1,), "row": (0,), "scalar": (0, 1)}[partial.kind]
    if partial.picks:
        columns, neutral = torch.arange(values[0].shape[1]), blocks.NEUTRAL[REDUCTIONS[partial.fold]]
        values = [torch.where(columns == values[1], values[0], neutral)]
    if not isinstance(partial.fold, Fold):
        return [partial.fold(values[0], axes)]
    elements = [v.movedim(axes[0], 0) if len(axes) == 1 else v.reshape(-1) for v in values]
    carried = tuple(_constant(v)[0].expand(elements[0].shape[1:]) for v in partial.fold.initial)
    for element in zip(*elements, strict=True):
        carried = tuple(c[0] for c in partial.fold.update(*((c,) for c in carried), *((e,) for e in element)))
    return [r[0] for r in partial.fold.finalize(*((c,) for c in carried))]


def run_generated(source: str, spec: KernelSpec, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Execute the generated class on matrices; the outputs by name."""
    scope: dict[str, Any] = {"device": _emulated_device()}
    exec(compile(source.replace("from codalang.lower import device\n", ""), "generated", "exec"), scope)
    body, epilogue = scope["Epilogue"], spec.epilogue

    def registers(param: Param) -> tuple[torch.Tensor, ...]:
        tensor = torch.as_tensor(inputs[param.name])
        tensor = tensor.double() if param.type.dtype is Dtype.F32 else tensor
        if param.type.kind is Kind.ROWS:
            tensor = tensor.repeat_interleave(EXTENTS[0] // EXTENTS[2], dim=0)
        if param.type.width is None:
            return (tensor.reshape(-1, 1) if tensor.ndim else tensor,)
        lanes = int(2 * relative_width(epilogue, param))
        return tuple(tensor[..., lane::lanes] for lane in range(lanes))

    on_gemm = spec.operand is not None
    params = ([epilogue.params[0]] if on_gemm else []) + list(loaded_params(epilogue, on_gemm))
    host = EmulatedHost(int(EXTENTS[1] * base_width(epilogue)) // 2)
    tiles, vectors, reduced = body.apply(host, *(registers(p) for p in params))
    outputs = {t.name: host.columns(v, t.registers) for t, v in zip(body.TILES, tiles, strict=True)}
    for vector, value in zip(body.VECTORS, vectors, strict=True):
        whole = host.columns(value, vector.registers)
        outputs[vector.name] = {"col": whole[:, 0], "row": whole[0], "scalar": whole[0, 0]}[vector.kind]
    for group, partial, values in zip(folds(epilogue), body.PARTIALS, reduced, strict=True):
        results = _folded(partial, [host.columns(v, partial.registers) for v in values])
        assert partial.names == tuple(output.name for output in group)
        outputs |= {o.name: results[o.result if isinstance(o, State) else 0] for o in group}
    return outputs


# equal but for rounding, and equal when common factors are out: which way it goes is decided by `factor`
ON_THE_EDGE = parse(
    """
    epilogue edge(a: tile[M, N], b: tile[M, N], c: tile[M, N], d: tile[M, N]) {
        store y: tile[M, N] = where(a*c*b + b*d*a <= (c + d)*a*b, 1, 0)
    }
    """
).epilogues["edge"]


@given(epilogue=epilogues(max_steps=12), seed=st.integers(0, 2**31), on_gemm=st.booleans())
@example(ON_THE_EDGE, 0, False)
def test_generated_code_computes_what_the_ir_says(epilogue: Epilogue, seed: int, on_gemm: bool) -> None:
    """With common factors taken out, which is another matter: see tests/test_factor.py."""
    epilogue = simplify(epilogue)
    spec = spec_of(epilogue, Operand("bf16", "k", "k") if on_gemm else None)
    try:
        source = generate(spec)
    except CodaUnsupportedError as error:
        assert "times as wide" in error.message
        return
    inputs = inputs_for(epilogue, EXTENTS, seed)
    truth = reference.run(factored(epilogue), inputs, dtype=torch.float64, extents=EXTENTS)
    ours = run_generated(source, spec, inputs)
    assert set(truth) <= set(ours)
    for name, value in truth.items():
        scale = value.double().norm() + 1
        assert (ours[name].double() - value.double()).norm() <= 1e-9 * scale, f"{name} of\n{source}"


def test_generated_code_is_readable() -> None:
    path = next(p for p in STDLIB if p.stem == "scaled_swiglu")
    body = generate(spec_of(stdlib_epilogue(path), Operand("bf16", "k", "k"))).split("    @staticmethod\n")[1]
    assert re.sub(r"scaled_swiglu\.coda:\d+", "scaled_swiglu.coda:LINE", body) == (
        "    def apply(host, acc, r):\n"
        "        # scaled_swiglu.coda:LINE: let (gate, up) = split(acc * r)\n"
        "        v2 = mul(acc, r)\n"
        "        gate = even(v2)\n"
        "        # scaled_swiglu.coda:LINE: store y: tile[M, N/2] = silu(gate) * up\n"
        "        v4 = sigmoid(gate)\n"
        "        v5 = mul(gate, v4)\n"
        "        # scaled_swiglu.coda:LINE: let (gate, up) = split(acc * r)\n"
        "        up = odd(v2)\n"
        "        # scaled_swiglu.coda:LINE: store y: tile[M, N/2] = silu(gate) * up\n"
        "        v7 = mul(v5, up)\n"
        "        return (v7,), (), ()\n"
    )


@pytest.mark.parametrize("name", ["lambda", "class", "constant", "mul", "device", "Tile", "print", "v1", "apply"])
def test_names_of_python_and_of_the_generated_module_are_free_to_use(name: str) -> None:
    builder = EpilogueBuilder("names", ("M", "N"))
    acc, other = builder.param("acc", tile()), builder.param(name, tile())
    builder.store("y", builder.op("mul", acc, other), tile())
    epilogue = builder.finish()
    spec = spec_of(epilogue, Operand("bf16", "k", "k"))
    inputs = inputs_for(epilogue, EXTENTS, 0)
    y = run_generated(generate(spec), spec, inputs)["y"]
    assert torch.equal(y, inputs["acc"] * inputs[name])


def test_a_quarter_of_the_accumulator_is_refused_with_its_name() -> None:
    builder = EpilogueBuilder("narrow", ("M", "N"))
    wide = builder.param("wide", tile(2))
    half = builder.op("even", builder.op("even", wide))
    builder.store("y", half, tile(Fraction(1, 2)))
    with pytest.raises(CodaUnsupportedError, match="`y` is 1/4 times as wide as the accumulator of `narrow`"):
        generate(spec_of(builder.finish(), Operand("bf16", "k", "k")))


def test_every_op_has_a_device_function() -> None:
    from codalang.lower import device

    assert set(device.DEVICE_OPS) | STRUCTURAL | set(HOST_OPS) == set(OPS)
    assert all(hasattr(device, name) for name in STRUCTURAL)


# ---------------------------------------------------------------- plans


def all_kernels() -> list[tuple[str, KernelSpec]]:
    """Forward on a GEMM, derived backward on a GEMM and hosted, of these."""
    kernels = []
    for path in STDLIB:
        derivative = derive(stdlib_epilogue(path))
        kernels.append((f"{path.stem}-forward", spec_of(derivative.forward, Operand("bf16", "k", "k"))))
        kernels.append((f"{path.stem}-backward-gemm", spec_of(derivative.backward, Operand("f16", "k", "mn"), "f16")))
        kernels.append((f"{path.stem}-backward-hosted", spec_of(derivative.backward, None)))
    return kernels


KERNELS = all_kernels()
ON_GEMM = [(name, spec) for name, spec in KERNELS if spec.operand]


@given(
    kernel=st.sampled_from(ON_GEMM),
    m=st.integers(1, 300_000),
    n=st.integers(1, 300_000),
    k=st.integers(1, 30_000),
)
def test_a_plan_fits_and_its_parts_divide(kernel: tuple[str, KernelSpec], m: int, n: int, k: int) -> None:
    _, spec = kernel
    config = plan.choose(spec, m, n, k)
    assert plan.shared_bytes(spec, config) <= plan.SMEM_CAPACITY
    assert config.stages >= 2
    assert config.tile[1] % config.subtile == 0
    assert config.tile[0] % (64 if config.ping_pong else 128) == 0


@pytest.mark.parametrize("kernel", ON_GEMM, ids=lambda kernel: kernel[0])
def test_every_tile_begins_at_the_first_slab(kernel: tuple[str, KernelSpec]) -> None:
    """A load is waited for at a phase, and a slab is written after a wait, that are known only if every tile uses each
    stage equally often."""
    _, spec = kernel
    for tiling in (*plan.TILINGS, *split.TILINGS):
        for config in split.configurations(spec, tiling, 64):
            for stages in filter(None, (config.load_stages, config.store_stages)):
                assert config.steps % stages == 0 and config.is_in_step, config
    for config in candidates.all_for(spec, 8192, 4096, 4096):
        assert config.is_in_step, config


@pytest.mark.parametrize(("steps", "stages"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (8, 2), (8, 4), (12, 2), (7, 1)])
def test_loads_are_waited_for_in_their_phase(steps: int, stages: int) -> None:
    """As a warp requests and waits: the first stages of a tile, then, after each step, the one that takes its slab."""
    arrived = [0] * stages  # loads that each stage has had
    for visit in range(5):
        pending = {}
        for step in range(steps):
            for requested in range(stages) if step == 0 else (step - 1 + stages,):
                if requested < steps:
                    pending[requested] = arrived[requested % stages]
                    arrived[requested % stages] += 1
            assert load_phase(visit, steps, step, stages) == pending.pop(step) % 2


def test_a_configuration_out_of_step_is_refused(tmp_path: Path) -> None:
    _, spec = ON_GEMM[0]
    config = attrs.evolve(plan.choose(spec, 8192, 4096, 4096), tile=(64, 32), ping_pong=True, cluster=(1, 1))
    config = attrs.evolve(config, subtile=32, load_stages=0, store_stages=2)
    assert (config.steps, config.is_in_step) == (1, False)
    with pytest.raises(CodaUnsupportedError, match="must divide its 1 steps"):
        compile_object(attrs.evolve(spec, config=config), tmp_path / "kernel.o")


def test_large_problems_get_large_tiles_and_small_ones_small() -> None:
    _, spec = ON_GEMM[0]
    assert plan.choose(spec, 8192, 28672, 4096).tile in ((192, 128), (128, 192), (128, 256))
    assert plan.choose(spec, 1, 4096, 4096).tile[0] == 64


def test_an_epilogue_of_too_many_tiles_is_refused() -> None:
    builder = EpilogueBuilder("greedy", ("M", "N"))
    total = builder.param("acc", tile())
    for i in range(12):
        total = builder.op("add", total, builder.op("even", builder.param(f"x{i}", tile(2), "f32")))
        builder.store(f"y{i}", total, tile(), "f32")
    with pytest.raises(CodaUnsupportedError, match="too many tiles"):
        plan.choose(spec_of(builder.finish(), Operand("bf16", "k", "k")), 4096, 4096, 4096)


# ---------------------------------------------------------------- compiled kernels


@pytest.mark.parametrize(("name", "spec"), KERNELS, ids=[name for name, _ in KERNELS])
def test_compiles_for_sm90a_without_spills_or_serialized_wgmma(name: str, spec: KernelSpec, tmp_path: Path) -> None:
    if spec.operand:
        spec = attrs.evolve(spec, config=plan.choose(spec, 8192, 8192, 4096))
    path = tmp_path / "kernel.o"
    report = compile_object(spec, path)
    assert path.stat().st_size > 10_000
    assert (report.spill_bytes, report.serialized) == (0, None)


def test_the_tensor_cores_and_the_copy_engine_are_used(tmp_path: Path) -> None:
    spec = attrs.evolve(ON_GEMM[0][1], config=plan.choose(ON_GEMM[0][1], 8192, 8192, 4096))
    ptx = compile_object(spec, tmp_path / "kernel.o", keep_ptx=True).ptx
    assert ptx is not None
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier.try_wait"):
        assert instruction in ptx
    assert "div.rn" not in ptx  # IEEE division costs a hundred instructions
    assert ".local" not in ptx


def test_the_ptx_leaves_nothing_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    compile_object(KERNELS[2][1], tmp_path / "out" / "kernel.o", keep_ptx=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


# ---------------------------------------------------------------- the full language

FULL = {
    "cross_entropy": """
epilogue cross_entropy(acc: tile[M, N], target: col[M]: i64) {
    state lse: col[M] = online_logsumexp(acc)
    reduce logit: col[M] = sum(where(col_index() == target, acc, 0))
    state (top, at): col[M] = argmax(acc, col_index())
}""",
    "head_norm": """
epilogue head_norm(acc: tile[M, N], gamma: row[N]) {
    let scale = rsqrt(group_sum(acc * acc, 128) / 128 + 1e-6)
    store y: tile[M, N] = acc * scale * gamma
    store top: tile[M, N] = group_max(abs(acc), 16)
}""",
    "rope": """
epilogue rope(acc: tile[M, N], position: col[M]: i32, frequency: row[N/2]) {
    let (x, y) = split(acc)
    let (u, v) = rotate(x, y, float(position) * frequency)
    store z: tile[M, N] = join(u, v)
}""",
    "masked": """
epilogue masked(acc: tile[M, N], keep: tile[M, N]: bool, live: row[N]: bool, bias: row[N], s: scalar) {
    let x = where(keep and live, pow(acc, 3) * s, cast(acc, bf16))
    store x: tile[M, N]
    store doubled: row[N] = bias * 2
    store seen: col[M] = float(row_index())
    reduce highest: row[N] = max(x)
    reduce lowest: scalar = min(x)
    state (mean, variance): row[N] = welford(x)
}""",
}


def full_kernels() -> list[tuple[str, KernelSpec]]:
    """Each of FULL on a GEMM and hosted, and the kernels that merge its stateful transforms."""
    kernels = []
    for name, text in FULL.items():
        epilogue = parse(text).epilogues[name]
        on_gemm = spec_of(epilogue, Operand("bf16", "k", "k"))
        kernels += [(f"{name}-gemm", on_gemm), (f"{name}-hosted", spec_of(epilogue, None))]
        for index, group in enumerate(folds(epilogue)):
            if isinstance(group[0], State):
                kernels.append((f"{name}-merge-{group[0].name}", attrs.evolve(on_gemm, merge=index)))
    return kernels


FULL_KERNELS = full_kernels()


@pytest.mark.parametrize(("name", "spec"), FULL_KERNELS, ids=[name for name, _ in FULL_KERNELS])
def test_the_full_language_compiles_without_spills(name: str, spec: KernelSpec, tmp_path: Path) -> None:
    if spec.operand and spec.merge is None:
        spec = attrs.evolve(spec, config=plan.choose(spec, 8192, 8192, 4096))
    report = compile_object(spec, tmp_path / "kernel.o", keep_ptx=True)
    assert (report.spill_bytes, report.serialized) == (0, None)
    assert report.ptx is not None
    assert ".local" not in report.ptx  # sines of large angles would take a table in local memory


def test_groups_are_evaluated_whole() -> None:
    epilogue = parse(FULL["head_norm"]).epilogues["head_norm"]
    spec = spec_of(epilogue, Operand("bf16", "k", "k"))
    config = plan.choose(spec, 8192, 8192, 4096)
    assert config.subtile % 128 == 0
    assert config.tile[1] % 128 == 0
    assert "UNIT = 128" in generate(spec)


def test_results_of_one_transform_are_one_fold() -> None:
    text = "epilogue e(acc: tile[M, N]) { state (m, v): col[M] = welford(acc)\n reduce s: col[M] = sum(acc) }"
    groups = folds(parse(text).epilogues["e"])
    assert [tuple(o.name for o in group) for group in groups] == [("m", "v"), ("s",)]


def test_a_slow_kernel_is_told_of() -> None:
    spec = KERNELS[0][1]
    with pytest.warns(load.CodaSlowKernelWarning, match="spills 8 bytes .* and serializes"):
        load._say_what_is_slow(spec, Report(168, 8, "C7517"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load._say_what_is_slow(spec, Report(168, 0, None))


def test_groups_that_do_not_fit_are_named() -> None:
    text = "epilogue wide(acc: tile[M, N]) { store y: tile[M, N] = acc * group_sum(acc * acc, 1024) }"
    with pytest.raises(CodaUnsupportedError, match="groups of 1024 columns"):
        plan.choose(spec_of(parse(text).epilogues["wide"], Operand("bf16", "k", "k")), 4096, 4096, 4096)


def test_a_target_of_64_bits_is_narrowed_to_the_nearest(tmp_path):
    """Truncated, 2**32 + 3 would be column 3."""
    e = parse(FULL["cross_entropy"]).epilogues["cross_entropy"]
    spec = KernelSpec(e, None, ("f32", "i64"), (), None)
    ptx = compile_object(spec, tmp_path / "kernel.o", keep_ptx=True).ptx
    assert re.search(r"max\.s64\s+%rd\d+, %rd\d+, -2147483648;\s+min\.s64\s+%rd\d+, %rd\d+, 2147483647;", ptx)


def test_conditions_on_literals_compile(tmp_path: Path) -> None:
    """What the simplifier leaves of them, or nobody simplified: the DSL takes no Python value for a condition."""
    text = """
state counted(x) {
    carry n: i32 = 0, s = 0
    update { return (n + 1, where(n > 3, s + x, s)) }
    merge { return (a_n + b_n, where(a_n > b_n, a_s, a_s + b_s)) }
    finalize (s) = (s)
}
epilogue e(acc: tile[M, N]) {
    store y: tile[M, N] = where(1 < 2 and not (0.5 > 1), acc * float(true), max(1, 2))
    store z: tile[M, N] = where(acc > 0 or true, where(not false, acc, 1), where(true and acc < 1, 1, 2))
    state s: col[M] = counted(acc)
    state r: row[N] = counted(where(true, 1, 2))
}"""
    epilogue = parse(text).epilogues["e"]
    for operand in (Operand("bf16", "k", "k"), None):
        spec = spec_of(epilogue, operand)
        if operand:
            spec = attrs.evolve(spec, config=plan.choose(spec, 512, 512, 512))
        assert compile_object(spec, tmp_path / "kernel.o").spill_bytes == 0
    compile_object(merge_spec(epilogue.states[0]), tmp_path / "merge.o")


BARE = {
    "halves": "let (e, o) = split(acc)\n store y: tile[M, N/2] = e\n store z: tile[M, N/2] = o",
    "twice": "store y: tile[M, 2*N] = join(acc, acc)",
    "negated": "store y: tile[M, N] = -acc",
    "chosen": "store y: tile[M, N] = where(acc > 0, acc, -acc)",
}


@pytest.mark.parametrize("body", BARE.values(), ids=list(BARE))
def test_a_bare_accumulator_does_not_serialize_the_mainloop(body: str, tmp_path: Path) -> None:
    epilogue = parse(f"epilogue bare(acc: tile[M, N]) {{\n {body}\n}}").epilogues["bare"]
    spec = spec_of(epilogue, Operand("bf16", "k", "k"))
    report = compile_object(attrs.evolve(spec, config=plan.choose(spec, 8192, 8192, 4096)), tmp_path / "kernel.o")
    assert report.serialized is None and "settled" in generate(spec)


@pytest.mark.parametrize("body", ["acc", "2 * acc", "abs(acc)"])
def test_what_computes_with_the_accumulator_is_left_alone(body: str) -> None:
    epilogue = parse(f"epilogue fine(acc: tile[M, N]) {{ store y: tile[M, N] = {body} }}").epilogues["fine"]
    assert "settled" not in generate(spec_of(epilogue, Operand("bf16", "k", "k")))


@pytest.mark.parametrize("operand", [Operand("bf16", "k", "k"), None], ids=["gemm", "hosted"])
@pytest.mark.parametrize("result", ["scalar", "col[M]", "row[N]"])
def test_a_sum_of_zeros_compiles(result: str, operand: Operand | None, tmp_path: Path) -> None:
    """Nothing in it depends on the data, and a pass of the device compiler must not see that."""
    epilogue = parse(f"epilogue zeros(acc: tile[M, N]) {{ reduce s: {result} = sum(0) }}").epilogues["zeros"]
    spec = spec_of(epilogue, operand)
    spec = attrs.evolve(spec, config=plan.choose(spec, 8192, 8192, 4096) if operand else None)
    compile_object(spec, tmp_path / "kernel.o")
