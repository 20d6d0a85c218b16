"""A program at given extents and dtypes, as a flat list of steps over slots: everything is decided here, once.

    Plan    slots, one per value; arguments first, then numbers, then what steps make
    Step    one epilogue on its host (`execute.Job`), or one cast; where its arguments come from and its results go

What decides a plan is in `Setting` and `Wanted`; tensors differ from call to call in their addresses only.

A value is dropped right after its last use, so that the allocator gives its memory to the next.  A tile that is used
for the last time, and is the plan's own, is overwritten by an output of equal shape and dtype, where one is there.

Matmuls without an epilogue run on the same GEMM, with one that stores what it gets.  What nobody reads is not computed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.errors import CodaCallError, Loc
from codalang.ir.build import EpilogueBuilder, canonical
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Reduce, Store
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, TensorType, Value, Vector
from codalang.ir.program_reference import view
from codalang.ir.simplify import simplify
from codalang.ir.types import Dtype, Kind, tile
from codalang.lower.folded import Matrix
from codalang.torch.execute import Job, Launch, execute, execute_listening, kernels_possible
from codalang.torch.opaque import is_traced
from codalang.torch.program_auxiliary import is_elementwise, merged, rows_of
from codalang.torch.program_call import Shape, extent
from codalang.torch.signature import Extent, Signature, columns_of, output_dtype

Prepare = Callable[[Tensor], Any]
_MOST_FORMS = 64  # of arguments, remembered by a plan


@attrs.frozen(eq=False)
class Setting:
    """What is known of a program's arguments.

    Attributes:
        sizes: the number that each dimension name stands for.
        shapes: of each argument, batch dimensions included.
        flat: of each argument, as it is declared.
        dtypes: of each argument, None for numbers.
        compute: what the reference computes in.
        device: where it runs.
        autocast: what operands of matmuls are cast to, or None.
        derived: the program was derived: operands of two dtypes are brought to the one that the forward multiplied.
    """

    sizes: Mapping[str, Extent]
    shapes: tuple[Shape, ...]
    flat: tuple[Shape, ...]
    dtypes: tuple[torch.dtype | None, ...]
    compute: torch.dtype
    device: torch.device
    autocast: torch.dtype | None = None
    derived: bool = False


@attrs.frozen
class Wanted:
    """A result, each value once, and what is asked of it.

    Attributes:
        name: of the value.
        dtype: None for its own.
        type: the type whose view it is, None for its own.
        shape: None for that of the type.
        copied: where it is an argument, a new tensor.
    """

    name: str
    dtype: torch.dtype | None = None
    type: TensorType | None = None
    shape: Shape | None = None
    copied: bool = True


@attrs.frozen(eq=False)
class Finish:
    """What makes the caller's tensor of a value.

    Attributes:
        shape: of that tensor.
        dtype: None for the value's own.
        viewed: the type with pairs whose view the value is, which are brought apart; `flat`: its shape.
        copied: the value is an argument, and is copied.
        permuted: the value lies where the caller gets it, and this permutation undoes its view.
    """

    shape: Shape
    dtype: torch.dtype | None = None
    viewed: TensorType | None = None
    flat: Shape = ()
    copied: bool = False
    permuted: tuple[int, ...] | None = None

    @property
    def has_pairs(self) -> bool:
        """Is the value a view of what the caller gets that is not only of another shape?"""
        return self.viewed is not None

    def undone(self, tensor: Tensor, value: Shape) -> Tensor:
        """A tensor like the caller's as one like the value."""
        if self.viewed is None:
            return tensor
        return tensor.reshape(self.flat).permute(self.viewed.order).reshape(value)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.permuted is not None:
            return tensor.permute(self.permuted)
        if self.viewed is not None:
            order = self.viewed.order
            tensor = tensor.reshape([self.flat[axis] for axis in order]).permute(order).contiguous()
        if self.dtype is not None:
            tensor = tensor.to(self.dtype)
        elif self.copied:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor if tensor.shape == self.shape else tensor.reshape(self.shape)


