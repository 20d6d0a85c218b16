"""What `load` returns: a module whose attributes are its epilogues as functions of torch tensors.

    m = codalang.load("examples/mlp.coda")
    y = m.swiglu(a, w)                    # a [..., K], w [N, K]: the epilogue on a @ w.T
    y = m.swiglu.hosted(acc)              # the epilogue on a plain tensor
    m.swiglu.source                       # the epilogue as .coda
    m.swiglu.backward.source              # its derived backward; `m.swiglu.backward` is itself such a function

Parameters come after `a` and `w` (hosted: after the accumulator) in the order of the program, or by keyword.  One
output is returned as a tensor, several as a named tuple in textual order.  Everything is differentiable, to any order.

Under autocast `a` and `w` are cast to the autocast dtype, as torch.matmul does (float64 is left alone); parameters
are loaded as they are.  torch.func transforms and forward-mode differentiation are not covered, and say so.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from codalang.autodiff import Derivative, derive
from codalang.errors import CodaCallError, CodaError, CodaNameError, Source
from codalang.ir import module as ir
from codalang.ir.epilogue import Epilogue
from codalang.ir.printer import print_epilogue, print_module
from codalang.ir.program import Apply
from codalang.ir.simplify import simplify
from codalang.ir.verify_program import check_determined
from codalang.torch import opaque
from codalang.torch.checked import Checked, Run
from codalang.torch.execute import Job, execute, is_autocast_on, reference_only
from codalang.torch.program import ProgramFunction
from codalang.torch.program_autograd import ProgramOperator, Shaped
from codalang.torch.program_step import Setting, Wanted
from codalang.torch.results import packer
from codalang.torch.signature import (
    Binding,
    Extent,
    Signature,
    Value,
    bind,
    check,
    check_values,
    extents_of,
    output_dtype,
)
from codalang.torch.single import single


class Hosting:
    """One way to call an epilogue: on a GEMM, or hosted on plain tensors."""

    def __init__(self, epilogue: Epilogue, on_gemm: bool, text: str) -> None:
        self.signature = Signature(epilogue, on_gemm)
        self.operator = ProgramOperator.of(single(simplify(epilogue), on_gemm), delays=False)
        self._text = opaque.one_line(text)
        self._count = len(self.signature.names)
        self._calls = Checked(self._check)
        self._pack = packer(epilogue.name, [o.name for o in epilogue.outputs])

    def call(
        self, args: tuple[object, ...], named: Mapping[str, object], extents: tuple[int, ...] | None = None
    ) -> Any:
        """Bind, check, run, and return one tensor or a named tuple."""
        values = list(args) if not named and len(args) == self._count else bind(self.signature, args, named)
        if torch.compiler.is_compiling():
            return self._pack(self._call_traced(values, extents))
        return self._pack(self.call_bound(values, extents))

    def call_bound(self, values: list[Any], extents: tuple[Extent, ...] | None = None) -> Sequence[Tensor]:
        """The outputs, for values in the order of the signature."""
        if extents is not None:
            extents = extents_of(self.signature, extents)
        if self.signature.on_gemm and torch._C._is_any_autocast_enabled():
            _autocast(values)
        return self._calls.run(values, extents)

    def _of_nothing(self, binding: Binding, values: list[Any]) -> Sequence[Tensor]:
        """Where there are no rows or no columns, nothing is to fuse: the reference, which torch differentiates."""
        epilogue, flat = self.signature.epilogue, binding.flat
        dtypes = tuple(output_dtype(output, binding.default, binding.compute) for output in epilogue.outputs)
        given = (binding.rows, binding.columns, binding.compute, dtypes, binding.samples)
        with reference_only():
            outputs = execute(
                Job(epilogue, self.signature.on_gemm, *given),
                [v if shape is None else v.reshape(shape) for v, shape in zip(values, flat, strict=False)],
            )
        return [t.reshape(binding.shape(o)) for t, o in zip(outputs, epilogue.outputs, strict=True)]

    def _check(self, values: list[Any], extents: tuple[Extent, ...] | None) -> tuple[Binding, Shaped | Run]:
        binding, program = check(self.signature, values, extents), self.operator.program
        if binding.is_empty:
            return binding, functools.partial(self._of_nothing, binding)
        (statement,) = program.statements
        assert isinstance(statement, Apply)
        given = (binding.rows, binding.columns, binding.samples)
        sizes = {str(dim): extent for dim, extent in zip(statement.extents, given, strict=False)}
        if self.signature.on_gemm:
            sizes |= {name: values[0].shape[-1] for name in program.dims if name not in sizes}
        rest = [tuple(sizes[str(e)] for e in p.type.shape) for p in program.params[self._count :]]
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in values]
        setting = Setting(
            sizes,
            (*shapes, *rest),
            (*(flat or shape for flat, shape in zip(binding.flat, shapes, strict=True)), *rest),
            (*(v.dtype if isinstance(v, Tensor) else None for v in values), *(torch.float32 for _ in rest)),
            binding.compute,
            binding.device,
        )
        outputs = zip(program.results, self.signature.epilogue.outputs, strict=True)
        wanted = [Wanted(name, shape=binding.shape(output)) for name, output in outputs]
        run = Shaped(self.operator, setting, wanted)
        if not rest:
            return binding, run
        return binding, lambda given: run(given + [torch.empty((), device=binding.device).expand(s) for s in rest])

    def _call_traced(self, values: list[Any], extents: tuple[int, ...] | None) -> Sequence[Tensor]:
        """What torch.compile records: one call of a composite operator, which is checked when its shapes are known."""
        check_values(self.signature, values, numbers_only=True)
        like = next((v for v in values if isinstance(v, Tensor) and v.dim() > 0), None)
        dtype = torch.float64 if like is not None and like.dtype is torch.float64 else torch.float32
        device = None if like is None else like.device
        tensors = opaque.as_tensors(values, self.signature.params, dtype, device)
        return cast(list[Tensor], torch.ops.codalang.call(self._text, self.signature.on_gemm, tensors, extents))


def _autocast(values: list[Any]) -> None:
    """Cast `a` and `w` as torch.matmul would."""
    for slot in (0, 1):
        value = values[slot]
        if isinstance(value, Tensor) and is_autocast_on(value.device):
            if value.dtype.is_floating_point and value.dtype is not torch.float64:
                values[slot] = value.to(torch.get_autocast_dtype(value.device.type))


class EpilogueFunction:
    """An epilogue as a function: `f(a, w, *params)` and `f.hosted(acc, *params)`.  See the module's docstring.

    Raises CodaCallError, naming the argument, for a call that does not fit the definition.
    """

    def __init__(self, epilogue: Epilogue, source: str | None = None) -> None:
        self.epilogue = epilogue
        self._source = source or print_epilogue(epilogue)
        self._on_gemm = Hosting(epilogue, True, self._source) if epilogue.accumulator is not None else None
        self._hosted = Hosting(epilogue, False, self._source)

    def __call__(self, /, *args: Value, **named: Value) -> Any:
        """Run the epilogue on `a @ w.T`, with `a` [..., K] and `w` [w*N, K]."""
        if self._on_gemm is None:
            check(Signature(self.epilogue, True), args)
            raise AssertionError
        return self._on_gemm.call(args, named)

    def hosted(self, /, *args: Value, extents: Any = None, **named: Value) -> Any:
        """Run the epilogue on plain tensors.  `extents`: (M, N), where the arguments lack one of them; (M, N, B) where
        they lack the number of samples, too.  What is no tuple is a parameter of that name, where there is one."""
        if extents is not None and not isinstance(extents, tuple | list) and "extents" in self._hosted.signature.names:
            return self._hosted.call(args, {**named, "extents": extents})
        return self._hosted.call(args, named, extents)

    def hosting(self, on_gemm: bool) -> Hosting:
        """The way it is called on a GEMM, or hosted."""
        return self._on_gemm if on_gemm and self._on_gemm is not None else self._hosted

    @property
    def name(self) -> str:
        """The epilogue's name."""
        return self.epilogue.name

    @property
    def source(self) -> str:
        """The epilogue as .coda text, `fn`s inlined."""
        return self._source

    def derivative(self, wrt: Collection[str] | None = None, cotangents: Collection[str] | None = None) -> Derivative:
        """The derivative for gradients of `wrt` (default: every parameter) from the cotangents of these outputs
        (default: all).  Raises CodaCallError for names that the epilogue does not have."""
        return derive(simplify(self.epilogue), wrt=wrt, cotangents=cotangents)

    @functools.cached_property
    def backward(self) -> EpilogueFunction:
        """The derived backward for all parameters and outputs, as a function of its own."""
        return EpilogueFunction(self.derivative().backward)

    def __repr__(self) -> str:
        way = self._on_gemm or self._hosted
        return f"<codalang {way.signature.show()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.epilogue.outputs:  # a backward that computes nothing has no text that reads back
            return EpilogueFunction, (self.epilogue, self.source)
        return _restored, (self.source,)

    def __deepcopy__(self, memo: object) -> EpilogueFunction:
        return self


