"""A Python function -> an epilogue: its parameters become loads, its body is run once on values, and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import attrs

from codalang.builder import place
from codalang.builder.definition import Definition, annotations_of, check_function, parameters, run, unwrapped
from codalang.builder.recording import Recording, recorded
from codalang.builder.shapes import EXAMPLES, Dim, Shape, dim, shape
from codalang.builder.value import Value
from codalang.errors import CodaError, CodaNameError, CodaTypeError, Loc
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import is_name
from codalang.ir.types import register_dtype

_EXAMPLE = "`acc: tile[M, N]`"


def build(
    function: Any,
    *,
    name: str | None = None,
    dims: tuple[Dim | str, Dim | str] | None = None,
    precise: bool = False,
) -> Epilogue:
    """The epilogue that a Python function means.

    Args:
        function: its parameters are annotated with shapes; its body stores and reduces.
        name: the epilogue's name, if not the function's.
        dims: the symbols of rows and columns, where the shapes do not say both.
        precise: kernels compute transcendental functions precisely, not fast.

    Raises CodaTypeError, CodaNameError, CodaLocalityError or CodaUnsupportedError at the line of Python that is wrong.
    What else the function raises, it raises.
    """
    place.forget()
    check_function(function)
    written = unwrapped(function)
    loc = Definition(written).name
    name = function.__name__ if name is None else name
    if not is_name(name):
        raise CodaNameError(
            f"{name!r} cannot name an epilogue",
            loc,
            hint="a name is made of ASCII letters, digits and _, and is no word of the grammar; "
            '`@codalang.epilogue(name="...")` gives another',
        )
    recording = Recording("epilogue", name, written.__code__, loc)
    recording.builder.precise = precise
    if dims is not None:
        recording.fix_dims((dim(dims[0]), dim(dims[1])), loc)
    with recorded(recording):
        _check_outputs(run(function, _parameters(written, recording), recording), recording)
    return recording.builder.finish()


def _check_outputs(returned: object, recording: Recording) -> None:
    loc = recording.builder.loc
    if returned is not None:
        raise CodaTypeError(
            f"epilogue `{recording.name}` returns {_describe(returned)}",
            loc,
            hint='nothing is returned: `store("y", value, tile[M, N])` makes an output of a value',
        )
    if not recording.builder.outputs:
        raise CodaTypeError(f"epilogue `{recording.name}` has no output", loc, hint="give it a `store` or a `reduce`")


def _describe(returned: object) -> str:
    return repr(returned) if isinstance(returned, Value) else f"a {type(returned).__name__}"


def _parameters(function: FunctionType, recording: Recording) -> list[Value]:
    """The function's arguments: its parameters' values."""
    annotations = annotations_of(function)
    values = []
    for name, loc in parameters(function).items():
        declared = _declared(name, annotations, loc)
        type_ = attrs.evolve(recording.declare(declared, loc), dtype=register_dtype(declared.dtype))
        values.append(Value(recording, recording.builder.param(name, type_, declared.dtype, loc)))
    return values


def _declared(name: str, annotations: Mapping[str, Any], loc: Loc) -> Shape:
    if name not in annotations:
        raise CodaTypeError(f"parameter `{name}` has no shape", loc, hint=f"annotate it: {_EXAMPLE}")
    try:
        annotation = annotations[name]()
        found = shape(annotation)
    except CodaError as error:
        raise type(error)(error.message, loc, notes=error.notes, hint=error.hint) from None
    if found is None:
        raise CodaTypeError(
            f"the annotation of `{name}` is no shape: {_shown(annotation)}",
            loc,
            hint=f"annotate it as in {_EXAMPLE}; there are {', '.join(EXAMPLES.values())}",
        )
    return found


def _shown(annotation: object) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else repr(annotation)
