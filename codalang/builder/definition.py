"""A Python function that is to be recorded: where it is written, how it is annotated, and how it is run."""

import __future__

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from codalang.builder import place
from codalang.builder.recording import Recording
from codalang.builder.shapes import Dim
from codalang.errors import CodaCallError, CodaError, CodaNameError, CodaTypeError, CodaUnsupportedError, Loc
from codalang.ir.names import is_name


def check_function(function: object) -> None:
    """Raise CodaTypeError for anything but a plain Python function."""
    what = f"{function!r}"
    if isinstance(function, FunctionType):
        flags = function.__code__.co_flags
        if not flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            if function.__name__ != "<lambda>":
                return
            what = "a lambda"
        else:
            what = f"the generator or coroutine `{function.__name__}`"
    hint = f"write `name={function!r}`" if isinstance(function, str) else "write it with `def`"
    raise CodaTypeError(f"expected a plain Python function, got {what}", place.here(), hint=hint)


def parameters(function: FunctionType) -> dict[str, Loc]:
    """The names and places of a function's parameters.

    Raises CodaTypeError or CodaNameError for one that is not plain, or has a name that the language cannot have.
    """
    definition = Definition(function)
    places = {}
    for parameter in inspect.signature(function).parameters.values():
        loc = places[parameter.name] = definition.parameter(parameter.name)
        plain = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        if not plain or parameter.default is not inspect.Parameter.empty:
            what = "a default" if plain else f"the kind {parameter.kind.description}"
            raise CodaTypeError(
                f"parameter `{parameter.name}` has {what}", loc, hint="parameters are positional, without defaults"
            )
        if not is_name(parameter.name):
            raise CodaNameError(f"{parameter.name!r} cannot be the name of a parameter", loc, hint="rename it")
    return places


def unwrapped(function: FunctionType) -> FunctionType:
    """The function that the user wrote, under decorators."""
    inner = inspect.unwrap(function)
    return inner if isinstance(inner, FunctionType) else function


def run(function: FunctionType, arguments: Sequence[object], recording: Recording) -> object:
    """What the function returns.  Its CodaErrors are raised at the user's line, without codalang's own frames."""
    try:
        return function(*arguments)
    except RecursionError:
        raise CodaUnsupportedError(
            f"`{recording.name}` does not come to an end: Python's recursion limit is reached",
            recording.builder.loc,
            hint="a function may call itself only if Python numbers decide when it stops: values are not known yet",
        ) from None
    except CodaError as error:
        raise _placed(error).with_traceback(None) from None


def _placed(error: CodaError) -> CodaError:
    """An error that knows no place (another epilogue was called) at the user's innermost line."""
    if error.loc is not None:
        return error
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        if not place.is_own(traceback.tb_frame.f_code):
            found = place.at(traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
        traceback = traceback.tb_next
    error.loc = found
    if isinstance(error, CodaCallError) and error.hint is None:
        error.hint = "an epilogue calls no other: one matmul has one epilogue; call Python functions of values"
    return error


def annotations_of(function: FunctionType) -> dict[str, Callable[[], object]]:
    """Each annotation as a function that gives it.  What Python kept as text is evaluated where it was written."""
    written = inspect.get_annotations(function)
    if not function.__code__.co_flags & __future__.annotations.compiler_flag:
        return {name: functools.partial(_same, given) for name, given in written.items()}
    scope = dict(next(place.frames()).frame.f_locals)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    scope |= {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    return {name: functools.partial(_evaluate, text, function, scope) for name, text in written.items()}


def _same(given: object) -> object:
    return given


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class _Names(dict[str, Any]):
    """The names of an annotation: those that mean nothing else are dimensions."""

    def __init__(self, scope: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(scope)
        self._others = others

    def __missing__(self, name: str) -> object:
        if name in self._others:
            return self._others[name]
        return getattr(builtins, name) if hasattr(builtins, name) else Dim(name)


def _evaluate(text: str, function: FunctionType, scope: dict[str, Any]) -> object:
    """An annotation that Python kept as text.

    Tools that modernize Python take the quotes off `tile["T", "F"]` there, so T and F may be names of nothing.
    """
    first: Exception | None = None
    for names in ((function.__globals__, scope), ({}, _Names(scope, function.__globals__))):
        try:
            return eval(text, *names)
        except CodaError:
            raise
        except Exception as error:
            first = first or error
            if not isinstance(error, NameError):
                break
    raise CodaTypeError(
        f"the annotation `{text}` cannot be evaluated: {first}", hint="a shape is written as in `acc: tile[M, N]`"
    )


class Definition:
    """Where a function and its parameters are written."""

    def __init__(self, function: FunctionType) -> None:
        self._code = function.__code__
        self._file = place.read(self._code.co_filename, function.__globals__)
        self._node = self._file.functions.get((function.__name__, self._code.co_firstlineno))

    @property
    def name(self) -> Loc:
        """The place of the function's name."""
        if self._node is None:
            return self._file.whole_line(self._code.co_firstlineno)
        line = self._node.lineno
        start = self._node.col_offset + len("def ")
        return self._file.loc((line, line, start, start + len(self._node.name.encode())))

    def parameter(self, name: str) -> Loc:
        """The place of a parameter with its annotation."""
        if self._node is not None:
            arguments = self._node.args
            every: list[ast.arg | None] = [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ]
            for argument in every:
                if argument is not None and argument.arg == name:
                    return self._file.loc(place.span_of(argument))
        return self.name
