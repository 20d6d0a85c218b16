"""The derivative of a call: a forward that saves, a derived epilogue on the cotangent, and plain GEMMs.

    forward    outputs, saved = derivative.forward on A @ B.T                     one kernel
    backward   d_acc, d_params = derivative.backward hosted on the cotangents     one kernel
               d_a = d_acc @ w        d_w = d_acc.T @ a                           one GEMM each, where wanted

The backward is made of the same differentiable calls as the forward, and saved values are (hidden) outputs of the
forward, so they carry history: derivatives of any order are right, without a rule for any order.

Cotangents may be missing, strided, of stride 0, or shared, and are only read.  For each subset of cotangents and of
inputs that need a gradient, a backward is derived once and kept; it loads nothing but what the forward kept.

Indices and masks have no gradient: None goes to an input of them, and nothing comes from an output.

    Operator    an epilogue and how it is hosted; owns its derivatives
    Plan        an operator at given extents and dtypes
    Tape        a plan whose inputs of a given subset require gradients: what the forward keeps
    Step        a tape's backward for given cotangents and wanted gradients
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.autodiff import Derivative, Load, derive
from codalang.errors import CodaUnsupportedError
from codalang.ir.build import EpilogueBuilder, canonical
from codalang.ir.epilogue import Epilogue, Output, Store
from codalang.ir.types import Dtype, tile
from codalang.torch.execute import Job
from codalang.torch.opaque import execute, is_traced
from codalang.torch.signature import Extent, Value, output_dtype

Flags = tuple[bool, ...]


@attrs.define(eq=False)
class Operator:
    """An epilogue, hosted on a GEMM (its first two arguments are A and B) or on plain tensors."""

    epilogue: Epilogue
    on_gemm: bool
    _derivatives: dict[Any, Derivative] = attrs.field(factory=dict, init=False)
    _derived: dict[tuple[Epilogue, bool], Operator] = attrs.field(factory=dict, init=False)

    def derived(self, epilogue: Epilogue, on_gemm: bool) -> Operator:
        """The operator of an epilogue that was derived from this one: the same for all extents, so that a new shape
        derives nothing, and finds its kernels by identity."""
        return self._derived.setdefault((epilogue, on_gemm), Operator(epilogue, on_gemm))

    def derivative(
        self, wrt: frozenset[str], cotangents: frozenset[str], kept: frozenset[Load] | None = None
    ) -> Derivative:
        """The derivative for gradients of `wrt` from the cotangents of these outputs; derived once.

        `kept`: what its backward may load beside cotangents (default: whatever is best, for a forward yet to run).
        """
        key = (wrt, cotangents, kept)
        if key not in self._derivatives:
            self._derivatives[key] = derive(
                self.epilogue, wrt=wrt, cotangents=cotangents, hosted=not self.on_gemm, kept=kept
            )
        return self._derivatives[key]

    def slot(self, param: str) -> int:
        """The position of a parameter's value.  Raises KeyError for the accumulator of a GEMM."""
        return self._slots[param]

    def has_slot(self, param: str) -> bool:
        """False for the accumulator of a GEMM, which is no argument."""
        return param in self._slots

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
        samples: B, where there is one row per sample.
    """

    operator: Operator
    rows: Extent
    columns: Extent
    compute: torch.dtype
    default: torch.dtype
    dtypes: dict[str, torch.dtype] = attrs.field(factory=dict)
    samples: Extent = 0
    job: Job = attrs.field(init=False)
    _tapes: dict[Flags, Tape] = attrs.field(factory=dict, init=False)
    _matmuls: dict[tuple[torch.Size, torch.Size, torch.dtype], Plan] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.job = self.job_of(self.operator.epilogue)

    def job_of(self, epilogue: Epilogue) -> Job:
        """The operator's epilogue, or the one that also saves, as a job."""
        dtypes = tuple(self.dtype_of(o) for o in epilogue.outputs)
        return Job(epilogue, self.operator.on_gemm, self.rows, self.columns, self.compute, dtypes, self.samples)

    def dtype_of(self, output: Output) -> torch.dtype:
        """The storage dtype of an output."""
        return self.dtypes.get(output.name) or output_dtype(output, self.default, self.compute)

    def job_that_saves(self, forward: Epilogue, saved: Collection[str]) -> Job:
        """The forward with what it saves; a value that is saved in f32 to be exact is so in float64, too."""
        job = self.job_of(forward)
        exact = {torch.float32: self.compute}
        pairs = zip(forward.outputs, job.dtypes, strict=True)
        return attrs.evolve(job, dtypes=tuple(exact.get(d, d) if o.name in saved else d for o, d in pairs))

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
    """What a forward runs and keeps so that any backward of these inputs can be derived.

    Attributes:
        operator: the one that also stores what must be saved; steps are derived from it, and to them a saved value is
            an output like any other.
        kept_tensors, kept_numbers: the arguments that are kept, by position.
        kept_outputs: the outputs that are kept, visible ones or saved ones.
        visible: how many outputs the caller sees; the rest are the saved ones.
        indices: the outputs that hold no floats.
    """

    def __init__(self, plan: Plan, requires: Flags, values: Sequence[Value]) -> None:
        operator = plan.operator
        self.plan = plan
        names = frozenset(o.name for o in operator.epilogue.outputs)
        first = operator.derivative(operator.wanted(requires), names)
        self._first = first
        # Where nothing is saved the operator stays: a kernel is found fastest by an epilogue that is the same object.
        self.operator = operator.derived(first.forward, operator.on_gemm) if first.saved else operator
        self.job = plan.job_that_saves(first.forward, first.saved) if first.saved else plan.job
        self.outputs = {o.name: i for i, o in enumerate(self.operator.epilogue.outputs)}
        self.visible = len(operator.epilogue.outputs)
        given = self.operator.epilogue.outputs
        self.indices = tuple(i for i, o in enumerate(given) if o.type.dtype is not Dtype.F32)
        self._usual = (requires, tuple(i < self.visible and i not in self.indices for i in range(len(given))))
        inputs = {operator.slot(load.name) for load in first.loads.values() if load.source == "param"}
        if operator.on_gemm:
            inputs |= {other for other, slot in ((1, 0), (0, 1)) if requires[slot]}
        self.kept_tensors = tuple(sorted(slot for slot in inputs if isinstance(values[slot], Tensor)))
        self.kept_numbers = tuple(sorted(slot for slot in inputs if not isinstance(values[slot], Tensor)))
        loaded = {self.outputs[load.name] for load in first.loads.values() if load.source in ("output", "saved")}
        self.kept_outputs = tuple(sorted(loaded))
        self._kept = frozenset(
            Load("output" if load.source == "saved" else load.source, load.name)
            for load in first.loads.values()
            if load.source != "cotangent"
        )
        self.dtypes = tuple(v.dtype if isinstance(v, Tensor) else plan.compute for v in values)
        self._shapes = tuple(v.shape if isinstance(v, Tensor) else torch.Size() for v in values)
        self._device = next(v.device for v in values if isinstance(v, Tensor))
        # No rows, or no columns; an extent that is a symbol is not 0.
        self._empty = any(isinstance(e, int) and e == 0 for e in (plan.rows, plan.columns))
        self._steps: dict[tuple[Flags, Flags], Step] = {}

    def zeros(self, slot: int) -> Tensor:
        """The gradient of an argument on which nothing depends."""
        return torch.zeros(self._shapes[slot], dtype=self.dtypes[slot], device=self._device)

    def step(self, needs: Flags, present: Flags) -> Step:
        """The backward that wants these arguments' gradients from these outputs' cotangents.

        A backward adds the cotangent of a stored vector where col_index() (or row_index()) is 0.  Where there is no
        such place, because the other axis is empty, one is made: nothing else than such vectors has a derivative then,
        and what they are computed of has no part in that axis either.
        """
        lasting = tuple([there and self._outlasts(i) for i, there in enumerate(present)]) if self._empty else present
        present = lasting if True in lasting else present
        key = (needs, present)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self, needs, present)
        return step

    def extents_for(self, present: Flags) -> tuple[Extent, Extent]:
        """The extents of the backward from these outputs' cotangents: see `step`."""
        rows, columns = self.plan.rows, self.plan.columns
        if self._empty and all(self._outlasts(i) for i, there in enumerate(present) if there):
            return rows or self.plan.samples or 1, columns or 1
        return rows, columns

    def _outlasts(self, index: int) -> bool:
        """Is an output a stored vector that has no empty axis?"""
        output = self.operator.epilogue.outputs[index]
        kind = output.type.kind
        along = [(kind.has_rows, self.plan.rows), (kind.has_columns, self.plan.columns)]
        return isinstance(output, Store) and all(extent for has, extent in along if has)

    def derivative(self, needs: Flags, present: Flags) -> Derivative:
        """A derivative whose backward loads nothing but what was kept."""
        if (needs, present) == self._usual:
            return self._first
        given = frozenset(name for name, there in zip(self.outputs, present, strict=True) if there)
        try:
            return self.operator.derivative(self.operator.wanted(needs), given, self._kept)
        except CodaUnsupportedError as error:
            raise CodaUnsupportedError(
                f"this derivative of `{self.plan.operator.epilogue.name}` needs values that its forward did not keep",
                error.loc,
                hint="compute the second derivative through codalang.ir.reference.run, which torch differentiates",
            ) from None

    def place(self, load: Load) -> tuple[str, int]:
        """Where a backward's parameter comes from: the position of an argument ("param"), or of an output."""
        if load.source == "param":
            return "param", self.operator.slot(load.name)
        return "cotangent" if load.source == "cotangent" else "output", self.outputs[load.name]


