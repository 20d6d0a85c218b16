"""The derivative of a call: a forward that saves, a derived epilogue on the cotangent, and plain GEMMs.

    forward    outputs, saved = derivative.forward on A @ B.T                     one kernel
    backward   d_acc, d_params = derivative.backward hosted on the cotangents     one kernel
               d_a = d_acc @ w        d_w = d_acc.T @ a                           one GEMM each, where wanted

The backward is made of the same differentiable calls as the forward, and saved values are (hidden) outputs of the
forward, so they carry history: derivatives of any order are right, without a rule for any order.

Cotangents may be missing, strided, of stride 0, or shared, and are only read.

    Plan    an operator at given extents and dtypes
    Tape    a plan whose arguments of a given subset require gradients: a recording at given shapes
    Step    a tape's backward: a route at given shapes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Output
from codalang.ir.types import tile
from codalang.torch.derived import Flags, Operator, Route
from codalang.torch.execute import Job
from codalang.torch.opaque import execute, is_traced
from codalang.torch.signature import Extent, Value, columns_of, output_dtype


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
    _matmuls: dict[tuple[torch.Size, torch.Size, torch.dtype], Plan] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.job = self.job_of(self.operator)

    def job_of(self, operator: Operator) -> Job:
        """The operator, or the one that also saves, as a job."""
        dtypes = tuple(self._dtype_of(o) for o in operator.epilogue.outputs)
        return Job(operator.epilogue, operator.on_gemm, self.rows, self.columns, self.compute, dtypes)

    def _dtype_of(self, output: Output) -> torch.dtype:
        return self.dtypes.get(output.name) or output_dtype(output, self.default, self.compute)

    def tape(self, requires: Flags, values: Sequence[Value]) -> Tape:
        """The tape for values of which those so flagged require gradients."""
        tape = self._tapes.get(requires)
        if tape is None:
            tape = self._tapes[requires] = Tape(self, requires, values)
        return tape

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b.T` of [M, K] and [N, K], by the GEMM that hosts epilogues, rounded to `a`'s dtype; differentiable."""
        if is_traced():  # sizes may be symbols, which are no keys
            return invoke(Plan(_MATMUL, a.shape[0], b.shape[0], self.compute, a.dtype), (a, b))[0]
        key = (a.shape, b.shape, a.dtype)
        plan = self._matmuls.get(key)
        if plan is None:
            plan = self._matmuls[key] = Plan(_MATMUL, a.shape[0], b.shape[0], self.compute, a.dtype)
        return invoke(plan, (a, b))[0]


class Tape:
    """What a forward runs and keeps.

    Attributes:
        job: the forward that saves.
        visible: how many of its outputs the caller sees.
        kept_tensors, kept_numbers, kept_outputs: positions of the arguments and outputs that are kept.
        dtypes: of the arguments.
    """

    def __init__(self, plan: Plan, requires: Flags, values: Sequence[Value]) -> None:
        self.plan = plan
        self._recording = plan.operator.recording(requires)
        saving = self._recording.operator
        self.job = plan.job if saving is plan.operator else plan.job_of(saving)
        self.visible = self._recording.visible
        inputs = self._recording.inputs
        self.kept_tensors = tuple(slot for slot in inputs if isinstance(values[slot], Tensor))
        self.kept_numbers = tuple(slot for slot in inputs if not isinstance(values[slot], Tensor))
        self.kept_outputs = self._recording.outputs
        self.dtypes = tuple(v.dtype if isinstance(v, Tensor) else plan.compute for v in values)
        self._shapes = tuple(v.shape if isinstance(v, Tensor) else torch.Size() for v in values)
        self._device = next(v.device for v in values if isinstance(v, Tensor))
        self._steps: dict[tuple[Flags, Flags], Step] = {}

    def zeros(self, slot: int) -> Tensor:
        """The gradient of an argument on which nothing depends."""
        return torch.zeros(self._shapes[slot], dtype=self.dtypes[slot], device=self._device)

    def missing(self, position: int) -> Tensor:
        """The cotangent of an output that nobody used, where it cannot be left out."""
        output = self.job.epilogue.outputs[position]
        rows = (self.plan.rows,) if output.type.kind.has_rows else ()
        shape = rows + columns_of(output.type.width, self.plan.columns)
        return torch.zeros((), dtype=self.job.dtypes[position], device=self._device).expand(shape)

    def step(self, needs: Flags, present: Flags) -> Step:
        """The backward that gives these arguments' gradients from these outputs' cotangents."""
        key = (needs, present)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self, self._recording.route(needs, present))
        return step


