"""The command tune: candidate configurations of a kernel timed on this GPU, the best remembered on disk."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codalang.cli import OK, add_program, print_json
from codalang.cli.bench import needs_hopper, progress_bar, say
from codalang.cli.programs import load_program, selected
from codalang.cli.sizes import TYPICAL, add_sizes, all_sizes, given_for
from codalang.errors import CodaCallError, CodaUnsupportedError
from codalang.ir.epilogue import Epilogue
from codalang.ir.module import Module
from codalang.ir.program import Program

if TYPE_CHECKING:
    import torch

    from codalang.bench.tune import GemmCall, Tuned

_DEFAULT = (8192, 8192, 4096)  # M, N, K: a large matmul
_DTYPES = ("bf16", "f16")


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "tune",
        help="time configurations of a kernel on this GPU, and remember the best",
        description="Compiles every candidate configuration in parallel, times them in turn, and keeps the best on "
        "disk: calls of these sizes take it from then on, on GPUs of this model.  Without it a heuristic chooses.",
    )
    add_program(parser)
    add_sizes(parser, "--shape", "--dims", help="sizes by the names of dimensions; an epilogue's, and K of its matmul")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the matmuls (default: bf16)")
    parser.add_argument("--dry-run", action="store_true", help="compile and time, and remember nothing")
    parser.set_defaults(command=run_tune)


def run_tune(options: argparse.Namespace) -> int:
    """`codalang tune`: a line for each kernel on a GEMM: of an epilogue its forward, and the forward that saves; of a
    program all of its forward and backward."""
    module = load_program(options.program)
    found = selected(module, options.name)
    programs = [item for item in found if isinstance(item, Program)]
    epilogues = [item for item in found if isinstance(item, Epilogue) and item.accumulator is not None]
    if not programs and not epilogues:
        raise CodaCallError("there is nothing to tune: no epilogue has an accumulator", argument="PROGRAM")
    of_programs = given_for(programs, options.sizes) if programs else []
    of_epilogues = [_sizes(epilogue, options.sizes) for epilogue in epilogues]
    needs_hopper("tune", "compile PROGRAM")
    from codalang.bench import tune

    calls = [
        call for e, sizes in zip(epilogues, of_epilogues, strict=True) for call in gemm_calls(e, sizes, options.dtype)
    ]
    for program, given in zip(programs, of_programs, strict=True):
        calls += program_calls(module, program, all_sizes(program, given, TYPICAL), options.dtype)
    configs = tune.compiled([call.problem for call in calls], progress=progress_bar("compiling"))
    results = []
    for call in calls:
        results.append(tune.tune(call, configs[call.problem]))
        if not options.dry_run:
            tune.keep(results[-1], _gpu())
        say(line(results[-1]))
    if options.json:
        print_json(True, results=[as_data(result) for result in results])
    else:
        print(table(results))
    return OK


def _gpu() -> str:
    import torch

    from codalang.lower.tuned import gpu_of

    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def _sizes(epilogue: Epilogue, given: dict[str, int]) -> tuple[int, int, int]:
    """M, N (of width 1) and K.  Raises CodaCallError for a name that is none of them."""
    symbols = (*epilogue.dims[:2], "K")
    for name in given:
        if name not in symbols:
            raise CodaCallError(
                f"`{epilogue.name}` has no dimension `{name}`; its dimensions are {', '.join(symbols)}",
                argument="--shape",
            )
    if len(epilogue.dims) > 2:
        raise CodaUnsupportedError(f"`{epilogue.name}` has rows per sample, which `tune` does not cover", epilogue.loc)
    m, n, k = (given.get(symbol, usual) for symbol, usual in zip(symbols, _DEFAULT, strict=True))
    if not m or not n:
        raise CodaCallError("an empty matmul has no kernel", argument="--shape")
    return m, n, k


def gemm_calls(epilogue: Epilogue, sizes: tuple[int, int, int], dtype: str, device: str = "cuda") -> list[GemmCall]:
    """The GEMMs of an epilogue's calls on random tensors: without a gradient, and with one where that stores more."""
    from codalang.autodiff import derive
    from codalang.bench import tune
    from codalang.errors import CodaError
    from codalang.ir.simplify import simplify
    from codalang.lower import run

    forwards = [simplify(epilogue)]
    try:
        forwards.append(derive(epilogue).forward)
    except CodaError:
        pass  # it has no derivative: calls with a gradient cannot be
    with tune.recording() as calls:
        for forward in dict.fromkeys(forwards):
            a, b, inputs = _operands(forward, sizes, dtype, device)
            run.gemm(forward, a, b, inputs)
    return calls