class Step:
    """One backward: a hosted call of the derived epilogue, and which of its outputs is whose gradient.

    Attributes:
        gradients: position of an argument -> name of the result that is its gradient.
        d_acc: the result that is the gradient of the matmul, None where that is zero or there is none.
        zeros: positions of arguments whose gradient is zero.
    """

    def __init__(self, tape: Tape, needs: Flags, present: Flags) -> None:
        plan, operator = tape.plan, tape.operator
        derivative = tape.derivative(needs, present)
        named = {param: name for param, name in derivative.gradients.items() if name is not None}
        self.gradients = tuple((operator.slot(p), name) for p, name in named.items() if operator.has_slot(p))
        self.d_acc = next((name for p, name in named.items() if not operator.has_slot(p)), None)
        found = {slot for slot, _ in self.gradients} | ({0, 1} if self.d_acc else set())
        self.zeros = tuple(slot for slot, need in enumerate(needs) if need and slot not in found)
        # A gradient that is one of the loaded tensors needs no kernel.
        backward = derivative.backward
        self._aliases = {o.name: param for o in backward.outputs if (param := _alias(backward, o))}
        backward = _without(backward, self._aliases)
        self._loaded = tuple(p.name for p in backward.params)
        self._computed = tuple(o.name for o in backward.outputs)
        wanted = {*self._loaded, *self._aliases.values()}
        self._places = {name: tape.place(load) for name, load in derivative.loads.items() if name in wanted}
        self._tape = tape
        self._plan = None
        if self._computed:
            hosted = operator.derived(backward, on_gemm=False)
            extents = tape.extents_for(present)
            self._plan = Plan(hosted, *extents, plan.compute, plan.default, self._dtypes(), plan.samples)

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Each result's dtype: that of the argument whose gradient it is; where arguments of several dtypes share it,
        one that holds them all, so that each is rounded once."""
        dtypes: dict[str, torch.dtype] = {}
        pairs = [(name, self._tape.dtypes[slot]) for slot, name in self.gradients]
        for name, dtype in pairs + ([(self.d_acc, self._tape.plan.default)] if self.d_acc else []):
            dtypes[name] = torch.promote_types(dtypes.get(name, dtype), dtype)
        return dtypes

    def run(
        self, cotangents: Sequence[Tensor | None], inputs: dict[int, Any], outputs: dict[int, Tensor]
    ) -> dict[str, Tensor]:
        """The backward's results by name."""
        tables: dict[str, Any] = {"param": inputs, "output": outputs, "cotangent": cotangents}
        values = {name: tables[source][index] for name, (source, index) in self._places.items()}
        results: dict[str, Tensor] = {output: values[name] for output, name in self._aliases.items()}
        if self._plan is not None:
            computed = invoke(self._plan, [values[name] for name in self._loaded])
            results.update(zip(self._computed, computed, strict=True))
        return results


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
        if tape.indices:
            ctx.mark_non_differentiable(*[outputs[i] for i in tape.indices])
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
        results = step.run(cotangents, inputs, outputs)
        gradients: list[Tensor | None] = [None] * len(needs)
        for slot in step.zeros:
            gradients[slot] = tape.zeros(slot)
        for slot, name in step.gradients:
            gradients[slot] = results[name].to(tape.dtypes[slot])
        if step.d_acc is not None:
            d_acc = results[step.d_acc].to(tape.plan.default)
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
