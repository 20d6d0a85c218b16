"""The derivative of a call of a program: the derived program, run on what its forward kept.

    forward    results, saved = derivative.forward                one node on the autograd tape for the whole program
    backward   gradients      = derivative.backward on the cotangents and on what was kept

A backward that is itself to be differentiated (`create_graph`) runs as another program, forward and backward in one: it
is given the cotangents and the program's arguments, and is a call like any other.  So derivatives of any order are
right, and nothing is kept for them but the arguments.

For each subset of cotangents and of arguments that need a gradient, a backward is derived once and kept.  That of a
program with f16 operands delays the scales of rows, which would take small gradients out of the range of f16; that of a
single epilogue is what is printed of it.  Where one that has fewer cotangents wants a value that the forward did not
keep, the missing cotangents are zeros.

Cotangents may be missing, strided, of stride 0, or shared, and are only read.  What the forward kept is dropped, or
overwritten, as the backward uses it, unless the graph is retained.

    ProgramOperator    a program; owns its derivatives
    Shaped             one of them at given extents and dtypes
    ProgramTape        with given arguments that require gradients: what the forward keeps
    ProgramStep        its backward for given cotangents and wanted gradients
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.autodiff.program import derive_program
from codalang.autodiff.program_activity import active_values
from codalang.autodiff.program_derivative import ProgramDerivative
from codalang.ir.names import Namer
from codalang.ir.program import Matmul, Product, Program, ProgramParam, Statement, TensorType, Vector
from codalang.ir.types import Dtype
from codalang.lower.spec import KernelSpec
from codalang.torch.execute import launches_repeat_now, rehearsal
from codalang.torch.opaque import is_traced
from codalang.torch.program_opaque import run_plan
from codalang.torch.program_plan import Plan, key_of, lie
from codalang.torch.program_step import Finish, Setting, Wanted
from codalang.torch.program_straight import Straight
from codalang.torch.program_values import types_of
from codalang.torch.signature import Value, remember
from codalang.torch.transforms import refuse_batches

Flags = tuple[bool, ...]
Names = frozenset[str]
_MOST_FORMS = 64  # of what a backward has, remembered by a tape


@attrs.define(eq=False)
class ProgramOperator:
    """A program, with its derivatives.

    Attributes:
        annotated: the values whose annotations are the author's.
        delays: scales of rows are delayed in f16.
    """

    program: Program
    annotated: Names
    delays: bool = True
    _derivatives: dict[tuple[Names, Names, bool], ProgramDerivative] = attrs.field(factory=dict, init=False)
    _gradients: dict[tuple[Names, Names, bool], GradientProgram] = attrs.field(factory=dict, init=False)
    _derived: dict[Program, ProgramOperator] = attrs.field(factory=dict, init=False)

    @staticmethod
    def of(program: Program, delays: bool = True) -> ProgramOperator:
        """The operator of a program as its author wrote it."""
        return ProgramOperator(program, frozenset(name for s in program.statements for name in s.makes), delays)

    def derived(self, program: Program) -> ProgramOperator:
        """The operator of a program that was derived from this one: the same for all extents, so that a new shape
        derives nothing."""
        return self._derived.setdefault(program, ProgramOperator(program, self.annotated, self.delays))

    @functools.cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of every value."""
        return types_of(self.program)

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """Where each parameter stands."""
        return {param.name: index for index, param in enumerate(self.program.params)}

    def derivative(self, wrt: Names, cotangents: Names, is_half: bool) -> ProgramDerivative:
        """The derivative for gradients of these parameters from the cotangents of these results; derived once."""
        delay = is_half and self.delays
        key = (wrt, cotangents, delay)
        if key not in self._derivatives:
            self._derivatives[key] = derive_program(self.program, wrt=wrt, cotangents=cotangents, delay_scales=delay)
        return self._derivatives[key]

    def gradient(self, wrt: Names, cotangents: Names, is_half: bool) -> GradientProgram:
        """The same in one program, as a function of cotangents and arguments."""
        key = (wrt, cotangents, is_half and self.delays)
        if key not in self._gradients:
            self._gradients[key] = GradientProgram.of(self, self.derivative(*key))
        return self._gradients[key]


