"""A program's syntax tree -> IR: arguments, auxiliary expressions, calls of other programs inlined.

    name = a @ b.T                    a matmul, with or without `.T`s
    results = epilogue(host, ...)     the host is `a @ b` or a matrix; further arguments in order or by name
    results = program(...)            inlined, its values get fresh names where they clash
    name = expression                 an auxiliary step; each sum, max or min of a vector in it is one of its own

An argument may be an expression of dimensions, or of vectors and scalars: then it is an auxiliary step of its own.
Statements are read in order: a value is made above the lines that read it.  What names mean is in program_names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from codalang.errors import CodaNameError, CodaSyntaxError, CodaTypeError, CodaUnsupportedError, Loc
from codalang.ir.build_program import ExpressionBuilder, ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue
from codalang.ir.inline_program import inline
from codalang.ir.names import DISCARD, Namer
from codalang.ir.ops import REDUCTIONS
from codalang.ir.program import EXPRESSION_DIMS, Matmul, Program, ProgramParam, Value, Vector
from codalang.ir.types import PARAM_DTYPES, Dtype, Kind, register_dtype
from codalang.parser import syntax
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.dtypes import storage_dtype
from codalang.parser.evaluate import Evaluator
from codalang.parser.files import File, Found
from codalang.parser.names import BUILTINS, check_call
from codalang.parser.program_dims import NoExtent, declared_extent, read_extent
from codalang.parser.program_names import ProgramNames
from codalang.parser.syntax import Span, Word

# Statements of called programs, long expressions counted as several, per program.  A program that calls one twice,
# which calls one twice, ... doubles.
INLINING_LIMIT = 25_000


def elaborate_program(
    definition: syntax.Program,
    file: File,
    epilogue: Callable[[Found], Epilogue],
    program: Callable[[Found], Program],
) -> Program:
    """The IR of one program; `epilogue` and `program` give what a definition is.

    Raises CodaSyntaxError, CodaNameError, CodaTypeError or CodaLocalityError for the first fault.
    """
    return _Elaborator(definition, file, epilogue, program).run()


@attrs.frozen
class _Wanted:
    """What a parameter takes, which `shown` says for a message; what is neither scalar nor vector is a matrix."""

    name: str
    shown: str
    is_scalar: bool
    is_vector: bool
    dtype: Dtype


class _Elaborator:
    def __init__(
        self,
        definition: syntax.Program,
        file: File,
        epilogue: Callable[[Found], Epilogue],
        program: Callable[[Found], Program],
    ) -> None:
        self.definition = definition
        self.file = file
        self.epilogue = epilogue
        self.program = program
        self.builder = ProgramBuilder(definition.name.text, self._loc(definition.name.span))
        self.names = ProgramNames(definition, file, self.builder)
        self.inlined = 0

    def run(self) -> Program:
        for param in self.definition.params:
            self._param(param)
        shapes = [type_.shape for type_ in self.builder.types.values()]
        self.leading = {shape[:axes] for shape in shapes for axes in range(2, len(shape))}
        self.namer = Namer({*self.names.written, *self.names.dims})
        statements = self.definition.statements
        last = statements[-1] if statements else None
        for statement in statements:
            if isinstance(statement, syntax.Bind):
                self._statement(statement)
            elif statement is not last:
                raise CodaSyntaxError("nothing can follow a `return`", self._loc(statement.span))
        if not isinstance(last, syntax.Return):
            raise CodaSyntaxError(
                f"program `{shorten(self.definition.name.text)}` returns nothing",
                self._loc(self.definition.end),
                hint="the last statement of a program is `return x` or `return (x, y)`",
            )
        return self.builder.finish(self._results(last), self._loc(last.span))

    def _loc(self, span: Span) -> Loc:
        return self.file.locate(span)

    # Parameters

    def _param(self, param: syntax.ProgramParam) -> None:
        name, span = param.name, param.name.span.to(param.dtype.span if param.dtype else param.shape_span)
        self.names.check_new(name)
        if (param.kind is not None and param.kind.text != "scalar") or (param.kind is None and not param.extents):
            shown = shorten(param.kind.text) if param.kind else "[]"
            raise CodaTypeError(
                f"`{shown}` is no shape of a program's parameter",
                self._loc(param.shape_span),
                hint="a matrix is `[T, D]`, a vector `[D]`, a number `scalar`",
            )
        shape = tuple(declared_extent(e, self.file) for e in param.extents)
        dtype = storage_dtype(param.dtype, self.file, PARAM_DTYPES)
        default = self._default(param, register_dtype(dtype))
        self.names.declare_dims(shape, self._loc(param.shape_span))
        self.builder.param(name.text, shape, dtype, default, self._loc(span))
        self.names.define(name, name.text)

    def _default(self, param: syntax.ProgramParam, dtype: Dtype) -> float | None:
        if param.default is None:
            return None
        loc = self._loc(param.default.span)
        if param.extents:
            raise CodaTypeError("only a scalar has a default", loc)
        if not isinstance(param.default, syntax.Literal):
            raise CodaTypeError("a default is a number", loc, hint="such as `eps: scalar = 1e-5`")
        value = self._number(param.default, dtype)
        if value is None:
            raise CodaTypeError(f"the default of a scalar of {dtype.value} cannot be this", loc)
        return value

    def _number(self, literal: syntax.Literal, dtype: Dtype) -> float | None:
        """A literal as a number of a dtype, or None where it is none."""
        if isinstance(literal.value, bool) or dtype is Dtype.BOOL:
            return literal.value if isinstance(literal.value, bool) and dtype is Dtype.BOOL else None
        if dtype is Dtype.I32:
            return int(literal.value) if literal.whole and -(2**31) <= literal.value < 2**31 else None
        return float(literal.value)

    # Statements

    def _statement(self, statement: syntax.Bind) -> None:
        self.names.enter(statement)
        value = statement.value
        if isinstance(value, syntax.Matmul):
            name = self._one_name(statement, "a matmul")
            self.builder.matmul(name, self._matmul(value), self._loc(statement.span))
        elif (found := self._called(value)) is not None:
            assert isinstance(value, syntax.Call)
            if isinstance(found.definition, syntax.Program):
                self._call(statement, value, self.program(found))
            else:
                self._apply(statement, value, found, self.epilogue(found))
            return
        else:
            name = self._one_name(statement, "an expression")
            self._no_alias(statement, value)
            self._auxiliary(name, value, self._loc(statement.span))
        self.names.define(statement.names[0], name)

    def _called(self, value: syntax.Expression) -> Found | None:
        """The epilogue or program that an expression calls, or None where it is an auxiliary step."""
        if not isinstance(value, syntax.Call):
            return None
        found = self.file.find(value.function, syntax.Epilogue | syntax.Program)
        text = value.function.text
        is_function = text in BUILTINS or text in REDUCTIONS or self.file.find(value.function, syntax.Function)
        if found is None and not is_function:
            self.names.check_epilogue(value)
        if found is None or not is_function or value.keywords or value.extents:
            return found
        # Both an epilogue and a function have the name: an epilogue has a matrix as its host.
        first = value.operands[0] if value.operands else None
        if isinstance(first, syntax.Name) and first.text in self.names.values:
            return found if self.builder.types[self.names.values[first.text]].matrix is not None else None
        return found if isinstance(first, syntax.Matmul) else None

    def _one_name(self, statement: syntax.Bind, what: str) -> str:
        if len(statement.names) != 1:
            if isinstance(statement.value, syntax.Call):  # an `fn` of several values says so itself
                check_call(self.file, statement.value)
            span = statement.names[0].span.to(statement.names[-1].span)
            raise CodaTypeError(f"{what} gives 1 value, got {len(statement.names)} names", self._loc(span))
        (name,) = statement.names
        self.names.check_new(name)
        return name.text

    def _no_alias(self, statement: syntax.Bind, value: syntax.Expression) -> None:
        """Where a value of some size would only get another name, that is an error."""
        if isinstance(value, syntax.Name) and value.text in self.names.values:
            name = self.names.values[value.text]
            if self.builder.types[name].matrix is not None:
                shown = shorten(value.text)
                raise CodaTypeError(
                    f"this would be another name of `{shown}`",
                    self._loc(statement.span),
                    notes=self.builder.notes(name),
                    hint=f"use `{shown}` itself",
                )

    def _results(self, statement: syntax.Return) -> list[str]:
        results: dict[str, Span] = {}
        for value in statement.values:
            if not isinstance(value, syntax.Name):
                raise CodaSyntaxError(
                    "a program returns values by their names",
                    self._loc(value.span),
                    hint="give it a name on a line of its own, and return that",
                )
            name = self.names.read(value, result=True)
            if name in results:
                raise CodaNameError(
                    f"`{shorten(value.text)}` is returned twice",
                    self._loc(value.span),
                    notes=((self._loc(results[name]), "here, too"),),
                )
            results[name] = value.span
        return list(results)

    # Matmuls

    def _matmul(self, product: syntax.Matmul) -> Matmul:
        """`a @ b.T`, its operands known.  Whether they fit is the builder's to say."""
        (a, a_transposed), (b, b_transposed) = self._operand(product.left), self._operand(product.right)
        matmul = Matmul(a, b, a_transposed, b_transposed)
        self.builder.product(matmul, self._loc(product.span))
        return matmul

    def _operand(self, operand: syntax.Expression) -> tuple[str, bool]:
        transposed = isinstance(operand, syntax.Attribute)
        inner = operand
        if isinstance(operand, syntax.Attribute):
            self.names.check_attribute(operand)
            inner = operand.operand
        if isinstance(inner, syntax.Name):
            return self.names.read(inner), transposed
        what = "a matmul has two operands" if isinstance(inner, syntax.Matmul) else "an operand of a matmul is a value"
        raise CodaSyntaxError(
            what, self._loc(inner.span), hint="give this a name on a line of its own, and multiply that"
        )

    # Epilogues

    def _apply(self, statement: syntax.Bind, call: syntax.Call, found: Found, epilogue: Epilogue) -> None:
        given = self._given(call, [p.name for p in epilogue.params], found)
        accumulator = epilogue.accumulator
        if accumulator is not None and accumulator.name not in given:
            raise CodaTypeError(
                f"`{shorten(epilogue.name)}` needs its host, the value of `{shorten(accumulator.name)}`",
                self._loc(call.span),
                notes=self._defined(found),
                hint=f"write `{shorten(epilogue.name)}(a @ b.T, ...)`, or a matrix in place of the matmul",
            )
        if accumulator is None and call.operands and isinstance(call.operands[0], syntax.Matmul):
            raise CodaTypeError(
                f"`{shorten(epilogue.name)}` is applied to no matmul: its first parameter is no tile",
                self._loc(call.operands[0].span),
                notes=self._defined(found),
            )
        missing = [p for p in epilogue.params if p.name not in given]
        if missing:
            shown = ", ".join(f"`{shorten(p.name)}: {p.type.show(epilogue.dims)}`" for p in missing[:4])
            raise CodaNameError(
                f"`{shorten(epilogue.name)}` needs {shown}", self._loc(call.span), notes=self._defined(found)
            )
        self._count_results(statement, call, [o.name for o in epilogue.outputs], found)
        host: Matmul | str | None = None
        if accumulator is not None:
            host = self._host(given[accumulator.name], epilogue, found)
        inputs: dict[str, Value] = {}
        for param in epilogue.params[host is not None :]:
            shown = f"`{shorten(param.name)}` of `{shorten(epilogue.name)}` is {param.type.show(epilogue.dims)}"
            is_vector = param.type.kind in (Kind.ROW, Kind.COL)
            wanted = _Wanted(param.name, shown, param.type.kind is Kind.SCALAR, is_vector, param.type.dtype)
            inputs[param.name] = self._argument(given[param.name], wanted)
        extents = self._extents(call) if call.extents else None
        results = [None if n.text == DISCARD else n.text for n in statement.names]
        places = {name: self._loc(value.span) for name, value in given.items()}
        self.builder.apply(epilogue, host, inputs, results, self._loc(statement.span), extents, places)
        for name in statement.names:
            if name.text != DISCARD:
                self.names.define(name, name.text)

    def _given(self, call: syntax.Call, params: Sequence[str], found: Found) -> dict[str, syntax.Expression]:
        """The arguments by parameter."""
        name = shorten(call.function.text)
        takes = f"its parameters are {', '.join(map(shorten, params))}" if params else "it has no parameters"
        if len(call.operands) > len(params):
            raise CodaTypeError(
                f"`{name}` has {len(params)} parameter{'s' * (len(params) != 1)}, got {len(call.operands)} arguments",
                self._loc(call.operands[len(params)].span),
                notes=self._defined(found),
                hint=takes,
            )
        if call.keywords and call.operands and call.operands[-1].span > call.keywords[0].name.span:
            raise CodaSyntaxError(
                "an argument by position follows one by name",
                self._loc(call.operands[-1].span),
                notes=((self._loc(call.keywords[0].name.span), "this one is given by name"),),
                hint="those by name come last",
            )
        given = dict(zip(params, call.operands, strict=False))
        for keyword in call.keywords:
            if keyword.name.text not in params:
                raise CodaNameError(
                    f"`{name}` has no parameter `{shorten(keyword.name.text)}`",
                    self._loc(keyword.name.span),
                    notes=self._defined(found),
                    hint=suggestion(keyword.name.text, params) or takes,
                )
            if keyword.name.text in given:
                raise CodaNameError(
                    f"`{shorten(keyword.name.text)}` of `{name}` is given twice",
                    self._loc(keyword.name.span),
                    notes=((self._loc(given[keyword.name.text].span), "first given here"),),
                )
            given[keyword.name.text] = keyword.value
        return given

    def _defined(self, found: Found) -> tuple[tuple[Loc, str], ...]:
        return ((found.file.locate(found.definition.name.span), "defined here"),)

    def _count_results(self, statement: syntax.Bind, call: syntax.Call, outputs: Sequence[str], found: Found) -> None:
        names = statement.names
        for position, name in enumerate(names):
            if name.text != DISCARD:
                self.names.check_new(name, names[:position])
        if len(names) == len(outputs):
            return
        shown = ", ".join(map(shorten, outputs))
        count = f"{len(outputs)} result{'s' * (len(outputs) != 1)}"
        written = shown if len(outputs) == 1 else f"({shown})"
        raise CodaTypeError(
            f"`{shorten(call.function.text)}` has {count} ({shown}), got {len(names)} name{'s' * (len(names) != 1)}",
            self._loc(names[0].span.to(names[-1].span)),
            notes=self._defined(found),
            hint=f"write `{written} = {shorten(call.function.text)}(...)`; `{DISCARD}` discards a result",
        )

    def _host(self, value: syntax.Expression, epilogue: Epilogue, found: Found) -> Matmul | str:
        if isinstance(value, syntax.Matmul):
            return self._matmul(value)
        if isinstance(value, syntax.Name):
            return self.names.read(value)
        if isinstance(value, syntax.Attribute):
            self.names.check_attribute(value)
        raise CodaTypeError(
            f"`{shorten(epilogue.name)}` is applied to a matmul or a matrix",
            self._loc(value.span),
            notes=self._defined(found),
            hint=f"write `{shorten(epilogue.name)}(a @ b.T, ...)`, or a value in place of the matmul",
        )

    def _extents(self, call: syntax.Call) -> list[Dim]:
        extents = []
        for value in call.extents:
            try:
                extents.append(read_extent(value, self.names.is_dim))
            except NoExtent as error:
                raise CodaTypeError(
                    error.why, self._loc(error.span), hint="an extent is made of the dimension names of this program"
                ) from None
        return extents

    # Arguments

    def _argument(self, value: syntax.Expression, wanted: _Wanted) -> Value:
        """A value by name, a number, an extent, or the name of a new auxiliary step."""
        loc = self._loc(value.span)
        if isinstance(value, syntax.Name) and not self.names.is_dim(value.text):
            return self.names.read(value)
        if isinstance(value, syntax.Literal) and wanted.is_scalar:
            number = self._number(value, wanted.dtype)
            if number is not None:
                return number
            takes = {Dtype.I32: "an integer of 32 bits", Dtype.BOOL: "true or false", Dtype.F32: "a number"}
            raise CodaTypeError(f"{wanted.shown}: {takes[wanted.dtype]} is needed", loc)
        self.names.check_operators(value)
        if not (wanted.is_scalar or wanted.is_vector):
            raise CodaTypeError(
                f"{wanted.shown}: a matrix is needed, and an expression is of vectors and scalars",
                loc,
                hint="the elements of matrices are computed with in epilogues: let one make this, and pass its result",
            )
        if wanted.dtype is not Dtype.F32:
            raise CodaTypeError(
                f"{wanted.shown}, and an expression makes numbers",
                loc,
                hint="indices and masks come from parameters and from states",
            )
        if wanted.is_scalar:
            try:
                return read_extent(value, self.names.is_dim)
            except NoExtent:
                pass
        made = self._auxiliary(self.namer.fresh(wanted.name), value, loc)
        is_scalar = not self.builder.types[made].shape
        if is_scalar is not wanted.is_scalar:
            raise CodaTypeError(f"{wanted.shown}, and this is a {'scalar' if is_scalar else 'vector'}", loc)
        return made

    # Auxiliary steps

    def _auxiliary(self, name: str, root: syntax.Expression, loc: Loc) -> str:
        """An expression as auxiliary steps: the reductions inside it, then the rest.  Returns the last one's name."""
        reductions = [p for p in syntax.walk(root) if self._is_reduction(p)]
        # By their ends: those inside of others first.
        reductions.sort(key=lambda p: (p.span.end_line, p.span.end_column))
        parts: dict[int, str] = {}
        for part in reductions:
            assert isinstance(part, syntax.Call)
            how = part.function.text
            result = name if part is root else self.namer.fresh(f"{name}_{how}")
            parts[id(part)] = self._step(result, part.operands[0], how, parts, loc if part is root else None)
        return parts[id(root)] if id(root) in parts else self._step(name, root, None, parts, loc)

    def _is_reduction(self, part: syntax.Expression) -> bool:
        if not (isinstance(part, syntax.Call) and part.function.text in REDUCTIONS):
            return False
        if self.file.find(part.function, syntax.Function) is not None or part.keywords or part.extents:
            return False
        if len(part.operands) != 1 and part.function.text not in BUILTINS:
            raise CodaTypeError(
                f"`{part.function.text}` takes 1 argument, got {len(part.operands)}", self._loc(part.span)
            )
        return len(part.operands) == 1

    def _step(self, name: str, root: syntax.Expression, how: str | None, parts: dict[int, str], loc: Loc | None) -> str:
        """One auxiliary step.  `parts` are the results of the reductions inside it."""
        where = loc or self._loc(root.span)
        expression = ExpressionBuilder(where)
        evaluator = Evaluator(expression, self.file)
        places: dict[str, Loc] = {}
        stack = [root]
        while stack:
            part = stack.pop()
            if id(part) in parts:
                value = parts[id(part)]
                evaluator.answer(part, expression.value(value, self.builder.types[value], self._loc(part.span)))
            elif isinstance(part, syntax.Name):
                value, type_ = self.names.read_auxiliary(part)
                places.setdefault(value, self._loc(part.span))
                evaluator.bind(part.text, expression.value(value, type_, self._loc(part.span)))
            else:
                self.names.check_operator(part)
                if isinstance(part, syntax.Call):
                    check_call(self.file, part)
                stack.extend(reversed(syntax.value_operands(part)))
        self._check_vectors(places)
        value_node = self._evaluated(evaluator, root)
        self._check_numbers(expression, value_node, root)
        if how is None:
            made = expression.result(name, value_node, where)
        else:
            made = expression.total(name, value_node, how, where)
        return self.builder.vector(name, made, where, places)

    def _check_vectors(self, places: dict[str, Loc]) -> None:
        """A parameter of several axes is read as a vector where it has the leading axes of another parameter, as a
        number for each token has, or beside a vector of as many elements.  Any other is a matrix by mistake."""
        types = {name: self.builder.types[name] for name in places if name in self.builder.types}
        lengths = {t.vector for t in types.values() if t.shape and t.matrix is None}
        for name, type_ in types.items():
            if type_.dtype is not Dtype.F32 or type_.matrix is None or type_.vector in lengths:
                continue
            if type_.shape not in self.leading:
                raise self.builder.no_vector(name, places[name])

    def _evaluated(self, evaluator: Evaluator, root: syntax.Expression) -> int:
        try:
            value = evaluator.node(root)
        except CodaTypeError as error:  # here a row is any vector
            message = error.message.replace(f"row[{EXPRESSION_DIMS[1]}]", "vector")
            raise CodaTypeError(message, error.loc, notes=error.notes, hint=error.hint) from None
        evaluator.finish()
        return value

    def _check_numbers(self, expression: ExpressionBuilder, value: int, root: syntax.Expression) -> None:
        have = expression.nodes[value].type
        if have.dtype is not Dtype.F32:
            number = "`float(i)` makes a number of an index" if have.dtype is Dtype.I32 else None
            raise CodaTypeError(
                f"an auxiliary step makes numbers, and this is {have.dtype.value}",
                self._loc(root.span),
                hint=number or "`where(mask, 1, 0)` makes a number of a mask",
            )

    # Programs

    def _call(self, statement: syntax.Bind, call: syntax.Call, program: Program) -> None:
        found = self.file.find(call.function, syntax.Program)
        assert found is not None
        if call.extents:
            raise CodaTypeError(
                f"`{shorten(program.name)}` is a program: its shapes say what its dimensions are",
                self._loc(call.extents[0].span),
            )
        given = self._given(call, [p.name for p in program.params], found)
        missing = [p for p in program.params if p.name not in given and p.default is None]
        if missing:
            shown = ", ".join(f"`{shorten(p.name)}: {p.type}`" for p in missing[:4])
            raise CodaNameError(
                f"`{shorten(program.name)}` needs {shown}", self._loc(call.span), notes=self._defined(found)
            )
        self._count_results(statement, call, program.results, found)
        self._limit(program, call)
        arguments = {
            p.name: self._program_argument(given[p.name], p, program.name) for p in program.params if p.name in given
        }
        results = [None if n.text == DISCARD else n.text for n in statement.names]
        places = {name: self._loc(value.span) for name, value in given.items()}
        made = inline(self.builder, program, arguments, results, self.namer.fresh, self._loc(statement.span), places)
        for name, value in zip(statement.names, made, strict=True):
            if name.text != DISCARD:
                self.names.define(name, self._result_of_call(name, value))

    def _program_argument(self, value: syntax.Expression, param: ProgramParam, program: str) -> Value:
        shown = f"`{shorten(param.name)}` of `{shorten(program)}` is {param.type}"
        is_scalar, is_vector = not param.type.shape, param.type.matrix is None
        return self._argument(value, _Wanted(param.name, shown, is_scalar, is_vector, param.type.dtype))

    def _result_of_call(self, name: Word, value: Value) -> str:
        """The value that a result is.  An argument that is returned is that value; a number is made one."""
        if isinstance(value, str):
            return value
        loc = self._loc(name.span)
        expression = ExpressionBuilder(loc)
        node = expression.extent(value, loc) if isinstance(value, Dim) else expression.const(float(value), loc)
        return self.builder.vector(name.text, expression.result(name.text, node, loc), loc)

    def _limit(self, program: Program, call: syntax.Call) -> None:
        self.inlined += sum(
            1 + len(s.expression.nodes) // 4 if isinstance(s, Vector) else 1 for s in program.statements
        )
        if self.inlined > INLINING_LIMIT:
            raise CodaUnsupportedError(
                f"inlining this call takes more than {INLINING_LIMIT:,} steps",
                self._loc(call.span),
                hint="programs that call each other twice double with every level",
            )
