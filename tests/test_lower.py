"""The lowering without a GPU: generated text against the reference, plans that fit, kernels that compile cleanly.

The generated class is run here with torch in the place of the device: its `apply` is plain Python over tuples of
registers, so a register may as well be a tensor of all the columns that the pairs of a matrix hold at that place.
"""

from __future__ import annotations

import re
import types
from fractions import Fraction
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import epilogues, inputs_for

from codalang.autodiff import derive
from codalang.errors import CodaUnsupportedError, Source
from codalang.ir import reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.ops import OPS
from codalang.ir.simplify import simplify
from codalang.ir.types import Kind, tile
from codalang.lower import plan
from codalang.lower.codegen import generate
from codalang.lower.compile import compile_object
from codalang.lower.spec import KernelSpec, Operand, base_width, loaded_params, relative_width
from codalang.parser import parse

# One of each shape of kernel: gated, vectors in and out, several tiles.  test_stdlib covers the whole library.
STDLIB = [
    Path(__file__).parents[1] / "stdlib" / f"{name}.coda"
    for name in ("bias_gelu", "residual_rms", "scaled_swiglu", "swiglu")
]
EXTENTS = (3, 8)  # columns a multiple of 4, so that each width has whole pairs
STRUCTURAL = {"even", "odd", "join"}


def spec_of(epilogue: Epilogue, operand: Operand | None, dtype: str = "bf16") -> KernelSpec:
    """A kernel of the epilogue with tiles in `dtype` and vectors in f32."""
    inputs = tuple(
        p.dtype or (dtype if p.type.kind is Kind.TILE else "f32") for p in loaded_params(epilogue, operand is not None)
    )
    stores = tuple(s.dtype or dtype for s in epilogue.stores)
    return KernelSpec(epilogue, operand, inputs, stores, None)


def stdlib_epilogue(path: Path) -> Epilogue:
    """The epilogue of a standard-library file."""
    return parse(Source(path.name, path.read_text())).epilogues[path.stem]


# ---------------------------------------------------------------- generated text


def _emulated_device() -> types.SimpleNamespace:
    """`codalang.lower.device` on torch tensors."""

    def lift(function):  # noqa: ANN001, ANN202
        def lifted(*operands):  # noqa: ANN002, ANN202
            lanes = max(len(o) for o in operands)
            return tuple(function(*(o[i if len(o) > 1 else 0] for o in operands)) for i in range(lanes))

        return lifted

    def join(a, b):  # noqa: ANN001, ANN202
        return tuple(
            x for i in range(max(len(a), len(b))) for x in (a[i if len(a) > 1 else 0], b[i if len(b) > 1 else 0])
        )

    return types.SimpleNamespace(
        apply_op=lambda name: lift(reference.OP_FUNCTIONS[name]),
        even=lambda x: x[0::2],
        odd=lambda x: x[1::2],
        join=join,
        constant=lambda v: (torch.tensor(v, dtype=torch.bool if isinstance(v, bool) else torch.float64),),
    )


def run_generated(source: str, spec: KernelSpec, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Execute the generated class on f64 tensors: stores as [M, w*N], reductions over the pairs' values."""
    text = source.replace("from codalang.lower import device\n", "")
    scope: dict[str, object] = {"device": _emulated_device()}
    exec(compile(text, "generated", "exec"), scope)
    body = scope["Epilogue"]
    epilogue = spec.epilogue

    def registers(param):  # noqa: ANN001, ANN202
        tensor = torch.as_tensor(inputs[param.name], dtype=torch.float64)
        if param.type.width is None:
            return (tensor.reshape(-1, 1) if tensor.ndim else tensor,)
        lanes = int(2 * relative_width(epilogue, param))
        return tuple(tensor[..., lane::lanes] for lane in range(lanes))

    on_gemm = spec.operand is not None
    params = ([epilogue.params[0]] if on_gemm else []) + list(loaded_params(epilogue, on_gemm))
    tiles, reduced = body.apply(*(registers(p) for p in params))  # type: ignore[attr-defined]
    m, columns = EXTENTS[0], int(EXTENTS[1] * base_width(epilogue))
    outputs = []
    for declared, value in zip((*body.TILES, *body.PARTIALS), (*tiles, *reduced), strict=True):  # type: ignore[attr-defined]
        lanes = declared.registers
        full = [value[i if len(value) > 1 else 0].to(torch.float64).expand(m, columns // 2) for i in range(lanes)]
        outputs.append(torch.stack(full, dim=-1).reshape(m, -1))
    axes = {"col": 1, "row": 0, "scalar": (0, 1)}
    first = len(body.TILES)  # type: ignore[attr-defined]
    return outputs[:first] + [
        o.sum(axes[p.kind])
        for o, p in zip(outputs[first:], body.PARTIALS, strict=True)  # type: ignore[attr-defined]
    ]


@given(epilogue=epilogues(max_steps=12), seed=st.integers(0, 2**31), on_gemm=st.booleans())
def test_generated_code_computes_what_the_ir_says(epilogue: Epilogue, seed: int, on_gemm: bool) -> None:
    epilogue = simplify(epilogue)
    spec = spec_of(epilogue, Operand("bf16", "k", "k") if on_gemm else None)
    try:
        source = generate(spec)
    except CodaUnsupportedError as error:
        assert "times as wide" in error.message
        return
    inputs = inputs_for(epilogue, EXTENTS, seed)
    truth = reference.run(epilogue, inputs, dtype=torch.float64, extents=EXTENTS)
    ours = run_generated(source, spec, inputs)
    named = [o.name for o in (*epilogue.stores, *epilogue.reductions)]
    for name, value in zip(named, ours, strict=True):
        scale = truth[name].norm() + 1
        assert (value - truth[name]).norm() <= 1e-12 * scale, f"{name} of\n{source}"


def test_generated_code_is_readable() -> None:
    path = next(p for p in STDLIB if p.stem == "scaled_swiglu")
    body = generate(spec_of(stdlib_epilogue(path), Operand("bf16", "k", "k"))).split("    @staticmethod\n")[1]
    assert re.sub(r"scaled_swiglu\.coda:\d+", "scaled_swiglu.coda:LINE", body) == (
        "    def apply(acc, r):\n"
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
        "        return (v7,), ()\n"
    )


@pytest.mark.parametrize("name", ["lambda", "class", "constant", "mul", "device", "Tile", "print", "v1", "apply"])
def test_names_of_python_and_of_the_generated_module_are_free_to_use(name: str) -> None:
    builder = EpilogueBuilder("names", ("M", "N"))
    acc, other = builder.param("acc", tile()), builder.param(name, tile())
    builder.store("y", builder.op("mul", acc, other), tile())
    epilogue = builder.finish()
    spec = spec_of(epilogue, Operand("bf16", "k", "k"))
    inputs = inputs_for(epilogue, EXTENTS, 0)
    (y,) = run_generated(generate(spec), spec, inputs)
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

    assert set(device.DEVICE_OPS) | STRUCTURAL == set(OPS)
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
    teams_rows = 64 if config.ping_pong else 128
    steps = config.tile[1] // config.subtile * (config.tile[0] // teams_rows)
    assert config.tile[0] % teams_rows == 0
    # a load stage is waited for at a phase that is known only if every tile uses it equally often
    assert config.load_stages == 0 or steps % config.load_stages == 0


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