@attrs.frozen(eq=False)
class GradientProgram:
    """Forward and backward in one.

    Attributes:
        operator: a program of cotangents, then of the parameters.
        cotangents: the results whose cotangents come first, in order.
        gradients: see ProgramDerivative.
    """

    operator: ProgramOperator
    cotangents: tuple[str, ...]
    gradients: dict[str, str | None]

    @staticmethod
    def of(operator: ProgramOperator, derivative: ProgramDerivative) -> GradientProgram:
        """The statements of the forward, then those of the backward on what they made."""
        program, forward, backward = operator.program, derivative.forward, derivative.backward
        makes = [name for statement in forward.statements for name in statement.makes]
        namer = Namer({*makes, *(p.name for p in program.params), *program.dims})
        rename: dict[str, str] = {}
        cotangents = []
        params = []
        for param in backward.params:
            load = derivative.loads[param.name]
            if load.source == "cotangent":
                rename[param.name] = namer.fresh(param.name)
                cotangents.append(load.name)
                params.append(ProgramParam(rename[param.name], operator.types[load.name]))
            else:
                rename[param.name] = load.name
        for statement in backward.statements:
            rename.update({name: namer.fresh(name) for name in statement.makes})
        statements = (*forward.statements, *(_renamed(s, rename) for s in backward.statements))
        results = tuple(dict.fromkeys(rename[name] for name in backward.results))
        gradients = {p: None if name is None else rename[name] for p, name in derivative.gradients.items()}
        whole = Program(backward.name, (*params, *program.params), statements, results)
        return GradientProgram(operator.derived(whole), tuple(cotangents), gradients)


def _renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    def of(name: str) -> str:
        return names.get(name, name)

    def matmul(host: Matmul) -> Matmul:
        return attrs.evolve(host, a=of(host.a), b=of(host.b))

    if isinstance(statement, Product):
        return attrs.evolve(statement, result=of(statement.result), matmul=matmul(statement.matmul))
    if isinstance(statement, Vector):
        return attrs.evolve(
            statement, result=of(statement.result), expression=_reading(statement.expression, of, statement.result)
        )
    host = statement.host
    return attrs.evolve(
        statement,
        results=tuple(None if name is None else of(name) for name in statement.results),
        host=matmul(host) if isinstance(host, Matmul) else None if host is None else of(host),
        inputs=tuple((param, of(value) if isinstance(value, str) else value) for param, value in statement.inputs),
    )


def _reading(expression: Any, of: Any, result: str) -> Any:
    """An expression of values with other names."""
    return attrs.evolve(
        expression,
        params=tuple(attrs.evolve(p, name=of(p.name)) for p in expression.params),
        nodes=tuple(attrs.evolve(n, attr=of(n.attr)) if n.op == "param" else n for n in expression.nodes),
        outputs=tuple(attrs.evolve(o, name=of(result)) for o in expression.outputs),
    )


@attrs.frozen(eq=False)
class Again:
    """A call that was run before on arguments of the same forms.

    Attributes:
        device: the index of their device, which must be the current one.
        launches: what the forward runs.
        tape: None where no gradients are recorded.
    """

    device: int
    launches: Straight
    tape: ProgramTape | None