@attrs.frozen
class Placed:
    """An output that is written where the caller gets it: `order` is the permutation that makes its view of `shape`."""

    output: str
    shape: Shape
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """The view that the output fills."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).permute(self.order)


@attrs.frozen(eq=False)
class Step:
    """Attributes:
    job: what is run; None casts the one argument to `dtype`.
    arguments: slots.
    prepare: for each argument what makes a view of it, None where it is taken as it is.
    results: a slot for each output.
    dead: slots that hold nothing needed after this step.
    in_place: (output, argument): that argument's memory is the output's.
    """

    job: Job | None
    arguments: tuple[int, ...]
    prepare: tuple[Prepare | None, ...]
    results: tuple[int, ...]
    dtype: torch.dtype | None = None
    dead: tuple[int, ...] = ()
    in_place: tuple[tuple[str, int], ...] = ()
    placed: tuple[Placed, ...] = ()
    taken: tuple[tuple[int, Prepare | None], ...] = attrs.field(init=False)

    @taken.default
    def _taken(self) -> tuple[tuple[int, Prepare | None], ...]:
        return tuple(zip(self.arguments, self.prepare, strict=True))

    def run(self, slots: list[Any]) -> None:
        """Run it on the slots' values."""
        values = self._values(slots)
        if self.job is None:
            slots[self.results[0]] = values[0].to(self.dtype)
        else:
            self._finish(slots, execute(self.job, values, self._out(values)))
        for slot in self.dead:
            slots[slot] = None

    def run_listening(self, slots: list[Any]) -> Launch | None:
        """The same; what it launched, where `repeat` may launch that again."""
        if self.job is None:
            self.run(slots)
            return None
        values = self._values(slots)
        outputs, launch = execute_listening(self.job, values, self._out(values))
        self._finish(slots, outputs)
        for slot in self.dead:
            slots[slot] = None
        return launch

    def repeat(self, slots: list[Any], launch: Launch) -> None:
        """Run it as before, on values of the same forms."""
        values = self._values(slots)
        self._finish(slots, launch.run(values, self._out(values)))
        for slot in self.dead:
            slots[slot] = None

    def _values(self, slots: list[Any]) -> list[Any]:
        return [p(slots[i]) if p else slots[i] for i, p in self.taken]

    def _out(self, values: list[Any]) -> dict[str, Tensor] | None:
        out = {name: values[i] for name, i in self.in_place} if self.in_place else None
        if self.placed:
            out = (out or {}) | {place.output: place.allocate() for place in self.placed}
        return out

    def _finish(self, slots: list[Any], outputs: Iterable[Tensor]) -> None:
        for slot, tensor in zip(self.results, outputs, strict=True):
            slots[slot] = tensor


@attrs.frozen(eq=False)
class Known:
    """What a plan knows of a value before it is there.

    Attributes:
        shape: of the tensor in the slot; `flat`: as it is declared.
        dtype: None for numbers.
        order: where the slot holds a view of what the caller gets, the permutation that makes it that again.
    """

    slot: int
    type: TensorType
    shape: Shape
    flat: Shape
    dtype: torch.dtype | None
    order: tuple[int, ...] | None = None


