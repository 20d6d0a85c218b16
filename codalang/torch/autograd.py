"""The derivative of a call: a forward that saves, a derived epilogue on the cotangent, and plain GEMMs.

    forward    outputs, saved = derivative.forward on A @ B.T                     one kernel
    backward   d_acc, d_params = derivative.backward hosted on the cotangents     one kernel
               d_a = d_acc @ w        d_w = d_acc.T @ a                           one GEMM each, where wanted

The backward is made of the same differentiable calls as the forward, and saved values are (hidden) outputs of the
forward, so they carry history: derivatives of any order are right, without a rule for any order.

Cotangents may be missing, strided, of stride 0, or shared, and are only read.  For each subset of cotangents and of
inputs that need a gradient, a backward is derived once and kept.

    Operator    an epilogue and how it is hosted; owns its derivatives
    Plan        an operator at given extents and dtypes
    Tape        a plan whose inputs of a given subset require gradients: what the forward keeps
    Step        a tape's backward for given cotangents and wanted gradients
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.autodiff import Derivative, derive
from codalang.errors import CodaUnsupportedError
from codalang.ir.build import EpilogueBuilder, canonical
from codalang.ir.epilogue import Epilogue, Output, Store
from codalang.ir.types import tile
from codalang.torch.execute import Job
from codalang.torch.opaque import execute, is_traced
from codalang.torch.signature import Extent, Value, columns_of, output_dtype

Flags = tuple[bool, ...]


@attrs.define(eq=False)
class Operator:
    """An epilogue, hosted on a GEMM (its first two arguments are A and B) or on plain tensors."""

    epilogue: Epilogue
    on_gemm: bool
    _derivatives: dict[tuple[frozenset[str], frozenset[str]], Derivative] = attrs.field(factory=dict, init=False)

    def derivative(self, wrt: frozenset[str], cotangents: frozenset[str]) -> Derivative:
        """The derivative for gradients of `wrt` from the cotangents of these outputs; derived once."""
        key = (wrt, cotangents)
        if key not in self._derivatives:
            self._derivatives[key] = derive(self.epilogue, wrt=wrt, cotangents=cotangents, hosted=not self.on_gemm)
        return self._derivatives[key]

    def slot(self, param: str) -> int:
        """The position of a parameter's value.  Raises KeyError for the accumulator of a GEMM."""
        return self._slots[param]

    @functools.cached_property
    def _slots(self) -> dict[str, int]:
        params = self.epilogue.params
        return (
            {p.name: i + 2 for i, p in enumerate(params[1:])}
            if self.on_gemm
            else {p.name: i for i, p in enumerate(params)}
        )

    def wanted(self, needs: Flags) -> frozenset[str]:
        """The parameters whose gradient is wanted where the values so flagged need theirs."""
        accumulator = {self.epilogue.params[0].name} if self.on_gemm and (needs[0] or needs[1]) else set()
        return frozenset(accumulator | {name for name, slot in self._slots.items() if needs[slot]})


