"""The command `run`: random inputs of given shapes against the reference in float64.

Inputs are rounded to their dtypes first.  A result's error is its distance from what the reference computes of them in
float64 (gradients: from what torch makes of that), relative by norm.  Beside it stands the error of the *rounding
mode*: the reference in float32, rounded wherever the kernel rounds, saved values included.  An index is judged by the
value that stands at it (two elements may tie but for rounding), any other integer by the fraction that differs.

A result is inaccurate, and the exit code 1, where its error exceeds the dtype's bound, or, of a kernel, both 1.5 times
that of the rounding mode and what accumulation explains: 1e-5, and 2^-24 for each 16 elements of K, because tensor
cores truncate as they add.

On a GPU the forward is timed beside cuBLAS (the bare matmul) and torch.compile (matmul and epilogue as torch ops).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from codalang.cli import OK, WRONG, add_precise, add_program, print_json
from codalang.cli.programs import load_program, only
from codalang.cli.sizes import add_sizes, show_sizes
from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue, Output, State
from codalang.ir.program import Program
from codalang.ir.types import Dtype, Kind

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bf16", "f16", "f32", "f64")
_DEFAULT = {"M": 256, "N": 512, "B": 4, "K": 256}
WORSE = 1.5
FLOOR = 1e-5
# Beyond this no rounding explains a difference.
BOUNDS = {"bf16": 0.25, "f16": 0.03, "f32": 1e-4, "f64": 1e-9}

# Of what torch says where a tensor cannot be allocated, or its size counted.
_NO_MEMORY = ("allocate memory", "overflow")


def add_commands(commands: Any) -> None:
    """Declare the command."""
    run = commands.add_parser("run", help="run on random inputs and compare with the reference in float64")
    add_program(run)
    add_precise(run)
    add_sizes(run, "--shape", "--dims", help="sizes by the names of dimensions; an epilogue's, and K of its matmul")
    run.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the tensors (default: bf16)")
    run.add_argument("--seed", type=_seed, default=0, help="of the random inputs (default: 0)")
    run.add_argument("--backward", action="store_true", help="gradients as well")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one"
    )
    run.set_defaults(command=run_run)


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number") from None
    if not -(2**63) <= seed < 2**64:
        raise argparse.ArgumentTypeError("a seed has 64 bits")
    return seed


def run_run(options: argparse.Namespace) -> int:
    """`codalang run`."""
    import torch

    from codalang.torch import EpilogueFunction

    module = load_program(options.program, options.precise)
    item = only(module, options.name)
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CodaCallError("there is no CUDA device here", argument="--device")
    if isinstance(item, Program):
        from codalang.cli.trial_program import run_program

        return run_program(module, item, options, device)
    sizes = _sizes(item, options.sizes)
    with enough_memory(sizes):
        trial = _Trial(EpilogueFunction(item), sizes, options, device)
        rows = trial.compare()
        times = trial.times() if device == "cuda" else []
    return report(item.name, sizes, options, trial.where, rows, times)


def report(
    name: str,
    sizes: dict[str, int],
    options: argparse.Namespace,
    where: str,
    rows: list[dict[str, Any]],
    times: list[dict[str, Any]],
) -> int:
    """Print the results; the exit code."""
    ok = all(row["ok"] for row in rows)
    if options.json:
        print_json(ok, name=name, shape=sizes, dtype=options.dtype, device=where, results=rows, times=times)
    else:
        _print(name, sizes, options.dtype, where, rows, times)
    return OK if ok else WRONG


@contextlib.contextmanager
def enough_memory(sizes: dict[str, int]) -> Iterator[None]:
    """Raises CodaCallError where tensors do not fit; torch has no type of its own for that on a CPU."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not out_of_memory and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
        raise CodaCallError(
            f"there is not enough memory for {show_sizes(sizes)}", argument="--shape", hint="pass smaller sizes"
        ) from None


def _sizes(epilogue: Epilogue, given: dict[str, int]) -> dict[str, int]:
    """M, N, B where there are samples, and K, under the program's own names."""
    symbols = (*epilogue.dims, "K")
    defaults = [size for name, size in _DEFAULT.items() if name != "B" or len(symbols) > 3]
    for name in given:
        if name not in symbols:
            raise CodaCallError(
                f"`{epilogue.name}` has no dimension `{name}`; its dimensions are {', '.join(symbols)}",
                argument="--shape",
            )
    return {symbol: given.get(symbol, default) for symbol, default in zip(symbols, defaults, strict=True)}