class Shaped:
    """An operator at given extents and dtypes, as a function; `wanted` is asked of its results.

    It is differentiable where gradients are on and some argument requires one, and takes the list of its arguments, see
    `Plan.run`.
    """

    def __init__(self, operator: ProgramOperator, setting: Setting, wanted: Sequence[Wanted]) -> None:
        self.operator, self.setting, self.wanted = operator, setting, tuple(wanted)
        self._tapes: dict[Flags, ProgramTape] = {}

    def __call__(self, values: list[Any]) -> Sequence[Tensor]:
        tape = self._recording(values)
        if tape is None:
            return run_plan(self.plan, values)
        results: Sequence[Tensor] = recorded(tape, functools.partial(run_plan, tape.plan), *values)
        return results

    def again(self, values: list[Any]) -> Again | None:
        """What runs a call with arguments of these forms, where one was run on kernels."""
        tape = self._recording(values)
        launches = (self.plan if tape is None else tape.plan).again(values)
        return None if launches is None else Again(self.setting.device.index, launches, tape)

    def _recording(self, values: list[Any]) -> ProgramTape | None:
        if torch.is_grad_enabled():
            requires = tuple([isinstance(v, Tensor) and v.requires_grad for v in values])
            if True in requires:
                return self.tape(requires)
        return None

    @functools.cached_property
    def plan(self) -> Plan:
        """What runs where no gradients are recorded."""
        return Plan(self.operator.program, self.setting, self.wanted, annotated=self.operator.annotated)

    def tape(self, requires: Flags) -> ProgramTape:
        """The tape for arguments of which those so flagged require gradients."""
        tape = self._tapes.get(requires)
        if tape is None:
            tape = self._tapes[requires] = ProgramTape(self, requires)
        return tape