def _restored(text: str) -> EpilogueFunction:
    return EpilogueFunction(opaque.epilogue_of(text), opaque.in_lines(text))


@functools.lru_cache(maxsize=1024)
def _function_of(text: str) -> EpilogueFunction:
    return _restored(text)


def callable_of(text: str, on_gemm: bool) -> Hosting:
    """How the epilogue of that text is called; for traced calls."""
    return _function_of(text).hosting(on_gemm)


class CodaAttributeError(CodaNameError, AttributeError):
    """A module has no epilogue or program of that name."""


class Module:
    """The epilogues and programs of a source, as attributes and as items: `m.swiglu`, `m["swiglu"]`, `list(m)`."""

    def __init__(self, program: ir.Module, precise: bool = False) -> None:
        self._program, self._precise = program, precise
        self._functions: dict[str, EpilogueFunction | ProgramFunction] = {
            name: EpilogueFunction(epilogue) for name, epilogue in program.epilogues.items()
        }
        self._functions |= {name: ProgramFunction(chain) for name, chain in program.programs.items()}
        vars(self).update({name: f for name, f in self._functions.items() if name not in vars(self)})  # found soonest

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            # Of what is looked up by convention (copy, pickle, inspect), Python's own error is all that is wanted.
            if name.startswith("_"):
                raise AttributeError(name) from None
            have = ", ".join(self._functions) or "none"
            what = "epilogue or program" if self._program.programs else "epilogue"
            raise CodaAttributeError(
                f"{self._program.source.name} defines no {what} `{name}`; it defines {have}"
            ) from None

    def __getitem__(self, name: str) -> Any:
        if isinstance(name, str):
            return self._functions[name] if name in self._functions else self.__getattr__(name)
        have = ", ".join(self._functions) or "none"
        raise CodaCallError(
            f"an epilogue or program of {self._program.source.name} is asked for by its name, a str, got "
            f"{type(name).__name__}; it defines {have}",
            argument="name",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __repr__(self) -> str:
        return f"<codalang module {self._program.source.name}: {', '.join(self._functions)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # What imports other files travels as a text of its own: they need not be where it arrives.
        source = self._program.source
        text = print_module(self._program) if self._program.imported else source.text
        return module_of, (Source(source.name, text), self._precise)

    def __deepcopy__(self, memo: object) -> Module:
        return self


_REMEMBERED_MODULES = 256
_modules: dict[tuple[str, str, bool], tuple[Module, tuple[Source, ...]]] = {}


def module_of(source: Source, precise: bool = False) -> Module:
    """The module of a source, or that of its `precise` epilogues.

    Loading the same text again gives the same module, with all that it has learned, unless a file that it imports is
    another one by now.
    """
    from codalang.parser import parse

    name = (source.name, source.text, precise)
    module, imported = _modules.get(name, (None, ()))
    if module is None or not all(map(_as_it_was, imported)):
        program = parse(source)
        for chain in program.programs.values():
            check_determined(chain)
        module = Module(program.precise() if precise else program, precise)
        _modules.pop(name, None)
        while len(_modules) >= _REMEMBERED_MODULES:
            del _modules[next(iter(_modules))]
        _modules[name] = (module, program.imported)
    return module


def _as_it_was(imported: Source) -> bool:
    """Does a file still hold what was read?"""
    from codalang.parser import read_source
    from codalang.parser.source import normalize

    try:
        return normalize(read_source(Path(imported.name))) == imported
    except CodaError:
        return False