class Plan:
    """See the module's docstring.

    Attributes:
        shapes, flat: of each result, as the caller gets it and as the value is.
        dtypes: of each result.
    """

    def __init__(
        self,
        program: Program,
        setting: Setting,
        wanted: Sequence[Wanted] | None = None,
        *,
        annotated: Collection[str] | None = None,
        owned: Collection[str] = (),
    ) -> None:
        """`wanted`: the results (default: the program's); `annotated`: values whose annotation is the author's (default
        all): in others f32 stands for what is computed in; `owned`: arguments that nobody else has, which may be
        overwritten."""
        wanted = tuple(wanted) if wanted is not None else tuple(map(Wanted, program.results))
        program = live(attrs.evolve(program, results=tuple(w.name for w in wanted)))
        planner = _Planner(program, setting, wanted, annotated, frozenset(owned))
        self.program, self.setting, self.wanted = program, setting, wanted
        self.steps = planner.steps()
        self._constants = tuple(planner.constants)
        self._count = len(program.params)
        self._launches: dict[object, tuple[Launch | None, ...]] = {}
        self._spare: list[Any] = [None] * (planner.count - len(program.params) - len(self._constants))
        known = [planner.values[w.name] for w in wanted]
        self.results = tuple((value.slot, planner.finish(w)) for value, w in zip(known, wanted, strict=True))
        self.own = tuple((value.flat, value.dtype) for value in known)
        self.flat = tuple(value.flat for value in known)
        self.shapes = tuple(
            finish.shape if finish is not None else value.shape
            for value, (_, finish) in zip(known, self.results, strict=True)
        )
        self.dtypes = tuple(w.dtype or value.dtype for value, w in zip(known, wanted, strict=True))

    def run(self, values: list[Any]) -> list[Tensor]:
        """The results, for the arguments in order.  Takes the list: what is in it is dropped as soon as it can be."""
        slots = values
        slots += self._constants
        slots += self._spare
        device = self.setting.device
        if not kernels_possible(device):
            for step in self.steps:
                step.run(slots)
        elif torch.cuda.current_device() == device.index:
            self._launch(slots)
        else:
            with torch.cuda.device(device):
                self._launch(slots)
        return [slots[slot] if finish is None else finish(slots[slot]) for slot, finish in self.results]

    def _launch(self, slots: list[Any]) -> None:
        """Run the steps; where they ran before on arguments of the same forms, nothing but addresses is looked at."""
        from codalang.lower import run

        forms = [(v.stride(), v.data_ptr() & 15) if isinstance(v, Tensor) else None for v in slots[: self._count]]
        key = (vars(run)["function"], *forms)  # which tests and recordings replace
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _MOST_FORMS:
                self._launches.clear()
            self._launches[key] = tuple([step.run_listening(slots) for step in self.steps])
            return
        for step, launch in zip(self.steps, launches, strict=True):
            if launch is None:
                step.run(slots)
            else:
                step.repeat(slots, launch)


# ---- programs --------------------------------------------------------------------------------------------------------


def types_of(program: Program) -> dict[str, TensorType]:
    """The type of every value."""
    types = {param.name: param.type for param in program.params}
    for statement in program.statements:
        types.update(_made_by(statement, types))
    return types