class ProgramTape:
    """What a forward runs and keeps so that any backward of these arguments can be run.

    Attributes:
        plan: it also gives what must be saved.
        visible: how many results the caller sees; the rest are the saved ones.
        constant: the results that have no gradient: no floats, or nothing that depends on an argument with one.
        kept_params, kept_results: what the usual backward reads: arguments and results, by position.
        given: the shape of each result, and of its cotangent, where a backward reads it.
        rest: the tensors among the other arguments: for a backward that is differentiated.
    """

    def __init__(self, shaped: Shaped, requires: Flags) -> None:
        operator, setting = shaped.operator, shaped.setting
        program = operator.program
        self.operator, self.setting = operator, setting
        wrt = frozenset(p.name for p, needed in zip(program.params, requires, strict=True) if needed)
        active = active_values(program, wrt)
        floats = [operator.types[name].dtype is Dtype.F32 for name in program.results]
        differentiable = [f and name in active for f, name in zip(floats, program.results, strict=True)]
        self.visible = len(program.results)
        self.constant = tuple(i for i, has in enumerate(differentiable) if not has)
        self._usual = (wrt, frozenset(n for n, has in zip(program.results, differentiable, strict=True) if has))
        self.first = operator.derivative(*self._usual, setting.is_half)
        self.forward = operator.derived(self.first.forward)
        wanted = (*shaped.wanted, *map(Wanted, self.first.saved))
        self.plan = Plan(self.first.forward, setting, wanted, annotated=operator.annotated)
        self.plan.later = functools.partial(self._backward_kernels, shaped.wanted, requires)
        loads = self.first.loads.values()
        tensors = [i for i, dtype in enumerate(setting.dtypes) if dtype is not None]
        read = {operator.positions[load.name] for load in loads if load.source == "param"}
        self.kept_params = tuple(i for i in tensors if i in read)
        self.rest = tuple(i for i in tensors if i not in read)
        self.numbers = tuple(i for i, dtype in enumerate(setting.dtypes) if dtype is None)
        self.results = {w.name: i for i, w in enumerate(wanted)}
        self.kept_results = tuple(sorted({self.results[ld.name] for ld in loads if ld.source in ("output", "saved")}))
        pairs = [finish is not None and finish.has_pairs for _, finish in self.plan.results]
        self.given = tuple(
            flat if has else shape for flat, shape, has in zip(self.plan.flat, self.plan.shapes, pairs, strict=True)
        )
        self._steps: dict[tuple[Flags, Flags], ProgramStep] = {}
        self._again: dict[object, Callable[[list[Any]], Sequence[Tensor | None]]] = {}
        self._differentiable: dict[tuple[Flags, Flags], DifferentiableStep] = {}

    def backward(self, needs: Flags, private: bool, have: list[Any]) -> Sequence[Tensor | None]:
        """A gradient for each argument, from what was saved, the numbers and the cotangents.  Takes the list.

        `private`: see `ProgramStep.plan`.
        """
        if is_traced():
            return self._step_for(needs, have).run(private, have)
        try:
            seen = (key_of(lie(have)), needs, private)
        except RuntimeError:  # cotangents without memory: sparse ones; a batch of them is refused
            return self._step_for(needs, have).run(private, have)
        again = self._again.get(seen)
        if again is not None and launches_repeat_now(self.setting.device.index):
            return again(have)
        step = self._step_for(needs, have)
        again = step.again(private, have)
        if again is not None:
            remember(self._again, seen, again, _MOST_FORMS)
        return step.run(private, have)

    def _step_for(self, needs: Flags, have: list[Any]) -> ProgramStep:
        first = len(have) - self.visible
        have[first:] = cotangents = _dense(have[first:])
        refuse_batches(cotangents)
        return self.step(needs, tuple([c is not None for c in cotangents]))

    def _backward_kernels(self, wanted: Sequence[Wanted], requires: Flags, values: list[Any]) -> Iterable[KernelSpec]:
        """Those of the usual backward, from all cotangents, for a call of tensors on `meta`."""
        setting = attrs.evolve(self.setting, device=torch.device("meta"))
        tape = ProgramTape(Shaped(self.operator, setting, wanted), requires)
        present = tuple([i not in tape.constant for i in range(tape.visible)])
        with rehearsal(self.setting.device) as specs:
            results = tape.plan.run(list(values))
            cotangents = [torch.empty_like(r) if has else None for r, has in zip(results, present, strict=False)]
            kept = [values[i] for i in tape.kept_params] + [results[i] for i in tape.kept_results]
            step = tape.step(requires, present)
            step.plan(private=True).run(step.arguments([*kept, *(values[i] for i in tape.numbers), *cotangents]))
        return specs

    def names(self, needs: Flags, present: Flags) -> tuple[Names, Names]:
        """The parameters whose gradients are wanted, and the results whose cotangents are there."""
        program = self.operator.program
        wrt = frozenset(p.name for p, need in zip(program.params, needs, strict=True) if need)
        given = frozenset(name for name, there in zip(program.results, present, strict=True) if there)
        return wrt, given - {program.results[i] for i in self.constant}

    def place(self, source: str, index: int) -> int:
        """Where a backward finds an argument, a result or a cotangent among what it has: the tensors that were saved,
        the numbers, the cotangents."""
        saved = len(self.kept_params) + len(self.kept_results)
        if source == "cotangent":
            return saved + len(self.numbers) + index
        if source != "param":
            return len(self.kept_params) + self.kept_results.index(index)
        return self.kept_params.index(index) if index in self.kept_params else saved + self.numbers.index(index)

    def view(self, source: str, index: int) -> Callable[[Any], Any] | None:
        """What makes of a result, or its cotangent, the value that steps know, pairs side by side; None for itself."""
        _, finish = self.plan.results[index] if source != "param" else (None, None)
        if finish is None or not finish.has_pairs:
            return None
        return functools.partial(finish.undone, value=self.plan.flat[index])

    def zeros(self, slot: int) -> Tensor:
        """The gradient of an argument on which nothing depends."""
        return torch.zeros(self.setting.shapes[slot], dtype=self.setting.dtypes[slot], device=self.setting.device)

    def step(self, needs: Flags, present: Flags) -> ProgramStep:
        """The backward that wants these arguments' gradients from these results' cotangents."""
        key = (needs, present)
        if key not in self._steps:
            self._steps[key] = ProgramStep(self, *self.names(needs, present))
        return self._steps[key]

    def differentiable(self, needs: Flags, present: Flags) -> DifferentiableStep:
        """The same as a call that is recorded."""
        key = (needs, present)
        if key not in self._differentiable:
            self._differentiable[key] = DifferentiableStep(self, *self.names(needs, present))
        return self._differentiable[key]

    def derivative(self, wrt: Names, given: Names) -> tuple[ProgramDerivative, bool]:
        """A derivative whose backward loads nothing but what was kept, and whether what is missing must be zeros."""
        if (wrt, given) == self._usual:
            return self.first, False
        found = self.forward.derivative(wrt, given, self.setting.is_half)
        if self._has(found):
            return found, False
        return self.first, True

    def _has(self, derivative: ProgramDerivative) -> bool:
        """Was all that a backward loads kept?"""
        kept = {list(self.results)[i] for i in self.kept_results}
        params = {self.operator.program.params[i].name for i in (*self.kept_params, *self.numbers)}
        have = {"cotangent": set(self.results), "param": params, "output": kept, "saved": set()}
        return all(load.name in have[load.source] for load in derivative.loads.values())


