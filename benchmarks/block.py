"""A Llama-3 block without attention: `python benchmarks/block.py [--sizes 1B 8B 70B] [--steps] [--out DIR]`.

    x1  = x + y Wo^T                    x2 = x1 + swiglu(norm(x1) Wgu^T) Wd^T              qkv = rope(norm(x2) Wqkv^T)

| implementation | what it is                                                                                   |
|----------------|----------------------------------------------------------------------------------------------|
| GEMMs alone    | the block's matmuls by cuBLAS on the same operands: 4, or 12 with the backward               |
| codalang       | `llama_block_fused` of examples/llama_block.coda                                             |
| torch.compile  | the block in PyTorch, compiled                                                               |
| torch eager    | the same                                                                                     |
| CODA           | CODA's public block, where it can be imported; tuned as `codalang.bench.rivals` says         |

How it is measured: `codalang.bench.timing`.  The fractions are of the speed of the GEMMs alone, in one run; memory is
the peak above the inputs, weights and cotangents.  `--steps` times every kernel of the program alone, those on a GEMM
beside cuBLAS.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import attrs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor  # noqa: E402

import codalang  # noqa: E402
from codalang.bench import rivals  # noqa: E402
from codalang.bench.report import aligned  # noqa: E402
from codalang.bench.timing import Timing, interleaved  # noqa: E402
from codalang.lower import ahead  # noqa: E402
from codalang.lower.folded import Matrix  # noqa: E402
from codalang.torch import execute, program_step  # noqa: E402

Row = dict[str, object]
Call = Callable[[], object]
Forward = Callable[[], "tuple[Tensor, Tensor]"]

TOKENS = 8192
HEAD = 128
EPS = 1e-5
THETA = 500000.0
# The host enqueues a whole forward and backward of eager PyTorch while the device spins.
SPIN_CYCLES = 16_000_000


@attrs.frozen
class Size:
    """Widths of a model: of its residual stream, its feed-forward layer, all heads' queries, all heads' keys."""

    d: int
    f: int
    h: int
    kv: int


SIZES = {
    "1B": Size(2048, 8192, 2048, 512),
    "8B": Size(4096, 14336, 4096, 1024),
    "70B": Size(8192, 28672, 8192, 1024),
}


@attrs.frozen(eq=False)
class Block:
    """Tensors of one block.  `w_gate_up` is [2, F, D]; the rows of `w_qkv` are pairs (2j, 2j + 1)."""

    size: Size
    y: Tensor
    x: Tensor
    w_o: Tensor
    g_mlp: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    g_attention: Tensor
    w_qkv: Tensor
    positions: Tensor
    frequency: Tensor
    d_x2: Tensor
    d_qkv: Tensor

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines: models make them once."""
        angles = self.positions[:, None] * self.frequency[None, : (self.size.h + self.size.kv) // 2]
        return angles.cos(), angles.sin()

    @property
    def wanted(self) -> list[Tensor]:
        """What has gradients."""
        return [self.y, self.x, self.w_o, self.g_mlp, self.w_gate_up, self.w_down, self.g_attention, self.w_qkv]


def make(
    size: Size, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", tokens: int = TOKENS, seed: int = 0
) -> Block:
    """Random tensors with the scales of training."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    d, f, h, kv = size.d, size.f, size.h, size.kv
    head = min(HEAD, kv)
    frequency = THETA ** (-torch.arange(0, head, 2, device=device) / head)
    heads, unrotated = (h + kv) // head, torch.zeros(kv // 2, device=device)
    gain = [1 + normal(d, scale=0.1) for _ in range(2)]
    block = Block(
        size,
        normal(tokens, h),
        normal(tokens, d),
        normal(d, h, scale=h**-0.5),
        gain[0],
        normal(2, f, d, scale=d**-0.5),
        normal(d, f, scale=f**-0.5),
        gain[1],
        normal(h + 2 * kv, d, scale=d**-0.5),
        torch.arange(tokens, device=device),
        torch.cat([frequency.repeat(heads), unrotated]),
        normal(tokens, d),
        normal(tokens, h + 2 * kv),
    )
    for tensor in block.wanted:
        tensor.requires_grad_()
    return block


# ---- implementations -------------------------------------------------------------------------------------------------


def ours(block: Block) -> tuple[Tensor, Tensor]:
    """The program."""
    b = block
    function = codalang.load(HERE.parent / "examples/llama_block.coda").llama_block_fused
    x2, qkv = function(
        b.y, b.x, b.w_o, b.g_mlp, b.w_gate_up, b.w_down, b.g_attention, b.w_qkv, b.positions, b.frequency, EPS
    )
    return x2, qkv


def widened(x: Tensor) -> Tensor:
    """In f32, or in f64 where it is that."""
    return x if x.dtype is torch.float64 else x.float()


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm as models write it: the row in f32, its result in the dtype of the model."""
    wide = widened(x)
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2j, 2j + 1) rotated, in f32."""
    a, b = widened(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def in_torch(
    y: Tensor,
    x: Tensor,
    w_o: Tensor,
    g_mlp: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    g_attention: Tensor,
    w_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """The block in PyTorch."""
    x1 = x + F.linear(y, w_o)
    gate, up = F.linear(norm(x1, g_mlp), w_gate_up.flatten(0, 1)).chunk(2, -1)
    x2 = x1 + F.linear(F.silu(gate) * up, w_down)
    qkv = F.linear(norm(x2, g_attention), w_qkv)
    rotated = 2 * cos.shape[-1]
    return x2, torch.cat((rope(qkv[:, :rotated], cos, sin), qkv[:, rotated:]), -1)


def with_torch(block: Block, function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`in_torch`, compiled or not, on the same tensors."""
    b = block
    return function(b.y, b.x, b.w_o, b.g_mlp, b.w_gate_up, b.w_down, b.g_attention, b.w_qkv, *b.tables)