def program_calls(
    module: Module, program: Program, sizes: dict[str, int], dtype: str, device: str = "cuda"
) -> list[GemmCall]:
    """The GEMMs of a program's forward and backward on random tensors, each kernel and size once."""
    import torch

    from codalang.bench import tune
    from codalang.cli.trial_program import Trial

    options = argparse.Namespace(dtype=dtype, seed=0, backward=True)
    trial = Trial(module, program, sizes, options, device)
    with tune.recording() as calls:
        results = [r for r in trial.ours(trial.leaves(False)) if r.requires_grad]
        torch.autograd.backward(results, [torch.randn_like(r) for r in results])
    return calls


def _operands(
    epilogue: Epilogue, sizes: tuple[int, int, int], dtype: str, device: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Random operands of an epilogue's GEMM, in the storage dtypes of a typical call."""
    import torch

    from codalang.cli.specs import param_dtype
    from codalang.ir.reference import TORCH_DTYPES
    from codalang.ir.types import Dtype

    m, n, k = sizes
    kind = TORCH_DTYPES[dtype]

    def columns(width: Any) -> int:
        return int(n * width)

    a = torch.randn(m, k, device=device, dtype=kind)
    b = torch.randn(columns(epilogue.params[0].type.width), k, device=device, dtype=kind).mul_(max(k, 1) ** -0.5)
    inputs = {}
    for param in epilogue.params[1:]:
        shape = ((m,) if param.type.kind.has_rows else ()) + (
            (columns(param.type.width),) if param.type.width is not None else ()
        )
        stored = param_dtype(param, dtype)
        if param.type.dtype is Dtype.BOOL:
            inputs[param.name] = torch.rand(shape, device=device) < 0.5
        elif param.type.dtype is Dtype.I32:
            drawn = torch.randint(0, n, shape, device=device)
            inputs[param.name] = drawn.to(TORCH_DTYPES[param.dtype or "i32"])
        else:
            inputs[param.name] = torch.rand(shape, device=device).add_(0.5).to(TORCH_DTYPES.get(stored, torch.float32))
    return a, b, inputs


def line(result: Tuned) -> str:
    """What was found for one kernel."""
    from codalang.bench.candidates import short

    problem = result.problem
    return (
        f"{problem.name}: {result.heuristic_ms:.4f} ms -> {result.best_ms:.4f} ms ({result.gain:.3f} times), "
        f"{result.candidates} candidates: {short(result.best)}"
    )


def table(results: list[Tuned]) -> str:
    """All, with the configurations."""
    from codalang.bench.candidates import short
    from codalang.bench.report import Table

    cells = [["kernel", "M x N x K", "stores", "heuristic ms", "best ms", "gain", "best"]]
    for result in results:
        p = result.problem
        cells.append(
            [
                p.spec.epilogue.name,
                f"{p.m} x {p.n} x {p.k}",
                str(len(p.spec.stores)),
                f"{result.heuristic_ms:.4f}",
                f"{result.best_ms:.4f}",
                f"{result.gain:.3f}",
                short(result.best) if result.best != result.heuristic else "the heuristic's",
            ]
        )
    return Table("Tuned", cells).text()


def as_data(result: Tuned) -> dict[str, Any]:
    """As JSON has it."""
    import attrs

    p = result.problem
    return {
        "name": p.spec.epilogue.name,
        "extents": [p.m, p.n, p.k],
        "heuristic": attrs.asdict(result.heuristic),
        "best": attrs.asdict(result.best),
        "heuristic_milliseconds": result.heuristic_ms,
        "best_milliseconds": result.best_ms,
        "candidates": result.candidates,
        "failed": result.failed,
    }