@attrs.frozen(eq=False)
class _Gradients:
    """The gradients of a backward.

    Attributes:
        wanted: what is asked of each result that is one.
        whose: (argument, result, what makes that argument's of it, where several share it and differ: all but the
            first get a copy, for gradients may be written into).
        zeros: the arguments whose gradient is zero.
    """

    wanted: tuple[Wanted, ...]
    whose: tuple[tuple[int, int, Finish | None], ...]
    zeros: tuple[int, ...]

    @staticmethod
    def of(tape: ProgramTape, gradients: Mapping[str, str | None], wrt: Names, copied: bool) -> _Gradients:
        """Those of the arguments `wrt`, of these results."""
        setting, positions = tape.setting, tape.operator.positions
        params = [p for p in tape.operator.program.params if p.name in wrt]
        asked: dict[str, list[Wanted]] = {}
        for param in params:
            slot, name = positions[param.name], gradients.get(param.name)
            if name is not None:
                wanted = Wanted(name, setting.dtypes[slot], param.type, setting.shapes[slot], copied)
                asked.setdefault(name, []).append(wanted)
        order = {name: index for index, name in enumerate(asked)}
        whose = []
        for param in params:
            slot, name = positions[param.name], gradients.get(param.name)
            if name is not None:
                shared = any(wanted != asked[name][0] for wanted in asked[name])
                finish = Finish(
                    setting.shapes[slot],
                    setting.dtypes[slot],
                    param.type if param.type.pair_axis is not None else None,
                    setting.flat[slot],
                    copied=name in {gradients.get(p.name) for p in params[: params.index(param)]},
                )
                whose.append((slot, order[name], finish if shared else None))
        return _Gradients(
            tuple(_joint(wanted) for wanted in asked.values()),
            tuple(whose),
            tuple(positions[p.name] for p in params if gradients.get(p.name) is None),
        )

    def spread(self, tape: ProgramTape, results: Sequence[Tensor]) -> list[Tensor | None]:
        """A gradient for each argument."""
        found: list[Tensor | None] = [None] * len(tape.setting.shapes)
        for slot in self.zeros:
            found[slot] = tape.zeros(slot)
        for slot, index, finish in self.whose:
            found[slot] = results[index] if finish is None else finish(results[index])
        return found


def _joint(asked: Sequence[Wanted]) -> Wanted:
    """What is asked of a gradient that several arguments share: where they differ, its own form, rounded once."""
    if all(wanted == asked[0] for wanted in asked):
        return asked[0]
    dtypes = [wanted.dtype for wanted in asked if wanted.dtype is not None]
    return Wanted(asked[0].name, functools.reduce(torch.promote_types, dtypes), copied=asked[0].copied)