@attrs.define(eq=False)
class Plan:
    """An operator at given extents and dtypes.

    Attributes:
        rows, columns: M and N.
        compute: what the reference computes in.
        default: the dtype of A: of stores without annotation, and of what the forward saves.
        dtypes: output name -> dtype, for outputs whose dtype is decided elsewhere (gradients).
    """

    operator: Operator
    rows: Extent
    columns: Extent
    compute: torch.dtype
    default: torch.dtype
    dtypes: dict[str, torch.dtype] = attrs.field(factory=dict)
    job: Job = attrs.field(init=False)
    _tapes: dict[Flags, Tape] = attrs.field(factory=dict, init=False)
    _matmuls: dict[tuple[Extent, Extent, torch.dtype], Plan] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.job = self.job_of(self.operator.epilogue)

    def job_of(self, epilogue: Epilogue) -> Job:
        """The operator's epilogue, or the one that also saves, as a job."""
        dtypes = tuple(self.dtype_of(o) for o in epilogue.outputs)
        return Job(epilogue, self.operator.on_gemm, self.rows, self.columns, self.compute, dtypes)

    def dtype_of(self, output: Output) -> torch.dtype:
        """The storage dtype of an output."""
        return self.dtypes.get(output.name) or output_dtype(output, self.default, self.compute)

    def tape(self, requires: Flags) -> Tape:
        """The tape for values of which those so flagged require gradients."""
        if requires not in self._tapes:
            self._tapes[requires] = Tape(self, requires)
        return self._tapes[requires]

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b.T` of [M, K] and [N, K], by the GEMM that hosts epilogues, rounded to `a`'s dtype; differentiable."""
        rows, columns, dtype = a.shape[0], b.shape[0], a.dtype
        if is_traced():  # sizes may be symbols, which are no keys
            return invoke(Plan(_MATMUL, rows, columns, self.compute, dtype), (a, b))[0]
        plan = self._matmuls.get((rows, columns, dtype))
        if plan is None:
            plan = self._matmuls[rows, columns, dtype] = Plan(_MATMUL, rows, columns, self.compute, dtype)
        return invoke(plan, (a, b))[0]


class Tape:
    """What a forward runs and keeps so that any backward of these inputs can be derived."""

    def __init__(self, plan: Plan, requires: Flags) -> None:
        operator = plan.operator
        self.plan = plan
        outputs = frozenset(o.name for o in operator.epilogue.outputs)
        first = operator.derivative(operator.wanted(requires), outputs)
        # Steps are derived from the forward that saves: to them a saved value is an output like any other.
        self.operator = Operator(first.forward, operator.on_gemm) if first.saved else operator
        self.job = plan.job_of(first.forward)
        self.outputs = {o.name: i for i, o in enumerate(first.forward.outputs)}
        self.visible = len(operator.epilogue.outputs)
        inputs, kept = set(), set()
        for load in first.loads.values():
            if load.source == "param":
                inputs.add(operator.slot(load.name))
            elif load.source != "cotangent":
                kept.add(self.outputs[load.name])
        if operator.on_gemm:
            inputs |= {other for other, slot in ((1, 0), (0, 1)) if requires[slot]}
        self.kept_inputs = tuple(sorted(inputs))
        self.kept_outputs = tuple(sorted(kept))
        self._steps: dict[tuple[Flags, Flags], Step] = {}

    def step(self, needs: Flags, present: Flags, dtypes: tuple[torch.dtype | None, ...]) -> Step:
        """The backward that wants these inputs' gradients from these outputs' cotangents."""
        key = (needs, present)
        if key not in self._steps:
            self._steps[key] = Step(self, needs, present, dtypes)
        return self._steps[key]

    def derivative(self, needs: Flags, present: Flags) -> Derivative:
        """A derivative whose backward loads nothing but what was kept.

        Where leaving cotangents out would make it load something else, none is left out (they are zeros then).
        """
        names = tuple(self.outputs)
        visible = names[: self.visible]
        given = tuple(name for name, there in zip(names, present, strict=True) if there)
        for cotangents in (given, tuple(dict.fromkeys(visible + given)), names):
            candidate = self.operator.derivative(self.operator.wanted(needs), frozenset(cotangents))
            if self._has_all(candidate):
                return candidate
        raise CodaUnsupportedError(
            f"this derivative of `{self.plan.operator.epilogue.name}` needs values that its forward did not keep",
            self.plan.operator.epilogue.loc,
            hint="compute the second derivative through codalang.ir.reference.run, which torch differentiates",
        )

    def _has_all(self, derivative: Derivative) -> bool:
        if derivative.saved:
            return False
        slots = {"param": self.kept_inputs, "output": self.kept_outputs}
        return all(
            load.source == "cotangent" or self._place(load.source, load.name) in slots[load.source]
            for load in derivative.loads.values()
        )

    def _place(self, source: str, name: str) -> int:
        return (
            self.operator.slot(name)
            if source == "param" and name in self.operator._slots
            else (self.outputs.get(name, -1) if source == "output" else -1)
        )


class Step:
    """One backward: a hosted call of the derived epilogue, and which of its outputs is whose gradient."""

    def __init__(self, tape: Tape, needs: Flags, present: Flags, dtypes: tuple[torch.dtype | None, ...]) -> None:
        plan, operator = tape.plan, tape.operator
        derivative = tape.derivative(needs, present)
        self.tape = tape
        self.gradients = dict(derivative.gradients)
        stored = _dtype_per_gradient(derivative, operator, dtypes, plan.default)
        # A gradient that is one of the loaded tensors needs no kernel.
        self.aliases = {o.name: name for o in derivative.backward.outputs if (name := _alias(derivative.backward, o))}
        backward = _without(derivative.backward, self.aliases)
        loaded = [p.name for p in backward.params]
        self.loads = {
            name: (load.source, operator.slot(load.name) if load.source == "param" else tape.outputs[load.name])
            for name, load in derivative.loads.items()
            if name in loaded or name in self.aliases.values()
        }
        self.loaded = tuple(loaded)
        self.computed = tuple(o.name for o in backward.outputs)
        self.plan = None
        if self.computed:
            hosted = Operator(backward, on_gemm=False)
            self.plan = Plan(hosted, plan.rows, plan.columns, plan.compute, plan.default, stored)

    def run(
        self, cotangents: Sequence[Tensor | None], inputs: dict[int, Value], outputs: dict[int, Tensor]
    ) -> dict[str, Tensor]:
        """The backward's outputs by name."""
        tables: dict[str, Any] = {"param": inputs, "output": outputs}
        values: dict[str, Value] = {}
        for name, (source, index) in self.loads.items():
            value = cotangents[index] if source == "cotangent" else tables[source][index]
            values[name] = self._zeros(index, inputs) if value is None else value
        results = {output: values[name] for output, name in self.aliases.items()}
        if self.plan is not None:
            computed = invoke(self.plan, [values[name] for name in self.loaded])
            results.update(zip(self.computed, computed, strict=True))
        return results  # type: ignore[return-value]

    def _zeros(self, index: int, inputs: dict[int, Value]) -> Tensor:
        """A cotangent that is missing, where it cannot be left out."""
        output = self.tape.job.epilogue.outputs[index]
        rows = (self.tape.plan.rows,) if output.type.kind.has_rows else ()
        shape = rows + columns_of(output.type.width, self.tape.plan.columns)
        device = next((v.device for v in inputs.values() if isinstance(v, Tensor)), None)
        return torch.zeros((), dtype=self.tape.job.dtypes[index], device=device).expand(shape)


def _dtype_per_gradient(
    derivative: Derivative, operator: Operator, dtypes: tuple[torch.dtype | None, ...], default: torch.dtype
) -> dict[str, torch.dtype]:
    """Each backward output's dtype: that of the input whose gradient it is; where inputs of several dtypes share it,
    one that holds both, so that each is rounded once."""
    result: dict[str, torch.dtype] = {}
    for param, name in derivative.gradients.items():
        if name is None:
            continue
        own = dtypes[operator.slot(param)] if param in operator._slots else default
        assert own is not None  # a number has no gradient
        result[name] = torch.promote_types(result[name], own) if name in result else own
    return result


def _alias(backward: Epilogue, output: Output) -> str | None:
    """The parameter that an output merely repeats, or None."""
    node = backward.nodes[output.value]
    if node.op == "param" and isinstance(output, Store) and node.type == output.type:
        return str(node.attr)
    return None


def _without(backward: Epilogue, dropped: dict[str, str]) -> Epilogue:
    """The epilogue without some outputs, and without the parameters that only they used."""
    if not dropped:
        return backward
    rest = canonical(attrs.evolve(backward, outputs=tuple(o for o in backward.outputs if o.name not in dropped)))
    used = {node.attr for node in rest.nodes if node.op == "param"}
    return attrs.evolve(rest, params=tuple(p for p in rest.params if p.name in used))


def invoke(plan: Plan, values: Sequence[Value]) -> Sequence[Tensor]:
    """Run a plan on flattened values; differentiable where gradients are on and some value requires one."""
    if torch.is_grad_enabled():
        requires = tuple([isinstance(v, Tensor) and v.requires_grad for v in values])
        if True in requires:
            tape = plan.tape(requires)
            outputs: tuple[Tensor, ...] = _Call.apply(tape, *values)
            return outputs[: tape.visible]
    return execute(plan.job, values)


class _Call(torch.autograd.Function):
    """One call on the autograd tape.  The first argument is the Tape, the others are the operator's values."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, *values: Value) -> tuple[Tensor, ...]:
        outputs = tuple(execute(tape.job, values))
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        tensors, numbers = [], {}
        for slot in tape.kept_inputs:
            value = values[slot]
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                numbers[slot] = value
        ctx.numbers = numbers
        ctx.dtypes = tuple([v.dtype if isinstance(v, Tensor) else None for v in values])
        ctx.shapes = tuple([v.shape if isinstance(v, Tensor) else None for v in values])
        ctx.save_for_backward(*tensors, *[outputs[i] for i in tape.kept_outputs])
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tape: Tape = ctx.tape
        needs: Flags = tuple(ctx.needs_input_grad[1:])
        present = tuple([c is not None for c in cotangents])
        if True not in present:
            return (None,) * (1 + len(needs))
        saved = iter(ctx.saved_tensors)
        inputs = {i: ctx.numbers[i] if i in ctx.numbers else next(saved) for i in tape.kept_inputs}
        outputs = {i: next(saved) for i in tape.kept_outputs}
        step = tape.step(needs, present, ctx.dtypes)
        results = step.run(cotangents, inputs, outputs)
        device = next(c.device for c in cotangents if c is not None)

        def zeros(slot: int) -> Tensor:
            return torch.zeros(ctx.shapes[slot], dtype=ctx.dtypes[slot], device=device)

        gradients: list[Tensor | None] = [None] * len(needs)
        for param, name in step.gradients.items():
            if param in tape.operator._slots:
                slot = tape.operator.slot(param)
                gradients[slot] = zeros(slot) if name is None else results[name].to(ctx.dtypes[slot])
            else:
                d_acc = None if name is None else results[name].to(tape.plan.default)
                if needs[0]:
                    gradients[0] = zeros(0) if d_acc is None else tape.plan.matmul(d_acc, inputs[1].T)
                if needs[1]:
                    gradients[1] = zeros(1) if d_acc is None else tape.plan.matmul(d_acc.T, inputs[0].T)
        return (None, *gradients)


def _matmul_epilogue() -> Epilogue:
    builder = EpilogueBuilder("matmul", ("M", "N"))
    builder.store("y", builder.param("acc", tile()), tile())
    return builder.finish()


_MATMUL = Operator(_matmul_epilogue(), on_gemm=True)