def with_coda(block: Block) -> tuple[Block, Forward]:
    """The block with `w_gate_up` as CODA has it, [F, 2, D], and a cotangent of its own; and CODA's forward of it.

    Raises Skipped where it cannot be imported.
    """
    function = rivals.imported("coda.kernels.blocks.llama3", "CODA").block
    gate_up = block.w_gate_up.detach().transpose(0, 1).contiguous().requires_grad_()
    b = attrs.evolve(block, w_gate_up=gate_up, d_x2=block.d_x2.clone())
    positions, frequencies = b.positions.int(), rivals.coda_frequencies(b.frequency)

    def forward() -> tuple[Tensor, Tensor]:
        weights = (b.w_o, b.w_gate_up.flatten(0, 1), b.w_down, b.w_qkv, b.g_mlp, b.g_attention)
        x2, qkv = function(b.x[None], b.y[None], *weights, positions, frequencies, EPS)
        return x2.flatten(0, 1), qkv.flatten(0, 1)

    return b, forward


def gemms_alone(block: Block, backward: bool) -> Call:
    """The matmuls of the program by cuBLAS, on the operands that it has, in its order."""
    with recorded_steps() as steps:
        everything(block, lambda: ours(block), backward)
    matmuls = [cublas(values) for job, values in steps if job.on_gemm]

    def call() -> None:
        for matmul in matmuls:
            matmul()

    return call


def cublas(values: list[object]) -> Call:
    """The matmul of a step that was given these: operands [M, K] and [N, K] come first."""
    a, b = (v.flat() if isinstance(v, Matrix) else v for v in values[:2])
    return lambda: torch.matmul(a, b.t())


def implementations(block: Block, backward: bool, compiled: bool) -> dict[str, Call]:
    """The calls to compare."""
    forwards: dict[str, Forward] = {"codalang": lambda: ours(block)}
    if compiled:
        function = torch.compile(in_torch, fullgraph=True, dynamic=False)
        forwards["torch.compile"] = lambda: with_torch(block, function)
    forwards["torch eager"] = lambda: with_torch(block, in_torch)
    calls: dict[str, Call] = {"GEMMs alone": gemms_alone(block, backward)}
    for name, forward in forwards.items():
        calls[name] = _both(block, forward) if backward else torch.no_grad()(forward)
    return calls | coda_call(block, backward)


def _both(block: Block, forward: Forward) -> Call:
    return lambda: torch.autograd.grad(forward(), block.wanted, (block.d_x2, block.d_qkv))


def everything(block: Block, forward: Forward, backward: bool = True) -> list[Tensor]:
    """The results, and the gradients of what has them."""
    with torch.set_grad_enabled(backward):
        results = forward()
    if not backward:
        return [*results]
    return [*results, *torch.autograd.grad(results, block.wanted, (block.d_x2, block.d_qkv))]


COTANGENTS = 8  # CODA's backward adds into the one that it is given: a few take turns, so that none grows without end


def coda_call(block: Block, backward: bool) -> dict[str, Call]:
    """CODA's call, tuned and compared with PyTorch's results; nothing, and a word, where it does not run."""
    try:
        each = [with_coda(block) for _ in range(COTANGENTS if backward else 1)]
        found = everything(*each[0], backward)
    except Exception as failure:  # another project's, or it is not there
        print(f"CODA is left out: {failure}".splitlines()[0], flush=True)
        return {}
    wanted = everything(block, lambda: with_torch(block, in_torch), backward)
    pairs = [
        (one if one.shape == two.shape else one.transpose(0, 1), two) for one, two in zip(found, wanted, strict=True)
    ]
    print(f"CODA differs from PyTorch by {max(itertools.starmap(relative_error, pairs)):.4f} at most", flush=True)
    calls = itertools.cycle([_both(*own) for own in each])
    return {"CODA": (lambda: next(calls)()) if backward else torch.no_grad()(each[0][1])}


# ---- measuring -------------------------------------------------------------------------------------------------------