class ProgramStep:
    """One backward: a plan of the derived program, and which of its results is whose gradient.

    Attributes:
        places: for each of the plan's arguments where it is, see `ProgramTape.place`, and what makes it of that.
        gradients: whose gradient each result is.
    """

    def __init__(self, tape: ProgramTape, wrt: Names, given: Names) -> None:
        self.tape = tape
        derivative, filled = tape.derivative(wrt, given)
        self.gradients = _Gradients.of(tape, derivative.gradients, wrt, copied=False)
        results = tuple(wanted.name for wanted in self.gradients.wanted)
        program = attrs.evolve(derivative.backward, results=results)
        read = {name for s in program.statements for name in s.reads} | set(results)
        program = attrs.evolve(program, params=tuple(p for p in program.params if p.name in read))
        setting = tape.setting
        places: list[tuple[int, Callable[[Any], Any] | None]] = []
        private = []
        saved = {tape.results[name] for name in tape.first.saved}
        shapes: list[Any] = []
        flat: list[Any] = []
        dtypes: list[torch.dtype | None] = []
        for param in program.params:
            load = derivative.loads[param.name]
            if load.source == "param":
                index = tape.operator.positions[load.name]
                shapes.append(setting.shapes[index])
                flat.append(setting.flat[index])
                dtypes.append(setting.dtypes[index])
            else:
                index = tape.results[load.name]
                shapes.append(tape.given[index])
                flat.append(tape.plan.flat[index])
                dtypes.append(tape.plan.dtypes[index])
            if load.source == "cotangent" and filled and load.name not in given:
                zeros = functools.partial(torch.zeros, shapes[-1], dtype=dtypes[-1], device=setting.device)
                places.append((0, functools.partial(_in_place_of, zeros)))
            else:
                places.append((tape.place(load.source, index), tape.view(load.source, index)))
            if load.source in ("output", "saved") and index in saved:
                private.append(param.name)
        self.places = tuple(places)
        self._private = tuple(private)
        self._program = program
        self._setting = attrs.evolve(
            setting, shapes=tuple(shapes), flat=tuple(flat), dtypes=tuple(dtypes), derived=True
        )
        self._plans: dict[bool, Plan] = {}

    def arguments(self, have: Sequence[Any]) -> list[Any]:
        """Of the plan, from what was saved, the numbers and the cotangents."""
        return [have[place] if view is None else view(have[place]) for place, view in self.places]

    def plan(self, private: bool) -> Plan:
        """`private`: what the forward saved belongs to this run alone, and may be overwritten."""
        if private not in self._plans:
            owned = self._private if private else ()
            self._plans[private] = Plan(self._program, self._setting, self.gradients.wanted, annotated=(), owned=owned)
        return self._plans[private]

    def run(self, private: bool, have: list[Any]) -> list[Tensor | None]:
        """A gradient for each argument, from what `places` are in.  Takes the list."""
        return self._run(functools.partial(run_plan, self.plan(private)), have)

    def again(self, private: bool, have: list[Any]) -> Callable[[list[Any]], list[Tensor | None]] | None:
        """What does the same for values of these forms, where it ran on such on kernels."""
        launches = self.plan(private).again(self.arguments(have))
        return None if launches is None else functools.partial(self._run, launches)

    def _run(self, run: Straight, have: list[Any]) -> list[Tensor | None]:
        values = self.arguments(have)
        have.clear()  # nothing but the list of values holds what was saved
        return self.gradients.spread(self.tape, run(values))


