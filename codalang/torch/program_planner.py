"""From a program at given extents and dtypes to its steps: slots, jobs, what is dropped and overwritten when.

A value is dropped right after its last use, so that the allocator gives its memory to the next.  A tile that is used
for the last time, and is the plan's own, is overwritten by an output of equal shape and dtype, where one is there.

Matmuls without an epilogue run on the same GEMM, with one that stores what it gets.

Kernels leave reductions in parts, one for each tile.  The auxiliary step that reads them next merges them; those that
nothing reads wait for others of their length, to be merged and cast by one launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import attrs
import torch

from codalang.errors import CodaCallError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Reduce, Store
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, TensorType, Value, Vector
from codalang.ir.types import Dtype, Kind, row, tile
from codalang.torch.execute import Job
from codalang.torch.opaque import is_traced
from codalang.torch.program_auxiliary import anonymous, is_elementwise, merged, rows_of
from codalang.torch.program_call import Shape, extent
from codalang.torch.program_step import Finish, Known, Placed, Prepare, Setting, Step, Wanted
from codalang.torch.program_values import made_by, product_of, simplified
from codalang.torch.program_views import operand, prepared
from codalang.torch.signature import ONE_DTYPE, Extent, Signature, columns_of, output_dtype

MOST_TOGETHER = 8  # reductions that one step merges: until then their parts take memory
_MERGED_TO = (torch.float32, torch.bfloat16, torch.float16)


class Planner:
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
        self._reductions: dict[str, tuple[int, Reduce]] = {}  # that an auxiliary step may merge
        self._results: dict[str, tuple[int, Reduce]] = {}  # that nothing reads
        for statement in program.statements:
            self._plan(statement)
        self._auxiliary()
        while self._results:
            self._merge_results()

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
        epilogue, host = simplified(statement.epilogue), statement.host
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
        types = made_by(statement, {})
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
        type_ = TensorType(product_of(statement.matmul, {n: v.type for n, v in self.values.items()}))
        shape = self._extents(type_.shape)
        dtype = self._stored(statement.result, dtype, False)
        value = self._define(statement.result, type_, shape, shape, dtype)
        job = Job(_PRODUCT, True, shape[0], shape[1], self.setting.compute, (dtype,))
        self._add(job, [a, b], [value])

    def _vector(self, statement: Vector) -> None:
        expression = simplified(statement.expression)
        arguments = [
            self._argument(p.name if p.name in self.values else Dim.of(p.name), p.type.kind) for p in expression.params
        ]
        (output,) = expression.outputs
        length = self._extent(statement.length)
        dtype = output_dtype(output, self.setting.compute, self.setting.compute)
        dtype = self._stored(statement.result, dtype, output.dtype is not None)
        type_ = made_by(statement, {})[statement.result]
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
            found = self._reductions.pop(name, None)
            if found is not None and name in parts:
                self._leave_in_parts(*found)
        length = self._extent(group[0].length)
        types = {s.result: made_by(s, {})[s.result] for s in group} | {n: self.values[n].type for n in stored}
        made = []
        for output in expression.outputs:
            dtype = output_dtype(output, self.setting.compute, self.setting.compute)
            dtype = self._stored(output.name, dtype, output.dtype is not None)
            shape = (length,) if types[output.name].shape else ()
            made.append(self._define(output.name, types[output.name], shape, shape, dtype))
        dtypes = tuple(value.dtype or self.setting.compute for value in made)
        run = anonymous(expression)
        kernel_parts = {
            kernel.name: parts[param.name]
            for kernel, param in zip(run.params, expression.params, strict=True)
            if param.name in parts
        }
        self._add(Job(run, False, 1, length, self.setting.compute, dtypes, parts=kernel_parts), arguments, made)

    def _note_reductions(self, epilogue: Epilogue, made: Sequence[Known]) -> None:
        """The reductions of the last step that its kernel may leave in parts."""
        for output, value in zip(epilogue.outputs, made, strict=True):
            if not isinstance(output, Reduce) or output.type.kind not in (Kind.COL, Kind.ROW):
                continue
            name, found = self._name_of[value.slot], (len(self._steps) - 1, output)
            if name not in self._read and value.dtype in _MERGED_TO and self.setting.compute is torch.float32:
                self._results[name] = found
            elif value.dtype is torch.float32:
                self._reductions[name] = found
        if len(self._results) >= MOST_TOGETHER:
            self._merge_results()

    def _leave_in_parts(self, step: int, reduction: Reduce) -> None:
        """What a step reduces is merged by another."""
        before = self._steps[step]
        assert before.job is not None
        outputs = zip(before.job.epilogue.outputs, before.job.dtypes, strict=True)
        dtypes = tuple(torch.float32 if output is reduction else dtype for output, dtype in outputs)
        job = attrs.evolve(before.job, dtypes=dtypes, unmerged=(*before.job.unmerged, reduction.name))
        self._steps[step] = attrs.evolve(before, job=job)

    def _merge_results(self) -> None:
        """Plan a step that merges, and casts, reductions which are results alone, gradients of rows above all: one for
        those of a length that wait."""
        length = self.values[next(iter(self._results))].shape
        together = [name for name in self._results if self.values[name].shape == length][:MOST_TOGETHER]
        found = [self._results.pop(name) for name in together]
        parts = [self.values[name] for name in together]
        dtypes = tuple(value.dtype or self.setting.compute for value in parts)
        if dtypes == (torch.float32,):
            return  # as well merged alone
        builder = EpilogueBuilder("merged", ("M", "N"))
        for index in range(len(parts)):
            builder.store(f"y{index}", builder.param(f"x{index}", row()), row())
        run = anonymous(builder.finish())
        for place in found:
            self._leave_in_parts(*place)
        how = {param.name: reduction.how for param, (_, reduction) in zip(run.params, found, strict=True)}
        job = Job(run, False, 1, length[0], self.setting.compute, dtypes, parts=how)
        made = [self._define(n, v.type, v.shape, v.flat, v.dtype) for n, v in zip(together, parts, strict=True)]
        self._add(job, [(value.slot, None) for value in parts], made)

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
        job = attrs.evolve(job, device=self.setting.device)
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
        return operand(a, matmul.a_transposed), operand(b, not matmul.b_transposed), dtype

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
            hint=ONE_DTYPE,
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
        return have.slot, prepared(have, kind)

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
        names = {p.name for p in self.program.params} | {n for s in self.program.statements for n in s.makes}
        for statement in self.program.statements:
            if isinstance(statement, Apply):
                values: list[Value] = [value for _, value in statement.inputs]
            elif isinstance(statement, Vector):
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
