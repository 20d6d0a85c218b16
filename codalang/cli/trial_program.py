"""`codalang run` of a program: random inputs at given sizes against the reference in float64.

Errors are judged as those of epilogues are, see `trial`: beside each stands the error of the reference that rounds
where kernels round.  On a GPU the program is timed beside its matmuls alone, by cuBLAS on operands of the same shapes.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from codalang.cli.sizes import TRIAL, all_sizes
from codalang.cli.traffic import shape, values
from codalang.cli.trial import BOUNDS, enough_memory, measure, relative, report, row
from codalang.ir.module import Module
from codalang.ir.program import Apply, Matmul, Product, Program, ProgramParam
from codalang.ir.types import Dtype

if TYPE_CHECKING:
    from torch import Tensor


def run_program(module: Module, program: Program, options: argparse.Namespace, device: str) -> int:
    """Run, compare, time, report; the exit code."""
    sizes = all_sizes(program, options.sizes, TRIAL)
    with enough_memory(sizes):
        trial = Trial(module, program, sizes, options, device)
        rows = trial.compare()
        times = trial.times() if device == "cuda" else []
    return report(program.name, sizes, options, trial.where, rows, times)


class Trial:
    """Random inputs, and what three ways of computing make of them."""

    def __init__(
        self, module: Module, program: Program, sizes: dict[str, int], options: argparse.Namespace, device: str
    ) -> None:
        import torch

        from codalang.ir.reference import TORCH_DTYPES
        from codalang.torch import Module as Functions

        self.program, self.sizes, self.device = program, sizes, device
        self.function = Functions(module)[program.name]
        self.bound, self.backward = BOUNDS[options.dtype], options.backward
        self.dtypes = {**TORCH_DTYPES, "f64": torch.float64}
        self.dtype = self.dtypes[options.dtype]
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.matmuls = [m for s in program.statements if (m := _matmul(s)) is not None]
        stored = values(program, "bf16")
        self.shapes = [tuple(int(e.evaluate(sizes)) for e in shape(m, stored)) for m in self.matmuls]
        self.weights = {m.b for m in self.matmuls}
        self.stored = {p.name: stored[p.name].dtype for p in program.params}
        self.inputs = {p.name: self._drawn(p) for p in program.params}

    def _drawn(self, param: ProgramParam) -> Any:
        """Matrices are normal, the second operands of matmuls by the root of what they contract; vectors and scalars
        stand around 1, as scales do; indices are those of columns; half of a mask holds."""
        import torch

        extents = [int(e.evaluate(self.sizes)) for e in param.type.shape]
        if not extents and param.default is not None:
            return param.default
        if param.type.dtype is Dtype.BOOL:
            return torch.rand(extents, generator=self.generator, device=self.device) < 0.5
        if param.type.dtype is Dtype.I32:
            most = max(1, min((n for _, n, _ in self.shapes), default=1))
            drawn = torch.randint(0, most, extents, generator=self.generator, device=self.device)
            return drawn.to(self.dtypes[param.dtype or "i64"])
        value = self._normal(extents)
        if param.type.matrix is None:
            value = 1 + value / 4
        elif param.name in self.weights:
            value = value / max(1, extents[-1]) ** 0.5
        wide = self.stored[param.name] == "f32" and param.type.matrix is None and self.dtype is not torch.float64
        return value.to(self.dtypes[param.dtype] if param.dtype else torch.float32 if wide else self.dtype)

    def _normal(self, extents: Sequence[int]) -> Tensor:
        import torch

        return torch.randn(extents, generator=self.generator, device=self.device, dtype=torch.float64)

    def compare(self) -> list[dict[str, Any]]:
        """One row for each result and, with --backward, for each gradient."""
        from codalang.torch import reference_only

        ours, rounded, exact = (self.leaves(exactly) for exactly in (False, False, True))
        results = [self.ours(ours)]
        with reference_only():
            results.append(self.ours(rounded))
        results.append(self._reference(exact))
        rows = [
            self._row(name, mine, relative(mine, true), relative(other, true))
            for name, mine, other, true in zip(self.program.results, *results, strict=True)
        ]
        return rows + (self._gradient_rows(results, (ours, rounded, exact)) if self.backward else [])

    def ours(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        import torch

        found = self.function(**inputs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def _reference(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        import torch

        from codalang.ir import program_reference

        found = program_reference.run(self.program, inputs, dtype=torch.float64)
        ours = self.ours({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()})
        # A call gives leading dimensions back.
        return [true.reshape(mine.shape) for true, mine in zip(found.values(), ours, strict=True)]

    def leaves(self, exact: bool) -> dict[str, Any]:
        import torch

        leaves = {}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value = (value.double() if exact else value.clone()).requires_grad_(self.backward)
            leaves[name] = value
        return leaves

    def _gradient_rows(
        self, results: Sequence[Sequence[Tensor]], leaves: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        import torch

        from codalang.torch import reference_only

        names = [n for n, v in leaves[0].items() if isinstance(v, torch.Tensor) and v.requires_grad]
        cotangents = [self._normal(r.shape).to(r.dtype) for r in results[0]]
        found = []
        for made, inputs, rounding in zip(results, leaves, (False, True, False), strict=True):
            pairs = [(r, c.to(r.dtype)) for r, c in zip(made, cotangents, strict=True) if r.requires_grad]
            wanted = [inputs[name] for name in names]
            if not pairs:
                found.append([torch.zeros_like(v) for v in wanted])
                continue
            outputs, given = zip(*pairs, strict=True)
            with reference_only() if rounding else contextlib.nullcontext():
                made_of = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
            found.append(list(made_of))
        return [
            self._row(f"d_{name}", mine, relative(mine, true), relative(other, true))
            for name, mine, other, true in zip(names, *found, strict=True)
        ]

    def _row(self, name: str, ours: Tensor, error: float, expected: float) -> dict[str, Any]:
        depth = max((max(extents) for extents in self.shapes), default=1)  # in a backward each extent is contracted
        return row(name, ours, error, expected, on_cpu=self.device == "cpu", depth=depth, bound=self.bound)

    # ---- times ------------------------------------------------------------------------------------------------------

    def times(self) -> list[dict[str, Any]]:
        """Milliseconds of the program and of its matmuls alone, forward and, with --backward, both passes."""
        import torch

        operands = [
            (self._normal((m, k)).to(self.dtype), self._normal((n, k)).to(self.dtype)) for m, n, k in self.shapes
        ]
        plain = self.leaves(False)
        for value in plain.values():
            if isinstance(value, torch.Tensor):
                value.requires_grad_(False)
        ways: dict[str, Callable[[], Any]] = {
            "codalang": lambda: self.ours(plain),
            "cublas (matmuls alone)": lambda: [a @ b.T for a, b in operands],
        }
        if self.backward:
            ways |= self._both_passes(operands)
        measured = measure(ways)
        return [{"way": way, "milliseconds": milliseconds} for way, milliseconds in measured.items()]

    def _both_passes(self, operands: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Callable[[], Any]]:
        import torch

        leaves = self.leaves(False)
        wanted = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        products = [a @ b.T for a, b in operands]

        def both() -> None:
            results = [r for r in self.ours(leaves) if r.requires_grad]
            torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)

        def alone() -> None:
            for (a, b), c in zip(operands, products, strict=True):
                _ = (a @ b.T, c @ b, c.T @ a)

        return {"codalang, both passes": both, "cublas, both passes": alone}


def _matmul(statement: object) -> Matmul | None:
    if isinstance(statement, Product):
        return statement.matmul
    return statement.host if isinstance(statement, Apply) and isinstance(statement.host, Matmul) else None
