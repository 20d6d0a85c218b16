"""Expressions -> nodes, `fn`s inlined.

An `fn` is inlined by binding: its parameters name the nodes of the arguments and its body is evaluated once per
distinct list of arguments, so a chain of functions costs what its results cost.  Names inside cannot meet names
outside.  A node made inside an `fn` has the location of the call in the epilogue, which is the user's expression.

A number without point and exponent is no node yet: it is an index where another operand of its op is one, and an f32
else.  Until then it goes by a negative number, `~position` in a list of such literals, through `let`s and `fn`s.

Evaluation keeps a stack of its own, so neither nesting nor chains of functions are limited by Python's.
Names must have been checked (names.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from codalang.errors import CodaError, CodaTypeError, CodaUnsupportedError, Loc
from codalang.ir.build import EpilogueBuilder
from codalang.ir.names import DISCARD
from codalang.ir.ops import OPS
from codalang.ir.simplify import fold
from codalang.ir.types import Dtype
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.files import File
from codalang.parser.syntax import Span

# Steps taken inside `fn`s, per epilogue.  f(x) = g(g(x)), g(x) = h(h(x)), ... doubles with every line.
INLINING_LIMIT = 250_000

_Key = tuple[int, tuple[int, ...]]


@attrs.define
class _Frame:
    """The values that names mean in an epilogue, or in one call of an `fn`."""

    file: File
    values: dict[str, int]
    call: syntax.Call | None = None  # the call that this frame is of
    caller: _Frame | None = None
    site: Loc | None = None  # the call in the epilogue that led here


@attrs.frozen
class _Apply:
    """The operands are evaluated: apply the op."""

    expression: syntax.Apply | syntax.Call


@attrs.frozen
class _Enter:
    """The arguments are evaluated: evaluate the `fn`'s body."""

    call: syntax.Call
    file: File
    function: syntax.Function


@attrs.frozen
class _Bind:
    """A `let` of an `fn` is evaluated: name its values."""

    statement: syntax.Let | syntax.LetTuple


@attrs.frozen
class _Leave:
    """An `fn`'s results are evaluated: remember them."""

    key: _Key
    count: int


_Task = syntax.Expression | _Apply | _Enter | _Bind | _Leave