def _made_by(statement: Statement, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    if isinstance(statement, Product):
        return {statement.result: TensorType(_product_of(statement.matmul, types))}
    if isinstance(statement, Vector):
        output = statement.expression.outputs[0]
        shape = (statement.length,) if output.type.kind is Kind.ROW else ()
        return {statement.result: TensorType(shape, output.type.dtype)}
    m, n, *samples = statement.extents
    made = {}
    for name, output in zip(statement.results, statement.epilogue.outputs, strict=True):
        if name is not None:
            rows = (samples[0] if output.type.kind is Kind.ROWS else m,) if output.type.kind.has_rows else ()
            columns = (n * output.type.width,) if output.type.width is not None else ()
            made[name] = TensorType(rows + columns, output.type.dtype)
    return made


def _product_of(matmul: Matmul, types: Mapping[str, TensorType]) -> tuple[Dim, Dim]:
    a, b = types[matmul.a].matrix, types[matmul.b].matrix
    assert a is not None and b is not None
    return a[matmul.a_transposed], b[not matmul.b_transposed]


def live(program: Program) -> Program:
    """The program without the statements, and the outputs of epilogues, that nobody reads."""
    needed = set(program.results)
    kept: list[Statement] = []
    for statement in reversed(program.statements):
        if not needed.intersection(statement.makes):
            continue
        if isinstance(statement, Apply):
            statement = _with_outputs(statement, tuple(name in needed for name in statement.results))
        kept.append(statement)
        needed.update(statement.reads)
    return attrs.evolve(program, statements=tuple(reversed(kept)))


def _with_outputs(statement: Apply, wanted: tuple[bool, ...]) -> Apply:
    if all(wanted):
        return statement
    epilogue, inputs = _restricted(statement.epilogue, wanted, statement.host is not None)
    results = tuple(name for name, want in zip(statement.results, wanted, strict=True) if want)
    return attrs.evolve(
        statement,
        results=results,
        epilogue=epilogue,
        inputs=tuple(item for item in statement.inputs if item[0] in inputs),
    )


@functools.lru_cache(maxsize=4096)
def _restricted(epilogue: Epilogue, wanted: tuple[bool, ...], hosted: bool) -> tuple[Epilogue, frozenset[str]]:
    """An epilogue with fewer outputs, and the parameters that these need; its host stays."""
    outputs = tuple(o for o, want in zip(epilogue.outputs, wanted, strict=True) if want)
    rest = canonical(attrs.evolve(epilogue, outputs=outputs))
    used = {node.attr for node in rest.nodes if node.op == "param"}
    params = tuple(p for i, p in enumerate(rest.params) if p.name in used or (hosted and i == 0))
    return attrs.evolve(rest, params=params), frozenset(p.name for p in params)


@functools.lru_cache(maxsize=4096)
def _simplified(epilogue: Epilogue) -> Epilogue:
    """Simplified once: a kernel is found fastest by an epilogue that is the same object."""
    return simplify(epilogue)


# ---- planning --------------------------------------------------------------------------------------------------------


class _Planner:
    def __init__(
        self,
        program: Program,
        setting: Setting,
        wanted: Sequence[Wanted],
        annotated: Collection[str] | None,
        owned: frozenset[str],
    ) -> None:
        self.program, self.setting, self.annotated = program, setting, annotated
        self.wanted = {result.name: result for result in wanted}
        self.values: dict[str, Known] = {}
        self.constants: list[float] = []
        self.count = 0
        self._numbers: dict[str, int] = {}
        self._casts: dict[tuple[str, torch.dtype], Known] = {}
        self._steps: list[Step] = []
        self._params_done = False
        self._of_slot: dict[int, Known] = {}
        self._name_of: dict[int, str] = {}
        self._owned: set[int] = set()
        given = zip(program.params, setting.shapes, setting.flat, setting.dtypes, strict=True)
        for param, shape, flat, dtype in given:
            value = self._define(param.name, param.type, shape, flat, dtype)
            if param.name in owned:
                self._owned.add(value.slot)
        self._params_done = True
        for number in self._number_values():
            self._numbers[_number_key(number)] = self._slot()
            self.constants.append(self._number(number))
        self._operands_only = self._find_operands_only()
        self._read = {name for statement in program.statements for name in statement.reads}
        self._readers = Counter(name for statement in program.statements for name in dict.fromkeys(statement.reads))
        self._group: list[Vector] = []
        self._reductions: dict[str, tuple[int, Reduce]] = {}
        for statement in program.statements:
            self._plan(statement)
        self._auxiliary()

    def steps(self) -> tuple[Step, ...]:
        """The steps, with what each leaves behind."""
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            last.update(dict.fromkeys((*step.arguments, *step.results), index))
        results = {self.values[name].slot for name in self.program.results}
        numbers = set(self._numbers.values())
        found = []
        for index, step in enumerate(self._steps):
            touched = dict.fromkeys((*step.arguments, *step.results))
            dead = tuple(s for s in touched if last[s] == index and s not in results and s not in numbers)
            found.append(attrs.evolve(step, dead=dead, in_place=self._in_place(step, dead)))
        return tuple(found)

    def finish(self, wanted: Wanted) -> Finish | None:
        """What makes the caller's tensor of a result; None where it is that."""
        value = self.values[wanted.name]
        if value.order is not None:
            assert wanted.shape is not None
            return Finish(wanted.shape, None, wanted.type, wanted.shape, permuted=value.order)
        copied = wanted.copied and any(p.name == wanted.name for p in self.program.params)
        dtype = wanted.dtype if wanted.dtype is not value.dtype else None
        type_ = wanted.type if wanted.type is not None and wanted.type.shape != value.type.shape else None
        flat = self._extents(type_.shape) if type_ is not None else value.flat
        shape = flat if wanted.shape is None else wanted.shape
        viewed = type_ if type_ is not None and type_.pair_axis is not None else None
        if dtype is None and viewed is None and shape == value.shape and not copied:
            return None
        return Finish(shape, dtype, viewed, flat, copied)

    def _plan(self, statement: Statement) -> None:
        """Auxiliary steps that follow each other wait, and become one."""
        if isinstance(statement, Vector) and is_elementwise(statement):
            if self._group and self._group[0].length != statement.length:
                self._auxiliary()
            self._group.append(statement)
            return
        self._auxiliary()
        for name in statement.reads:
            self._reductions.pop(name, None)
        plan = {Apply: self._apply, Product: self._product, Vector: self._vector}[type(statement)]
        plan(statement)  # type: ignore[operator]

    # ---- statements -------------------------------------------------------------------------------------------------

    def _apply(self, statement: Apply) -> None:
        epilogue, host = _simplified(statement.epilogue), statement.host
        rows, columns, *samples = self._extents(statement.extents)
        _check_columns(epilogue, columns, statement.loc)
        arguments: list[tuple[int, Prepare | None]] = []
        default: torch.dtype | None = None
        if isinstance(host, Matmul):
            a, b, default = self._operands(host, statement.loc)
            arguments += [a, b]
        elif host is not None:
            arguments.append(self._argument(host, epilogue.params[0].type.kind))
        for param, (_, value) in zip(epilogue.params[host is not None :], statement.inputs, strict=True):
            arguments.append(self._argument(value, param.type.kind))
        tiles: list[Value] = [host] if isinstance(host, str) else []
        tiles += [v for p, (_, v) in zip(epilogue.params[host is not None :], statement.inputs, strict=True)
                  if p.type.kind is Kind.TILE]  # fmt: skip
        default = default or self._default(tiles)
        dtypes = [
            self._stored(name, output_dtype(output, default, self.setting.compute), output.dtype is not None)
            for name, output in zip(statement.makes, epilogue.outputs, strict=True)
        ]
        types = _made_by(statement, {})
        made = [
            self._define(name, types[name], shape := self._extents(types[name].shape), shape, dtype)
            for name, dtype in zip(statement.makes, dtypes, strict=True)
        ]
        on_gemm, count = isinstance(host, Matmul), samples[0] if samples else 0
        job = Job(epilogue, on_gemm, rows, columns, self.setting.compute, tuple(dtypes), count)
        self._add(job, arguments, made)
        self._note_reductions(epilogue, made)

    def _product(self, statement: Product) -> None:
        a, b, dtype = self._operands(statement.matmul, statement.loc)
        type_ = TensorType(_product_of(statement.matmul, {n: v.type for n, v in self.values.items()}))
        shape = self._extents(type_.shape)
        dtype = self._stored(statement.result, dtype, False)
        value = self._define(statement.result, type_, shape, shape, dtype)
        job = Job(_PRODUCT, True, shape[0], shape[1], self.setting.compute, (dtype,))
        self._add(job, [a, b], [value])

    def _vector(self, statement: Vector) -> None:
        expression = _simplified(statement.expression)
        arguments = [
            self._argument(p.name if p.name in self.values else Dim.of(p.name), p.type.kind) for p in expression.params
        ]
        (output,) = expression.outputs
        length = self._extent(statement.length)
        dtype = output_dtype(output, self.setting.compute, self.setting.compute)
        dtype = self._stored(statement.result, dtype, output.dtype is not None)
        type_ = _made_by(statement, {})[statement.result]
        shape = (length,) if type_.shape else ()
        value = self._define(statement.result, type_, shape, shape, dtype)
        self._add(Job(expression, False, 1, length, self.setting.compute, (dtype,)), arguments, [value])

    def _auxiliary(self) -> None:
        """Plan the auxiliary steps that wait."""
        group, self._group = self._group, []
        if not group:
            return
        inside = Counter(name for statement in group for name in dict.fromkeys(statement.reads))
        wanted = {n for n, count in self._readers.items() if count > inside[n]} | set(self.program.results)
        needed = [statement.result for statement in group if statement.result in wanted]
        read = merged(group, needed, ())
        parts = {name: self._reductions[name][1].how for name in rows_of(read) if name in self._reductions}
        stored = [name for name in parts if name in wanted]
        expression = merged(group, needed, stored) if stored else read
        arguments = [
            self._argument(p.name if p.name in self.values else Dim.of(p.name), p.type.kind) for p in expression.params
        ]
        for name in dict.fromkeys(inside):
            step, reduction = self._reductions.pop(name, (None, None))
            if step is not None and reduction is not None and name in parts:
                before = self._steps[step]
                assert before.job is not None
                job = attrs.evolve(before.job, unmerged=(*before.job.unmerged, reduction.name))
                self._steps[step] = attrs.evolve(before, job=job)
        length = self._extent(group[0].length)
        types = {s.result: _made_by(s, {})[s.result] for s in group} | {n: self.values[n].type for n in stored}
        made = []
        for output in expression.outputs:
            dtype = output_dtype(output, self.setting.compute, self.setting.compute)
            dtype = self._stored(output.name, dtype, output.dtype is not None)
            shape = (length,) if types[output.name].shape else ()
            made.append(self._define(output.name, types[output.name], shape, shape, dtype))
        dtypes = tuple(value.dtype or self.setting.compute for value in made)
        job = Job(expression, False, 1, length, self.setting.compute, dtypes, parts=parts)
        self._add(job, arguments, made)

    def _note_reductions(self, epilogue: Epilogue, made: Sequence[Known]) -> None:
        """The reductions of the last step that its kernel may leave in parts."""
        for output, value in zip(epilogue.outputs, made, strict=True):
            vector = output.type.kind in (Kind.COL, Kind.ROW)
            if isinstance(output, Reduce) and vector and value.dtype is torch.float32:
                self._reductions[self._name_of[value.slot]] = (len(self._steps) - 1, output)

    def _add(self, job: Job, arguments: Sequence[tuple[int, Prepare | None]], made: Sequence[Known]) -> None:
        slots = tuple(slot for slot, _ in arguments)
        prepare = tuple(step for _, step in arguments)
        placed = []
        for output, value in zip(job.epilogue.outputs, made, strict=True):
            if value.order is not None:
                place = self.wanted[self._name_of[value.slot]]
                assert place.shape is not None and value.dtype is not None
                placed.append(Placed(output.name, place.shape, value.order, value.dtype, self.setting.device))
        results = tuple(value.slot for value in made)
        self._steps.append(Step(job, slots, prepare, results, placed=tuple(placed)))

    def _order_of(self, name: str, type_: TensorType, dtype: torch.dtype | None) -> tuple[int, ...] | None:
        """Is a value a result with pairs that can be written as the caller gets it?"""
        wanted = self.wanted.get(name)
        if wanted is None or wanted.type is None or name in self._read or len(type_.shape) != 2 or is_traced():
            return None
        whole = wanted.shape is not None and len(wanted.shape) == len(wanted.type.shape)
        pair = wanted.type.pair_axis
        if not whole or wanted.type.shape == type_.shape or pair is None or pair == len(wanted.type.shape) - 2:
            return None
        return wanted.type.order if wanted.dtype in (None, dtype) else None

    # ---- what a step takes ------------------------------------------------------------------------------------------

    def _operands(
        self, matmul: Matmul, loc: Loc | None
    ) -> tuple[tuple[int, Prepare | None], tuple[int, Prepare | None], torch.dtype]:
        """A [M, K], B [N, K] with accumulator A @ B.T, and the dtype of A."""
        have = {name: self.values[name].dtype for name in (matmul.a, matmul.b)}
        dtype = self._multiplied_in(matmul, have[matmul.a], have[matmul.b], loc)
        a, b = self._as(matmul.a, dtype), self._as(matmul.b, dtype)
        return _operand(a, matmul.a_transposed), _operand(b, not matmul.b_transposed), dtype

    def _multiplied_in(
        self, matmul: Matmul, a: torch.dtype | None, b: torch.dtype | None, loc: Loc | None
    ) -> torch.dtype:
        assert a is not None and b is not None
        autocast = self.setting.autocast
        if autocast is not None and torch.float64 not in (a, b):
            return autocast
        if a is b:
            return a
        if self.setting.derived:
            return min(a, b, key=lambda dtype: dtype.itemsize)
        raise CodaCallError(
            f"`{matmul}` of `{self.program.name}` multiplies {a} with {b}; a matmul takes one dtype",
            loc,
            argument=matmul.b,
        )

    def _as(self, name: str, dtype: torch.dtype) -> Known:
        """A value in some dtype, cast once."""
        value = self.values[name]
        if value.dtype is dtype:
            return value
        if (name, dtype) not in self._casts:
            cast = attrs.evolve(value, slot=self._slot(), dtype=dtype)
            self._casts[name, dtype] = cast
            self._steps.append(Step(None, (value.slot,), (None,), (cast.slot,), dtype))
        return self._casts[name, dtype]

    def _argument(self, value: Value, kind: Kind) -> tuple[int, Prepare | None]:
        if not isinstance(value, str):
            return self._numbers[_number_key(value)], None
        have = self.values[value]
        return have.slot, _prepared(have, kind)

    def _default(self, tiles: Sequence[Value]) -> torch.dtype:
        """The dtype of the first tile of floats."""
        for name in tiles:
            if isinstance(name, str) and self.values[name].type.dtype is Dtype.F32:
                dtype = self.values[name].dtype
                assert dtype is not None
                return dtype
        return self.setting.compute

    def _stored(self, name: str, dtype: torch.dtype, annotated: bool) -> torch.dtype:
        """The dtype that a value is stored in: what is asked of a result, where no step reads it as it would be."""
        wanted = self.wanted.get(name)
        if wanted is not None and wanted.dtype is not None and name not in self._read:
            return wanted.dtype
        if dtype is torch.float32 and self.annotated is not None and name not in self.annotated:
            return self.setting.compute
        autocast = self.setting.autocast
        if autocast is not None and not annotated and name in self._operands_only and dtype.is_floating_point:
            return dtype if dtype is torch.float64 else autocast
        return dtype

    def _find_operands_only(self) -> set[str]:
        """Values that are read as operands of matmuls, and in no other way."""
        operands, others = set(), set(self.program.results)
        for statement in self.program.statements:
            host = statement.matmul if isinstance(statement, Product) else getattr(statement, "host", None)
            if isinstance(host, Matmul):
                operands |= {host.a, host.b}
                others.update(statement.reads[2:])
            else:
                others.update(statement.reads)
        return operands - others

    # ---- numbers and slots ------------------------------------------------------------------------------------------

    def _number_values(self) -> list[Value]:
        """The numbers and extents among the inputs, each once."""
        found: dict[str, Value] = {}
        for statement in self.program.statements:
            if isinstance(statement, Apply):
                values: list[Value] = [value for _, value in statement.inputs]
            elif isinstance(statement, Vector):
                names = {p.name for p in self.program.params} | {
                    made for other in self.program.statements for made in other.makes
                }
                values = [Dim.of(name) for name in statement.reads if name not in names]
            else:
                values = []
            found.update({_number_key(v): v for v in values if not isinstance(v, str)})
        return list(found.values())

    def _number(self, value: Value) -> float:
        assert not isinstance(value, str)
        return self._extent(value) if isinstance(value, Dim) else value

    def _extent(self, dim: Dim) -> Extent:
        return extent(dim, self.setting.sizes)

    def _extents(self, dims: Sequence[Dim]) -> Shape:
        return tuple(self._extent(dim) for dim in dims)

    def _slot(self) -> int:
        self.count += 1
        return self.count - 1

    def _define(self, name: str, type_: TensorType, shape: Shape, flat: Shape, dtype: torch.dtype | None) -> Known:
        made = self._params_done
        order = self._order_of(name, type_, dtype) if made else None
        value = Known(self._slot(), type_, shape, flat, dtype, order)
        self._of_slot[value.slot], self._name_of[value.slot] = value, name
        if made:
            self._owned.add(value.slot)
        self.values[name] = value
        return value

    def _in_place(self, step: Step, dead: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """Which arguments die with this step and can hold an output."""
        if step.job is None:
            return ()
        epilogue, found, taken = step.job.epilogue, [], set()
        first = 2 if step.job.on_gemm else 0
        params = epilogue.params[1 if step.job.on_gemm else 0 :]
        for output, slot in zip(epilogue.outputs, step.results, strict=True):
            if not isinstance(output, Store) or output.type.kind is not Kind.TILE:
                continue
            made = self._of_slot[slot]
            for position, param in enumerate(params, first):
                source = step.arguments[position]
                value = self._of_slot.get(source)
                if (
                    value is not None
                    and position not in taken
                    and source in dead
                    and source in self._owned
                    and param.type == output.type
                    and step.arguments.count(source) == 1
                    and step.prepare[position] is None
                    and (value.shape, value.dtype) == (made.shape, made.dtype)
                ):
                    found.append((output.name, position))
                    taken.add(position)
                    break
        return tuple(found)


def _number_key(value: Value) -> str:
    return f"{type(value).__name__} {value!r}"


def _prepared(value: Known, kind: Kind) -> Prepare | None:
    """What makes the matrix, vector or scalar of a value that a statement sees."""
    type_, flat = value.type, value.flat
    if kind is Kind.SCALAR:
        return None
    if type_.pair_axis is None:
        rank = 2 if kind in (Kind.TILE, Kind.ROWS) else 1
        return None if len(value.shape) == rank else functools.partial(_joined, columns=rank - 1)
    if flat == value.shape:
        return functools.partial(view, type_=type_, kind=kind)
    return lambda tensor: view(tensor.reshape(flat), type_, kind)


def _joined(tensor: Tensor, columns: int) -> Tensor:
    """All axes, or all but the last, made one."""
    return tensor.flatten(0, tensor.dim() - 1 - columns)


def _operand(value: Known, transposed: bool) -> tuple[int, Prepare | None]:
    """An operand of the GEMM.  The pairs of a weight are brought side by side by a view of more axes."""
    type_, flat = value.type, value.flat
    pair = type_.pair_axis
    if pair is not None and pair < len(type_.shape) - 2:
        return value.slot, functools.partial(_folded, shape=flat, order=type_.order, transposed=transposed)
    prepare = _prepared(value, Kind.TILE)
    if not transposed:
        return value.slot, prepare
    return value.slot, torch.t if prepare is None else lambda tensor: prepare(tensor).t()


def _folded(tensor: Tensor, shape: Shape, order: tuple[int, ...], transposed: bool) -> Matrix:
    ordered = tensor.reshape(shape).permute(order)
    matrix = Matrix(ordered, ordered.dim() - 1)
    return matrix.T if transposed else matrix


def _check_columns(epilogue: Epilogue, columns: Extent, loc: Loc | None) -> None:
    """Pairs and groups of columns divide them."""
    signature = Signature(epilogue, False)
    for node, group in signature.groups:
        have = columns_of(node.type.width, columns)[0]
        if have % group:
            raise CodaCallError(
                f"`{node.op}` of `{epilogue.name}` has groups of {group} columns, which do not divide {have}", loc
            )
    if signature.needs_even_columns and columns % 2:
        raise CodaCallError(f"`{epilogue.name}` splits columns in pairs, got {columns}", loc)


def _product_epilogue() -> Epilogue:
    builder = EpilogueBuilder("matmul", ("M", "N"))
    builder.store("y", builder.param("acc", tile()), tile())
    return builder.finish()


_PRODUCT = _product_epilogue()