class Step:
    """One backward: a route at given shapes and dtypes."""

    def __init__(self, tape: Tape, route: Route) -> None:
        self.route = route
        self._tape = tape
        self._plan: Plan | None = None
        if route.operator is not None:
            plan = tape.plan
            dtypes = _gradient_dtypes(route, tape.dtypes, plan.default)
            self._plan = Plan(route.operator, plan.rows, plan.columns, plan.compute, plan.default, dtypes)

    def run(
        self, cotangents: Sequence[Tensor | None], inputs: dict[int, Any], outputs: dict[int, Tensor]
    ) -> dict[str, Tensor]:
        """The backward's results by name."""
        tables: dict[str, Any] = {"param": inputs, "output": outputs, "cotangent": cotangents}
        values: dict[str, Any] = {}
        for name, (source, position) in self.route.places.items():
            value = tables[source][position]
            values[name] = self._tape.missing(position) if value is None else value
        results: dict[str, Tensor] = {result: values[name] for result, name in self.route.aliases.items()}
        if self._plan is not None:
            computed = invoke(self._plan, [values[name] for name in self.route.loaded])
            names = (o.name for o in self._plan.operator.epilogue.outputs)
            results.update(zip(names, computed, strict=True))
        return results


def _gradient_dtypes(route: Route, arguments: tuple[torch.dtype, ...], default: torch.dtype) -> dict[str, torch.dtype]:
    """Each result's dtype: that of the argument whose gradient it is; where arguments of several dtypes share it, one
    that holds them all, so that each is rounded once."""
    pairs = [(name, arguments[slot]) for slot, name in route.gradients]
    dtypes: dict[str, torch.dtype] = {}
    for name, dtype in pairs + ([(route.d_acc, default)] if route.d_acc else []):
        dtypes[name] = torch.promote_types(dtypes.get(name, dtype), dtype)
    return dtypes


def invoke(plan: Plan, values: Sequence[Value]) -> Sequence[Tensor]:
    """Run a plan on flattened values; differentiable where gradients are on and some value requires one."""
    if torch.is_grad_enabled():
        requires = tuple([isinstance(v, Tensor) and v.requires_grad for v in values])
        if True in requires:
            tape = plan.tape(requires, values)
            outputs: tuple[Tensor, ...] = _apply(tape, *values)
            return outputs[: tape.visible]
    return execute(plan.job, values)


class _Call(torch.autograd.Function):
    """One call on the autograd tape.  The first argument is the Tape, the others are the operator's values."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, *values: Value) -> tuple[Tensor, ...]:
        outputs = tuple(execute(tape.job, values))
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.numbers = [values[slot] for slot in tape.kept_numbers]
        ctx.save_for_backward(*[values[slot] for slot in tape.kept_tensors], *[outputs[i] for i in tape.kept_outputs])
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tape: Tape = ctx.tape
        needs: Flags = ctx.needs_input_grad[1:]
        present = tuple([c is not None for c in cotangents])
        if True not in present:
            return (None,) * (1 + len(needs))
        saved = ctx.saved_tensors
        count = len(tape.kept_tensors)
        inputs: dict[int, Any] = dict(zip(tape.kept_tensors, saved[:count], strict=True))
        inputs.update(zip(tape.kept_numbers, ctx.numbers, strict=True))
        outputs = dict(zip(tape.kept_outputs, saved[count:], strict=True))
        step = tape.step(needs, present)
        route, results = step.route, step.run(cotangents, inputs, outputs)
        gradients: list[Tensor | None] = [None] * len(needs)
        for slot in route.zeros:
            gradients[slot] = tape.zeros(slot)
        for slot, name in route.gradients:
            gradients[slot] = results[name].to(tape.dtypes[slot])
        if route.d_acc is not None:
            d_acc = results[route.d_acc].to(tape.plan.default)
            if needs[0]:
                gradients[0] = tape.plan.matmul(d_acc, inputs[1].T)
            if needs[1]:
                gradients[1] = tape.plan.matmul(d_acc.T, inputs[0].T)
        return (None, *gradients)


# What Function.apply adds to this prepares for torch.func, which `module` refuses, and costs as much as all of our own.
_apply: Any = super(torch.autograd.Function, _Call).apply


def _matmul_epilogue() -> Epilogue:
    builder = EpilogueBuilder("matmul", ("M", "N"))
    builder.store("y", builder.param("acc", tile()), tile())
    return builder.finish()


_MATMUL = Operator(_matmul_epilogue(), on_gemm=True)