class Evaluator:
    """Evaluates the expressions of one epilogue, or of one function of a state, into its builder."""

    def __init__(self, builder: EpilogueBuilder, file: File) -> None:
        self.builder = builder
        self._frame = _Frame(file, {})
        self._literals: list[tuple[float, Loc]] = []
        self._literal_of: dict[str, int] = {}
        self._constants: dict[int, float | bool] = {}  # of nodes that are constant expressions
        self._called: dict[_Key, tuple[int, ...]] = {}
        self._answers: dict[int, int] = {}  # values of parts of expressions that are known beforehand
        self._steps = 0
        # Names given inside `fn`s count only where the epilogue itself gives none.
        self._hints: list[tuple[int, str]] = []

    def bind(self, name: str, value: int) -> None:
        """Let a name mean a value."""
        self._frame.values[name] = value

    def has(self, name: str) -> bool:
        """True where a name means a value."""
        return name in self._frame.values

    def answer(self, part: syntax.Expression, value: int) -> None:
        """Let a part of an expression be a value."""
        self._answers[id(part)] = value

    def let(self, statement: syntax.Let | syntax.LetTuple) -> None:
        """Evaluate a `let` and bind its names."""
        self._let(statement, self._evaluate(statement.value))

    def node(self, expression: syntax.Expression, dtype: Dtype = Dtype.F32) -> int:
        """The node of an expression.  `dtype` is what an integer literal is to be."""
        (value,) = self._evaluate(expression)
        return self._resolve(value, dtype)

    def finish(self) -> None:
        """Give values the names that they have inside `fn`s, where they have none of the epilogue."""
        for value, name in self._hints:
            self.builder.hint(value, name)

    def _let(self, statement: syntax.Let | syntax.LetTuple, values: Sequence[int]) -> None:
        names = (statement.name,) if isinstance(statement, syntax.Let) else statement.names
        for name, value in zip(names, values, strict=True):
            if name.text == DISCARD:
                continue
            self._frame.values[name.text] = value
            if value < 0:
                continue
            if self._frame.caller is None:
                self.builder.hint(value, name.text)
            else:
                self._hints.append((value, name.text))

    def _evaluate(self, root: syntax.Expression) -> tuple[int, ...]:
        """The values of an expression: several for a call of what gives several."""
        tasks: list[tuple[_Task, _Frame]] = [(root, self._frame)]
        results: list[int] = []
        outer = self._frame
        while tasks:
            task, self._frame = tasks.pop()
            if self._frame.caller is not None:
                self._count_step()
            if self._answers and id(task) in self._answers:
                results.append(self._answers[id(task)])
            elif isinstance(task, syntax.Name):
                results.append(self._frame.values[task.text])
            elif isinstance(task, syntax.Literal):
                results.append(self._literal(task))
            elif isinstance(task, syntax.Apply | syntax.Call):
                tasks.append((self._then(task), self._frame))
                tasks.extend((operand, self._frame) for operand in reversed(syntax.value_operands(task)))
            elif isinstance(task, _Apply):
                operands = _take(results, len(syntax.value_operands(task.expression)))
                results.extend(self._apply(task.expression, operands))
            elif isinstance(task, _Enter):
                arguments = _take(results, len(task.call.operands))
                key = (id(task.function), arguments)
                if key in self._called:
                    results.extend(self._called[key])
                else:
                    tasks.extend(self._enter(task, key))
            elif isinstance(task, _Bind):
                names = task.statement.names if isinstance(task.statement, syntax.LetTuple) else (1,)
                self._let(task.statement, _take(results, len(names)))
            elif isinstance(task, _Leave):
                self._called[task.key] = tuple(results[len(results) - task.count :])
        self._frame = outer
        return tuple(results)

    def _then(self, task: syntax.Apply | syntax.Call) -> _Apply | _Enter:
        """What to do when the operands are evaluated."""
        found = self._frame.file.find(task.function, syntax.Function) if isinstance(task, syntax.Call) else None
        if found is None:
            return _Apply(task)
        assert isinstance(task, syntax.Call)
        assert isinstance(found.definition, syntax.Function)
        return _Enter(task, found.file, found.definition)

    def _enter(self, task: _Enter, key: _Key) -> list[tuple[_Task, _Frame]]:
        """The tasks of an `fn`'s body, the first one last."""
        values = {name.text: value for name, value in zip(task.function.params, key[1], strict=True)}
        site = self._frame.site or self._frame.file.locate(task.call.span)
        frame = _Frame(task.file, values, task.call, self._frame, site)
        *lets, result = task.function.statements
        tasks: list[_Task] = []
        for let in lets:
            assert isinstance(let, syntax.Let | syntax.LetTuple)
            tasks += [let.value, _Bind(let)]
        assert isinstance(result, syntax.Return)
        tasks += [*result.values, _Leave(key, len(result.values))]
        return [(task, frame) for task in reversed(tasks)]

    def _here(self, span: Span) -> Loc:
        """Where a node stands: its expression, or the epilogue's call that it was inlined for."""
        return self._frame.site or self._frame.file.locate(span)

    # Literals

    def _literal(self, literal: syntax.Literal) -> int:
        if not literal.whole:
            return self._const(self.builder.const(literal.value, self._here(literal.span)))
        key = repr(literal.value)
        if key not in self._literal_of:
            self._literal_of[key] = ~len(self._literals)
            self._literals.append((literal.value, self._here(literal.span)))
        return self._literal_of[key]

    def _resolve(self, value: int, dtype: Dtype) -> int:
        """The node of a value, which may be a literal that still can be of either dtype."""
        if value >= 0:
            return value
        number, loc = self._literals[~value]
        integer = dtype is Dtype.I32
        return self._const(self.builder.integer(int(number), loc) if integer else self.builder.const(number, loc))

    def _const(self, node: int) -> int:
        value = self.builder.nodes[node].attr
        assert isinstance(value, float | int)
        self._constants[node] = value
        return node

    def _resolved(self, values: Sequence[int]) -> list[int]:
        """The nodes of operands of one op."""
        dtypes = {self.builder.nodes[v].type.dtype for v in values if v >= 0}
        dtype = Dtype.I32 if Dtype.I32 in dtypes else Dtype.F32
        return [self._resolve(v, dtype) for v in values]

    def _constant(self, value: int) -> float | None:
        """The number that a value is, or None where it is no constant."""
        if value < 0:
            return self._literals[~value][0]
        number = self._constants.get(value)
        return number if isinstance(number, float) else None

    # Ops

    def _apply(self, expression: syntax.Apply | syntax.Call, operands: Sequence[int]) -> tuple[int, ...]:
        span = expression.span
        name = expression.op if isinstance(expression, syntax.Apply) else expression.function.text
        if name == "split":
            return self._op("even", operands, span), self._op("odd", operands, span)
        if name == "rotate":
            return self._rotate(operands, span)
        if name == "i32":
            return (self._index(operands[0], span),)
        attr: str | float | int | None = None
        if OPS[name].attr == "dtype":
            assert isinstance(expression, syntax.Call)
            word = expression.operands[1]
            assert isinstance(word, syntax.Name)
            attr = word.text
        elif OPS[name].attr is not None:
            *operands, last = operands
            attr = self._attribute(name, last, expression)
        return (self._op(name, operands, span, attr),)

    def _rotate(self, operands: Sequence[int], span: Span) -> tuple[int, ...]:
        """(a, b) turned by an angle: (a cos - b sin, a sin + b cos)."""
        a, b, angle = (self._resolve(v, Dtype.F32) for v in operands)
        cos, sin = self._op("cos", (angle,), span), self._op("sin", (angle,), span)
        x = self._op("sub", (self._op("mul", (a, cos), span), self._op("mul", (b, sin), span)), span)
        y = self._op("add", (self._op("mul", (a, sin), span), self._op("mul", (b, cos), span)), span)
        return x, y

    def _index(self, value: int, span: Span) -> int:
        """`i32(3)`: the index, where nothing beside it says that it is one."""
        if value < 0:
            return self._checked(lambda: self._resolve(value, Dtype.I32), span)
        have = self.builder.nodes[value].type.show(self.builder.dims)
        error = CodaTypeError(
            f"`i32` makes an index of an integer literal, got {have}",
            self._here(span),
            hint="an index comes from `row_index()`, `col_index()` or a parameter; no number becomes one",
        )
        raise self._inside(error, span)

    def _attribute(self, name: str, value: int, expression: syntax.Apply | syntax.Call) -> float | int:
        number = self._constant(value)
        what = {"exponent": "exponent", "group": "group size"}[OPS[name].attr or ""]
        if number is None:
            span = expression.operands[-1].span
            error = CodaTypeError(
                f"the {what} of `{name}` must be a constant",
                self._here(span),
                hint="write `exp(p * log(x))` for a power with another exponent" if name == "pow" else None,
            )
            raise self._inside(error, span)
        return int(number) if OPS[name].attr == "group" and number.is_integer() else number

    def _op(self, op: str, operands: Sequence[int], span: Span, attr: str | float | int | None = None) -> int:
        def make() -> int:
            nodes = self._operands(op, operands)
            node = self.builder.op(op, *nodes, attr=attr, loc=self._here(span))
            if nodes and all(n in self._constants for n in nodes):
                value = fold(op, [self._constants[n] for n in nodes], attr)
                if value is not None:
                    self._constants[node] = value
            return node

        return self._checked(make, span)

    def _operands(self, op: str, operands: Sequence[int]) -> list[int]:
        if op == "float":  # of an index or a mask: a literal is an index
            return [self._resolve(v, Dtype.I32) for v in operands]
        return self._resolved(operands)

    def _checked(self, make: Callable[[], int], span: Span) -> int:
        try:
            return make()
        except CodaTypeError as error:
            raise self._inside(error, span) from None

    def _inside(self, error: CodaTypeError, span: Span) -> CodaError:
        """The error with the way from the call in the epilogue to the place in the `fn`."""
        notes = list(error.notes)
        frame: _Frame | None = self._frame
        while frame is not None and frame.call is not None and len(notes) < 4:
            notes.append((frame.file.locate(span), f"inside `{shorten(frame.call.function.text)}`"))
            span, frame = frame.call.span, frame.caller
        return CodaTypeError(error.message, error.loc, notes=tuple(notes), hint=error.hint)

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > INLINING_LIMIT:
            raise CodaUnsupportedError(
                f"inlining this call takes more than {INLINING_LIMIT:,} steps",
                self._frame.site,
                hint="functions that call each other twice double with every level",
            )


def _take(results: list[int], count: int) -> tuple[int, ...]:
    """The last `count` results, removed."""
    taken = tuple(results[len(results) - count :])
    del results[len(results) - count :]
    return taken
