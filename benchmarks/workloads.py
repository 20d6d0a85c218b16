"""What the benchmarks time: GEMMs and epilogues at Llama-3-8B shapes with 8192 tokens.

Each workload is a set of calls on the same tensors: ours, cuBLAS's GEMM alone, and torch.compile of the same maths.
"The same maths" is exact: it is the reference interpreter's run of the same epilogue, traced to a graph and given to
torch.compile, so that what is fused is the compiler's choice and nothing is written twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import codalang.parser
from codalang.autodiff import Derivative, derive
from codalang.errors import Source
from codalang.ir import reference
from codalang.ir.epilogue import Epilogue
from codalang.ir.types import Kind
from codalang.lower import run

Call = Callable[[], object]
Extents = tuple[int, int]

STDLIB = Path(__file__).parents[1] / "stdlib"
PLAIN = codalang.parser.parse("epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["plain"]

TOKENS = 8192
# name -> (M, N, K): the gate/up, down and QKV projections, and a square one.
GEMMS = {
    "gate/up": (TOKENS, 28672, 4096),
    "down": (TOKENS, 4096, 14336),
    "QKV": (TOKENS, 6144, 4096),
    "square": (8192, 8192, 8192),
}
# How A and B lie in memory: forward, gradient of the input, gradient of the weight.
MAJORS = {"TN": ("k", "k"), "NN": ("k", "mn"), "NT": ("mn", "mn")}

# epilogue -> (M, N, K) of its forward, and K of the GEMM that hosts its backward.  N is the forward accumulator's.
EPILOGUES = {
    "swiglu": ((TOKENS, 28672, 4096), 4096),
    "scaled_swiglu": ((TOKENS, 28672, 4096), 4096),
    "residual_rms": ((TOKENS, 4096, 14336), 28672),
    "bias_gelu": ((TOKENS, 14336, 4096), 4096),
}
FORMS = ("forward on GEMM", "backward on GEMM", "backward hosted")


@attrs.frozen
class Workload:
    """Calls to compare, by implementation; `flops` of its GEMM and `bytes` its epilogue must move, for the report."""

    name: str
    calls: dict[str, Call]
    flops: int
    bytes: int


@cache
def derived(name: str) -> Derivative:
    """The derivative of a standard-library epilogue with respect to all its parameters."""
    path = STDLIB / f"{name}.coda"
    return derive(codalang.parser.parse(Source(str(path), path.read_text())).epilogues[name])


def operand(rows: int, k: int, major: str, scale: float = 1.0) -> Tensor:
    """A random bf16 [rows, k], contiguous along k or along the rows."""
    data = torch.randn((rows, k) if major == "k" else (k, rows), device="cuda", dtype=torch.bfloat16) * scale
    return data if major == "k" else data.t()


def gemms() -> list[tuple[str, str]]:
    """Every shape in every major order."""
    return list(itertools.product(GEMMS, MAJORS))


def gemm(name: str, majors: str) -> Workload:
    """A plain GEMM."""
    m, n, k = GEMMS[name]
    a = operand(m, k, MAJORS[majors][0])
    b = operand(n, k, MAJORS[majors][1], k**-0.5)
    calls: dict[str, Call] = {"codalang": lambda: run.gemm(PLAIN, a, b, {}), "cublas": lambda: torch.matmul(a, b.t())}
    return Workload(f"gemm {name} {majors}", calls, 2 * m * n * k, 2 * m * n)


def epilogues() -> list[tuple[str, str]]:
    """Every epilogue in every form."""
    return list(itertools.product(EPILOGUES, FORMS))


def epilogue(name: str, form: str, *, compiled: bool) -> Workload:
    """An epilogue on its host, with torch.compile beside it if `compiled`."""
    (m, n, k), k_backward = EPILOGUES[name]
    derivative = derived(name)
    program = derivative.forward if form == "forward on GEMM" else derivative.backward
    inputs = make_inputs(program, m, n)
    title = f"{name} {form}"
    if form == "backward hosted":
        calls: dict[str, Call] = {"codalang": lambda: run.hosted(program, inputs, extents=(m, n))}
        if compiled:
            calls["torch.compile"] = _compiled_hosted(program, inputs, (m, n))
        return Workload(title, calls, 0, tile_bytes(program, m, n, on_gemm=False))
    k = k if form == "forward on GEMM" else k_backward
    del inputs[program.params[0].name]
    columns = int(n * (program.params[0].type.width or 1))
    a = operand(m, k, "k")
    b = operand(columns, k, "k" if form == "forward on GEMM" else "mn", k**-0.5)
    calls = {"codalang": lambda: run.gemm(program, a, b, inputs), "cublas alone": lambda: torch.matmul(a, b.t())}
    if compiled:
        calls["cublas + torch.compile"] = _compiled_on_gemm(program, a, b, inputs, (m, n))
    return Workload(title, calls, 2 * m * columns * k, tile_bytes(program, m, n, on_gemm=True))


def make_inputs(epilogue: Epilogue, m: int, n: int) -> dict[str, Tensor]:
    """A random tensor for each parameter: tiles in bf16, the rest in f32."""
    inputs = {}
    for param in epilogue.params:
        rows = (m,) if param.type.kind.has_rows else ()
        columns = (int(n * param.type.width),) if param.type.width is not None else ()
        dtype = torch.bfloat16 if param.type.kind is Kind.TILE else torch.float32
        inputs[param.name] = torch.randn(rows + columns, device="cuda", dtype=dtype)
    return inputs


def _compiled_on_gemm(program: Epilogue, a: Tensor, b: Tensor, inputs: dict[str, Tensor], extents: Extents) -> Call:
    names = list(inputs)

    def maths(a: Tensor, b: Tensor, *values: Tensor) -> list[Tensor]:
        given = dict(zip(names, values, strict=True)) | {program.params[0].name: torch.matmul(a, b.t())}
        return _reference(program, given, extents)

    return _compiled(maths, a, b, *inputs.values())


def _compiled_hosted(program: Epilogue, inputs: dict[str, Tensor], extents: Extents) -> Call:
    names = list(inputs)

    def maths(*values: Tensor) -> list[Tensor]:
        return _reference(program, dict(zip(names, values, strict=True)), extents)

    return _compiled(maths, *inputs.values())


def _reference(program: Epilogue, inputs: dict[str, Tensor], extents: Extents) -> list[Tensor]:
    storage = reference.Storage(torch.bfloat16)
    return list(reference.run(program, inputs, dtype=torch.float32, extents=extents, storage=storage).values())


def _compiled(maths: Callable[..., list[Tensor]], *args: Tensor) -> Call:
    function = torch.compile(make_fx(maths, tracing_mode="fake")(*args))
    return lambda: function(*args)


def tile_bytes(program: Epilogue, m: int, n: int, *, on_gemm: bool) -> int:
    """Bytes of the tiles an epilogue loads and stores in bf16, each once."""
    loads = program.params[1:] if on_gemm else program.params
    tiles = [x.type for x in (*loads, *program.stores) if x.type.kind is Kind.TILE]
    return sum(2 * m * int(n * (t.width or 0)) for t in tiles)