def peak_gib(call: Call) -> float:
    """Memory above what is there, in GiB."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """A size's table: forward, then forward and backward."""
    block = make(SIZES[name], tokens=options.tokens)
    for title, backward in (("forward", False), ("forward + backward", True)):
        calls = implementations(block, backward, options.torch_compile)
        memory = {key: peak_gib(call) for key, call in calls.items()}
        timings = interleaved(calls, rounds=options.rounds, spin_cycles=SPIN_CYCLES)
        alone = timings["GEMMs alone"].median
        for key, timing in timings.items():
            yield {
                "size": name,
                "work": title,
                "implementation": key,
                "ms": round(timing.median, 4),
                "quartiles": f"{timing.low:.3f}-{timing.high:.3f}",
                "of the GEMMs' speed": round(alone / timing.median, 4),
                "peak GiB": round(memory[key], 3),
            }


# ---- one step after the other ----------------------------------------------------------------------------------------

Recorded = tuple[execute.Job, list[object]]


@contextmanager
def recorded_steps() -> Iterator[list[Recorded]]:
    """Within it, the steps of every program that runs, with the tensors that they are given."""
    steps: list[Recorded] = []
    real = program_step.execute

    def record(job: execute.Job, values: list[object], out: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        overwritten = {id(tensor) for tensor in (out or {}).values()}
        steps.append((job, [v.clone() if id(v) in overwritten else v for v in values]))
        return real(job, values, out)

    program_step.execute = record  # type: ignore[assignment]
    execute.stepwise = True
    try:
        yield steps
    finally:
        program_step.execute, execute.stepwise = real, False


def step_rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every step of a forward and backward, timed alone."""
    block = make(SIZES[name], tokens=options.tokens)
    with recorded_steps() as steps:
        _both(block, lambda: ours(block))()
    for number, (job, values) in enumerate(steps):
        calls: dict[str, Call] = {"codalang": lambda job=job, values=values: execute.execute(job, values)}
        if job.on_gemm:
            calls["cuBLAS"] = cublas(values)
        timings = interleaved(calls, rounds=options.rounds)
        yield _step_row(name, number, job, timings)


def _step_row(name: str, number: int, job: execute.Job, timings: dict[str, Timing]) -> Row:
    ours_, cublas = timings["codalang"].median, timings.get("cuBLAS")
    return {
        "size": name,
        "step": number,
        "epilogue": job.epilogue.name,
        "host": "GEMM" if job.on_gemm else "tensors",
        "M, N": f"{job.rows}, {job.columns}",
        "outputs": ", ".join(output.name for output in job.epilogue.outputs),
        "ms": round(ours_, 4),
        "cuBLAS ms": round(cublas.median, 4) if cublas else "",
        "of the GEMM's speed": round(cublas.median / ours_, 3) if cublas else "",
        "above the GEMM, ms": round(ours_ - (cublas.median if cublas else 0.0), 4),
    }


# ---- numbers that two implementations must share ---------------------------------------------------------------------


def relative_error(got: Tensor, want: Tensor) -> float:
    """By norms."""
    norm_of_want = float(want.detach().double().norm())
    return float((got.detach().double() - want.detach().double()).norm()) / norm_of_want if norm_of_want else math.inf


CHECKED_TOKENS = 1024


def check(name: str, tokens: int = CHECKED_TOKENS) -> None:
    """End where the program and PyTorch's block differ by more than rounding."""
    block = make(SIZES[name], tokens=tokens)
    found = [everything(block, forward) for forward in (lambda: ours(block), lambda: with_torch(block, in_torch))]
    for index, (one, two) in enumerate(zip(*found, strict=True)):
        if (error := relative_error(one, two)) > 0.03:
            sys.exit(f"result {index} of codalang differs from PyTorch's by {error:.3f}")


def compile_kernels(name: str, tokens: int) -> None:
    """Compile in parallel what the program launches at this size, and say how long it took and what is slow."""
    begin = time.perf_counter()
    with ahead.recorded() as specs:
        for extent in (CHECKED_TOKENS, tokens):
            block = make(SIZES[name], tokens=extent)
            with torch.no_grad():
                ours(block)
            _both(block, lambda block=block: ours(block))()
    outcome = ahead.compile_each(specs)
    print(f"\n{name}: {len(outcome)} kernels compiled in {time.perf_counter() - begin:.0f} s")
    for spec, compiled in outcome.items():
        for remark in (*compiled.remarks, *filter(None, [compiled.error])):
            print(f"  {spec.epilogue.name}: {remark}")


def main() -> None:
    """Parse the command line, measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", action="store_true", help="every step alone, beside cuBLAS")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-torch-compile", dest="torch_compile", action="store_false")
    parser.add_argument("--out", type=Path, help="folder for block.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("block.py needs a Hopper GPU (compute capability 9.0)")
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "codalang": codalang.__version__,
        "tokens": options.tokens,
    }
    print(" ".join(f"{key} {value}" for key, value in report.items()))
    for name in options.sizes:
        compile_kernels(name, options.tokens)
        check(name)
        for title, found in (("block", rows), ("steps", step_rows)):
            if title == "steps" and not options.steps:
                continue
            lines = list(found(name, options))
            report[f"{title} {name}"] = lines
            print(f"\nLlama-3 {name}, {title}\n{aligned(lines)}", flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "block.json").write_text(json.dumps(report, indent=1))
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