def _dense(cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Cotangents as strided tensors: those of an embedding's rows, say, come sparse."""
    return [c if c is None or c.layout is torch.strided else c.to_dense() for c in cotangents]


class DifferentiableStep:
    """One backward as a call of a program of cotangents and arguments."""

    def __init__(self, tape: ProgramTape, wrt: Names, given: Names) -> None:
        gradient = tape.operator.gradient(wrt, given, tape.setting.is_half)
        self.gradients = _Gradients.of(tape, gradient.gradients, wrt, copied=True)
        setting = tape.setting
        self.cotangents = tuple(tape.results[name] for name in gradient.cotangents)
        plan = tape.plan
        results = tuple(wanted.name for wanted in self.gradients.wanted)
        self.shaped = Shaped(
            gradient.operator.derived(attrs.evolve(gradient.operator.program, results=results)),
            attrs.evolve(
                setting,
                shapes=(*(tape.given[i] for i in self.cotangents), *setting.shapes),
                flat=(*(plan.flat[i] for i in self.cotangents), *setting.flat),
                dtypes=(*(plan.dtypes[i] for i in self.cotangents), *setting.dtypes),
                derived=True,
            ),
            self.gradients.wanted,
        )


def _in_place_of(make: Callable[[], Tensor], other: object) -> Tensor:
    return make()


class _Call(torch.autograd.Function):
    """One call on the autograd tape.  The first arguments are the ProgramTape and what runs its plan, the others are
    the program's."""

    @staticmethod
    def forward(ctx: Any, tape: ProgramTape, run: Straight, *values: Value) -> tuple[Tensor, ...]:
        # A result that is a view, if of nothing that anybody else has, could not be written into.
        results = [r.data if r._is_view() else r for r in run(list(values))]
        ctx.set_materialize_grads(False)
        if tape.constant:
            ctx.mark_non_differentiable(*[results[i] for i in tape.constant])
        ctx.tape = tape
        ctx.numbers = [values[i] for i in tape.numbers]
        ctx.rest = [(values[i], _version(values[i])) for i in tape.rest]
        ctx.private = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        ctx.save_for_backward(*[values[i] for i in tape.kept_params], *[results[i] for i in tape.kept_results])
        return tuple(results[: tape.visible])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tape: ProgramTape = ctx.tape
        needs: Flags = ctx.needs_input_grad[2:]
        if all([c is None for c in cotangents]):
            return (None,) * (2 + len(needs))
        if torch.is_grad_enabled():
            return (None, None, *_differentiable_backward(ctx, tape, needs, cotangents))
        have = [*ctx.saved_tensors, *ctx.numbers, *cotangents]
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        if last:
            ctx.maybe_clear_saved_tensors()
            ctx.rest = None
        return (None, None, *tape.backward(needs, last and ctx.private, have))


def _differentiable_backward(
    ctx: Any, tape: ProgramTape, needs: Flags, cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    if ctx.rest is None:
        raise RuntimeError("the graph of this call was freed by an earlier backward: pass retain_graph=True to it")
    refuse_batches(cotangents)
    cotangents = _dense(cotangents)
    step = tape.differentiable(needs, tuple([c is not None for c in cotangents]))
    arguments: dict[int, Any] = dict(zip(tape.kept_params, ctx.saved_tensors, strict=False))
    arguments.update(zip(tape.numbers, ctx.numbers, strict=True))
    for slot, (tensor, version) in zip(tape.rest, ctx.rest, strict=True):
        if _version(tensor) != version:
            raise RuntimeError(
                f"`{tape.operator.program.params[slot].name}` was modified by an inplace operation, and the derivative "
                "of the derivative needs it"
            )
        arguments[slot] = tensor
    views = [(cotangents[i], tape.view("cotangent", i)) for i in step.cotangents]
    values = [c if view is None else view(c) for c, view in views] + [arguments[i] for i in range(len(needs))]
    results = step.shaped(values)
    return step.gradients.spread(tape, results)


def _version(tensor: Any) -> int:
    """How often it was written into; tensors of inference mode do not say."""
    return 0 if tensor.is_inference() else int(tensor._version)


# What Function.apply adds to this prepares for torch.func, which calls refuse, and costs as much as all of our own.
recorded: Any = super(torch.autograd.Function, _Call).apply