class _Trial:
    """Random inputs, and what three ways of computing make of them."""

    def __init__(self, function: Any, sizes: dict[str, int], options: argparse.Namespace, device: str) -> None:
        import torch

        from codalang.ir.reference import TORCH_DTYPES

        self.function, self.epilogue = function, function.epilogue
        self.bound = BOUNDS[options.dtype]
        self.dtype = {**TORCH_DTYPES, "f64": torch.float64}[options.dtype]
        *extents, self.k = sizes.values()
        self.extents = tuple(extents)
        self.m, self.n = self.extents[:2]
        self.backward = options.backward
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.device = device
        self.where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.on_gemm = self.epilogue.accumulator is not None
        self.inputs = self._make_inputs()

    def _make_inputs(self) -> dict[str, Tensor]:
        """Tiles are normal; rows, cols and scalars stand around 1, as scales do.  Indices are those of columns;
        half of a mask holds."""
        import torch

        from codalang.ir.reference import TORCH_DTYPES

        inputs: dict[str, Tensor] = {}
        params = self.epilogue.params
        if self.on_gemm:
            columns = self._columns(params[0])
            inputs["a"] = self._normal((self.m, self.k)).to(self.dtype)
            inputs["w"] = (self._normal((columns, self.k)) / max(1, self.k) ** 0.5).to(self.dtype)
            params = params[1:]
        for param in params:
            rows = self.extents[2:] if param.type.kind is Kind.ROWS else [self.m] if param.type.kind.has_rows else []
            shape = (*rows,) + ((self._columns(param),) if param.type.width is not None else ())
            if param.type.dtype is not Dtype.F32:
                inputs[param.name] = self._drawn(param, shape)
                continue
            value = self._normal(shape)
            if param.type.kind is not Kind.TILE:
                value = 1 + value / 4
            wide = param.type.kind in (Kind.COL, Kind.SCALAR) and self.dtype is not torch.float64
            inputs[f"{param.name}"] = value.to(
                TORCH_DTYPES[param.dtype] if param.dtype else torch.float32 if wide else self.dtype
            )
        return inputs

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        import torch

        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float64)

    def _drawn(self, param: Any, shape: tuple[int, ...]) -> Tensor:
        """Indices or a mask."""
        import torch

        from codalang.ir.reference import TORCH_DTYPES

        if param.type.dtype is Dtype.BOOL:
            return torch.rand(shape, generator=self.generator, device=self.device) < 0.5
        most = max(1, self.n)
        drawn = torch.randint(0, most, shape, generator=self.generator, device=self.device)
        return drawn.to(TORCH_DTYPES[param.dtype])

    def _columns(self, param: Any) -> int:
        return int(param.type.width * self.n)

    def _ours(self, *values: Tensor) -> list[Tensor]:
        import torch

        if self.on_gemm:
            result = self.function(*values)
        else:
            result = self.function.hosted(*values, extents=self.extents)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    def _reference(self, dtype: Any, *values: Tensor) -> list[Tensor]:
        """The reference, which torch differentiates."""
        from codalang.ir import reference

        named = self._named(dtype, values)
        outputs = reference.run(self.epilogue, named, dtype=dtype, extents=self.extents)
        return list(outputs.values())

    def _named(self, dtype: Any, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parameters by name, the accumulator included."""
        rest = list(values)
        if self.on_gemm:
            a, w, *rest = values
            rest = [a.to(dtype) @ w.to(dtype).T, *rest]
        return dict(zip((p.name for p in self.epilogue.params), rest, strict=True))

    def compare(self) -> list[dict[str, Any]]:
        """One row for each output and, with --backward, for each gradient."""
        import torch

        from codalang.torch import reference_only

        leaves = [[self._leaf(v, exact) for v in self.inputs.values()] for exact in (False, False, True)]
        ours = self._ours(*leaves[0])
        with reference_only():
            rounded = self._ours(*leaves[1])
        exact = self._reference(torch.float64, *leaves[2])
        results = [list(r) for r in (ours, rounded, exact)]
        rows = self._rows(*results)
        if self.backward:
            rows += self._gradient_rows(results, leaves)
        return rows

    def _rows(self, ours: list[Tensor], rounded: list[Tensor], exact: list[Tensor]) -> list[dict[str, Any]]:
        """One row for each output."""
        rows = []
        for output, *triple in zip(self.epilogue.outputs, ours, rounded, exact, strict=True):
            errors = [self._error(output, found, exact, triple[2]) for found in (ours, rounded)]
            rows.append(self._row(output.name, triple[0], *errors))
        return rows

    def _error(self, output: Output, found: list[Tensor], exact: list[Tensor], expected: Tensor) -> float:
        """The error of an output, `found` and `exact` being all of them."""
        import torch

        from codalang.ir.attained import attained, is_index

        names = [o.name for o in self.epilogue.outputs]
        position = names.index(output.name)
        if output.type.dtype is Dtype.F32:
            return relative(found[position], expected)
        if not is_index(output) or not expected.numel():
            return (found[position] != expected).double().mean().item() if expected.numel() else 0.0
        assert isinstance(output, State)
        inputs = self._named(torch.float64, list(self.inputs.values()))
        there, wanted = (
            attained(self.epilogue, output, inputs, dict(zip(names, r, strict=True)), extents=self.extents)
            for r in (found, exact)
        )
        return relative(there, wanted)

    def _gradient_rows(self, results: list[list[Tensor]], leaves: list[list[Tensor]]) -> list[dict[str, Any]]:
        """One row for each input of floats."""
        import torch

        from codalang.torch import reference_only

        ours = results[0]
        cotangents = [self._normal(tuple(o.shape)).to(o.dtype) for o in ours]
        found = []
        for result, inputs in zip(results, leaves, strict=True):
            pairs = [(r, c.to(r.dtype)) for r, c in zip(result, cotangents, strict=True) if r.requires_grad]
            wanted = [v for v in inputs if v.requires_grad]
            if not pairs:
                found.append([torch.zeros_like(v) for v in wanted])
                continue
            with reference_only() if result is results[1] else contextlib.nullcontext():
                outputs, given = zip(*pairs, strict=True)
                gradients = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
            found.append(list(gradients))
        names = [f"d_{name}" for name, value in self.inputs.items() if value.is_floating_point()]
        return [
            self._row(name, mine, relative(mine, exact), relative(rounded, exact))
            for name, mine, rounded, exact in zip(names, *found, strict=True)
        ]

    def _row(self, name: str, ours: Tensor, error: float, expected: float) -> dict[str, Any]:
        return row(name, ours, error, expected, on_cpu=self.device == "cpu", depth=self.k, bound=self.bound)

    def _leaf(self, value: Tensor, exact: bool) -> Tensor:
        if not value.is_floating_point():
            return value
        return (value.detach().double() if exact else value.detach()).requires_grad_(self.backward)

    def times(self) -> list[dict[str, Any]]:
        """Milliseconds of the forward and of what it is compared with, measured in turn."""
        import torch

        if not self.on_gemm:
            return []
        values = tuple(self.inputs.values())
        a, w = values[:2]

        def as_torch(*arguments: Tensor) -> list[Tensor]:
            first, second, *rest = arguments
            named = dict(zip((p.name for p in self.epilogue.params), [first @ second.T, *rest], strict=True))
            from codalang.ir import reference

            results = reference.run(self.epilogue, named, dtype=torch.float32, extents=self.extents)
            return [
                r if o.type.dtype is Dtype.I32 else r.to(self.dtype if o.type.kind is Kind.TILE else torch.float32)
                for r, o in zip(results.values(), self.epilogue.outputs, strict=True)
            ]

        from torch.fx.experimental.proxy_tensor import make_fx

        compiled = torch.compile(make_fx(as_torch)(*values))
        ways: dict[str, Callable[[], Any]] = {
            "codalang": lambda: self._ours(*values),
            "cublas (matmul alone)": lambda: a @ w.T,
            "torch.compile": lambda: compiled(*values),
        }
        with torch.no_grad():
            measured = measure(ways)
        return [{"way": way, "milliseconds": milliseconds} for way, milliseconds in measured.items()]


def row(
    name: str, ours: Tensor, error: float, expected: float, *, on_cpu: bool, depth: int, bound: float
) -> dict[str, Any]:
    """One result's line; see the module's docstring.  `depth` is the matmul's K, the largest of several."""
    likely = on_cpu or error <= max(WORSE * expected, FLOOR + depth / 16 * 2**-24)
    return {
        "name": name,
        "shape": list(ours.shape),
        "dtype": str(ours.dtype).removeprefix("torch."),
        "error": error,
        "rounding_error": expected,
        "ok": likely and error <= bound,
    }


def measure(ways: dict[str, Callable[[], Any]], rounds: int = 20) -> dict[str, float]:
    """The median of each way's times, the ways taking turns so that all see the same clock."""
    import torch

    for way in ways.values():
        for _ in range(3):
            way()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(times), 4) for name, times in samples.items()}


def relative(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact||; infinite where one is not finite and the other is not the same."""
    import torch

    value, exact = value.detach().double(), exact.detach().double()
    same = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, value - exact)
    if not torch.isfinite(difference).all():
        return float("inf")
    scale = torch.where(torch.isfinite(exact), exact, 0.0).norm().item()
    distance = difference.norm().item()
    return distance / scale if scale else distance


def _print(
    name: str,
    sizes: dict[str, int],
    dtype: str,
    where: str,
    rows: list[dict[str, Any]],
    times: list[dict[str, Any]],
) -> None:
    shape = show_sizes(sizes)
    print(f"{name}: {shape}, {dtype}, on {where}")
    print(f"  {'result':<16} {'shape':<18} {'dtype':<9} {'error':>10} {'rounding':>10}")
    for row in rows:
        shown = str(row["shape"])
        print(
            f"  {row['name']:<16} {shown:<18} {row['dtype']:<9} {row['error']:>10.2e} {row['rounding_error']:>10.2e}"
            f"{'' if row['ok'] else '   INACCURATE'}"
        )
    for entry in times:
        print(f"  {entry['way']:<26} {entry['milliseconds']:.4f} ms")
