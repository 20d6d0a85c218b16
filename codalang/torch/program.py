"""A program as a function of torch tensors.

    m = codalang.load("examples/mlp.coda")
    x2 = m.mlp(y0, x0, w0, w1, w2, g0)    # parameters in order or by keyword; `eps` has a default
    m.mlp.source                          # the program as .coda, with the epilogues that it applies
    m.mlp.backward.source                 # its derived backward; `m.mlp.backward` is itself such a function

One result is returned as a tensor, several as a named tuple in the order of `return`.  Everything is differentiable,
to any order.  Under autocast the operands of matmuls are cast to the autocast dtype, as torch.matmul casts them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from codalang.autodiff.program import derive_program
from codalang.autodiff.program_derivative import ProgramDerivative
from codalang.ir.program import Program
from codalang.torch import opaque
from codalang.torch.checked import Checked
from codalang.torch.execute import is_autocast_on
from codalang.torch.program_autograd import ProgramOperator, Shaped
from codalang.torch.program_call import Binding, bind, check, check_value, show
from codalang.torch.program_opaque import call, program_of, text_of
from codalang.torch.program_step import Setting, Wanted
from codalang.torch.results import packer
from codalang.torch.signature import ELEMENTS, Value


class ProgramFunction:
    """A program as a function.  See the module's docstring.

    Raises CodaCallError, naming the argument, for a call that does not fit the declarations.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._operator = ProgramOperator.of(program)
        self._text = text_of(program)  # at once: where a compiler traces a call, nothing can be printed
        self._pack = packer(program.name, program.results)
        self._returned_scalars = tuple(
            (i, ELEMENTS[p.type.dtype])
            for i, p in enumerate(program.params)
            if not p.type.shape and p.name in program.results
        )
        self._calls = Checked(self._check)

    def __call__(self, /, *args: Value, **named: Value) -> Any:
        """Bind, check, run; one tensor, or a named tuple."""
        values: list[Any] = list(args)
        if named or len(args) != len(self.program.params):
            values = bind(self.program, args, named)
        if torch.compiler.is_compiling():
            return self._pack(self._call_traced(values))
        return self._pack(self.call_bound(values))

    def call_bound(self, values: list[Any]) -> Sequence[Tensor]:
        """The results, for values in the order of the parameters."""
        if self._returned_scalars:
            numbers = [i for i, elements in self._returned_scalars if elements.number(values[i])]
            values = self._as_tensors(values, numbers)
        return self._calls.run(values, _autocast_dtype(values) if torch._C._is_any_autocast_enabled() else None)

    def _check(self, values: list[Any], autocast: torch.dtype | None) -> tuple[Binding, Shaped]:
        binding = check(self.program, values)
        types = self._operator.types
        wanted = [Wanted(name, shape=binding.shape(types[name])) for name in self.program.results]
        setting = Setting(
            binding.sizes, binding.shapes, binding.flat, binding.dtypes, binding.compute, binding.device, autocast
        )
        return binding, Shaped(self._operator, setting, wanted)

    def _call_traced(self, values: list[Any]) -> Sequence[Tensor]:
        for param, value in zip(self.program.params, values, strict=True):
            if not isinstance(value, Tensor):  # tensors are checked when their shapes are known
                check_value(self.program, param, value)
        return call(self._text, self._as_tensors(values, range(len(values))))

    def _as_tensors(self, values: Sequence[Any], which: Collection[int]) -> list[Any]:
        """The numbers among these values as tensors without dimensions."""
        like = next((v for v in values if isinstance(v, Tensor) and v.dim() > 0), None)
        wide = any(isinstance(v, Tensor) and v.dtype is torch.float64 for v in values)
        dtype = torch.float64 if wide else torch.float32
        device = None if like is None else like.device
        return [
            v if isinstance(v, Tensor) or i not in which else ELEMENTS[p.type.dtype].as_tensor(v, dtype, device)
            for i, (v, p) in enumerate(zip(values, self.program.params, strict=True))
        ]

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def source(self) -> str:
        """The program and the epilogues that it applies as .coda text."""
        return opaque.in_lines(self._text)

    def derivative(
        self,
        wrt: Collection[str] | None = None,
        cotangents: Collection[str] | None = None,
        delay_scales: bool = False,
    ) -> ProgramDerivative:
        """The derivative for gradients of `wrt` (default: every parameter) from the cotangents of these results
        (default: all).  Raises CodaCallError for names that the program does not have.

        `delay_scales`: the one for f16, where no scale of rows comes before the store of a cotangent.
        """
        return derive_program(self.program, wrt=wrt, cotangents=cotangents, delay_scales=delay_scales)

    @functools.cached_property
    def backward(self) -> ProgramFunction:
        """The derived backward for all parameters and results, as a function of its own."""
        return ProgramFunction(self.derivative().backward)

    def __repr__(self) -> str:
        return f"<codalang {show(self.program)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.program.results:  # a backward that computes nothing has no text that reads back
            return ProgramFunction, (self.program,)
        return function_of, (self.source,)

    def __deepcopy__(self, memo: object) -> ProgramFunction:
        return self


def _autocast_dtype(values: Sequence[object]) -> torch.dtype | None:
    device = next((v.device for v in values if isinstance(v, Tensor) and v.dim() > 0), None)
    if device is None or not is_autocast_on(device):
        return None
    return torch.get_autocast_dtype(device.type)


@functools.lru_cache(maxsize=1024)
def function_of(text: str) -> ProgramFunction:
    """The last program of a text as a function."""
    return ProgramFunction(program_of(opaque.one_line(text)))
