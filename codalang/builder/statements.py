"""The statements of the language in Python: what comes out of an epilogue.

In short:

    store("y", value, tile[M, N / 2])          # or store("y", value): the shape is the value's own
    reduce("ss", sum(x * x), col[M])           # the shape says which axes are left
    state(("mean", "var"), welford(x), col[M])
    save(x), recompute(y)                      # for the backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codalang.builder.recording import Recording, wanted
from codalang.builder.shapes import Shape, shape, storage
from codalang.builder.states import define
from codalang.builder.value import Operand, Reduction, Value, checked, name_of, node_of
from codalang.errors import CodaError, CodaLocalityError, CodaNameError
from codalang.ir.epilogue import State
from codalang.ir.names import DISCARD, is_name
from codalang.ir.ops import REDUCTIONS
from codalang.ir.states import StateDef
from codalang.ir.types import INTEGER_DTYPES, STORAGE_DTYPES, Dtype, ValueType

_NUMBERS = {Dtype.F32}


def save(*values: Value) -> None:
    """Let the backward load these values, which the forward then stores.  Raises CodaTypeError for a constant."""
    _keep("save", values)


def recompute(*values: Value) -> None:
    """Let the backward compute these values again.  Raises CodaTypeError for a constant."""
    _keep("recompute", values)


def _keep(how: str, values: tuple[Value, ...]) -> None:
    recording = wanted(f"`{how}`")
    if recording.what != "epilogue":
        recording.fail(f"a {recording.what} has no `{how}`")
    for value in values:
        if isinstance(value, str):
            recording.fail(f"`{how}` takes values, got the text {value!r}", f"write `{how}({value})`")
        node = node_of(recording, value)
        try:
            recording.builder.keep(node, how, recording.chain()[-1].loc)
        except CodaError as error:
            raise recording.located(error) from None


def store(name: str, value: Operand | None = None, shape: Shape | str | None = None, dtype: object = None) -> None:
    """Store a value under a name.

    Args:
        name: the output's name.
        value: what is stored; it is broadcast where the shape has more axes.
        shape: its declared shape; None means the value's own.
        dtype: its storage dtype, by name or as torch's; None is A's dtype for a tile and f32 otherwise.

    Raises CodaTypeError where value and shape do not fit, CodaNameError where the name is taken or is none.
    """
    recording = wanted("`store`")
    _check_name(recording, "store", name)
    if isinstance(value, Reduction):
        raise recording.located(
            CodaLocalityError(
                f"`{value.spelled}` is a reduction: it is known only when every tile is done",
                hint=f'write `{_keyword(value)}("{name}", {value.spelled}(...), col[M])`',
            )
        )
    node = node_of(recording, value)
    have = recording.builder.nodes[node].type
    _output(
        recording,
        "store",
        shape,
        dtype,
        have,
        lambda type_, storage_, loc: recording.builder.store(name, node, type_, storage_, loc),
    )


def reduce(name: str, reduction: object = None, shape: Shape | str | None = None, dtype: object = None) -> Reduction:
    """Declare the result of `sum(x)`, `max(x)` or `min(x)`, over the axes that the shape lacks.

    The result is for the caller; using it in the same epilogue raises CodaLocalityError.
    Raises CodaTypeError, CodaNameError as `store` does.
    """
    recording = wanted("`reduce`")
    _check_name(recording, "reduce", name)
    if not isinstance(reduction, Reduction) or not isinstance(reduction.how, str):
        checked(recording, reduction) if not isinstance(reduction, Reduction) else None
        recording.fail(
            f"`reduce {name}` needs a reduction ({', '.join(REDUCTIONS)}), got {reduction!r}",
            _keyword_hint(name, reduction),
        )
    how = reduction.how
    node = node_of(recording, reduction.values[0])
    _output(
        recording,
        "reduce",
        shape,
        dtype,
        None,
        lambda type_, storage_, loc: recording.builder.reduce(name, node, type_, how, storage_, loc),
    )
    reduction.name = name
    return reduction


def state(names: object, transform: object = None, shape: Shape | str | None = None, dtype: object = None) -> Any:
    """Declare the first results of a stateful transform: `state("lse", online_logsumexp(x), col[M])`.

    `names` is a name, or a tuple of names of the first results, "_" for one that is not wanted.  On a class, `@state`
    defines a transform; see `codalang.builder.states`.  Raises CodaTypeError, CodaNameError as `store` does.
    """
    if isinstance(names, type):
        return define(names)
    recording = wanted("`state`")
    results = names if isinstance(names, tuple | list) else (names,)
    if not results:
        recording.fail("`state` wants the names of its results first", 'write `state(("mean", "var"), ...)`')
    for name in results:
        if name != DISCARD:
            _check_name(recording, "state", name)
    if not isinstance(transform, Reduction) or not isinstance(transform.how, StateDef):
        recording.fail(
            f"`state {results[0]}` needs a stateful transform, got {transform!r}",
            _keyword_hint(results[0], transform) or "such as `online_logsumexp(x)`",
        )
    definition = transform.how
    _check_state(recording, definition)
    nodes = [
        node_of(recording, value, input_dtype)
        for value, (_, input_dtype) in zip(transform.values, definition.inputs, strict=True)
    ]
    _output(
        recording,
        "state",
        shape,
        dtype,
        None,
        lambda type_, storage_, loc: recording.builder.state(results, nodes, type_, definition, storage_, loc),
        {result for _, result in definition.results[: len(results)]},
    )
    transform.name = ", ".join(results)
    return transform


def _check_state(recording: Recording, definition: StateDef) -> None:
    """A name means one thing in a program: two transforms of an epilogue, or it and the epilogue, have two."""
    others = {o.definition for o in recording.builder.outputs if isinstance(o, State)}
    twice = any(other.name == definition.name and other != definition for other in others)
    if twice or definition.name == recording.name:
        raise recording.located(
            CodaNameError(
                f"two states are called `{definition.name}`"
                if twice
                else f"`{definition.name}` is the epilogue's name",
                hint='`@codalang.state(name="...")` gives another',
            )
        )


def _keyword(reduction: Reduction) -> str:
    return "reduce" if isinstance(reduction.how, str) else "state"


def _keyword_hint(name: object, given: object) -> str | None:
    if isinstance(given, Reduction):
        return f'write `{_keyword(given)}("{name}", {given.spelled}(...), col[M])`'
    return f'write `reduce("{name}", sum(...), col[M])`' if isinstance(given, Value) else None


def _check_name(recording: Recording, keyword: str, name: object) -> None:
    if is_name(name):
        return
    if isinstance(name, str):
        raise recording.located(
            CodaNameError(
                f"{name!r} cannot be the name of an output",
                hint="a name is made of letters, digits and _, and is no word of the grammar",
            )
        )
    hint = name_of(name) if isinstance(name, Value) else None
    recording.fail(
        f"`{keyword}` wants the output's name first, got {name!r}",
        f'write `{keyword}("{hint or "y"}", ...)`',
    )


def _output(
    recording: Recording,
    keyword: str,
    given: Shape | str | None,
    dtype: object,
    have: ValueType | None,
    declare: Callable[..., None],
    results: set[Dtype] = _NUMBERS,
) -> None:
    """Declare an output of a shape, or of the type that its value has."""
    if recording.what != "epilogue":
        recording.fail(f"a {recording.what} has no `{keyword}`", "it returns its values")
    loc = recording.chain()[-1].loc
    declared = _shape(recording, keyword, given, have)
    storage_ = _storage(recording, keyword, declared, dtype, results)
    try:
        if declared is not None:
            type_ = recording.declare(declared, loc)
        else:
            assert have is not None
            type_ = ValueType(have.kind, have.width)
        declare(type_, storage_, loc)
    except CodaError as error:
        raise recording.located(error) from None


def _storage(
    recording: Recording, keyword: str, declared: Shape | None, dtype: object, results: set[Dtype]
) -> str | None:
    """The dtype that an output is stored as, by its shape or by `dtype`."""
    given = declared.dtype if declared is not None else None
    if dtype is not None and given is not None:
        recording.fail(f"`{keyword}` is given two dtypes: `{given}` and `{dtype}`")
    if dtype is not None:
        given = storage(dtype)
    known = INTEGER_DTYPES if Dtype.I32 in results else STORAGE_DTYPES
    if given is None or (given in known and len(results) == 1):
        return given
    if len(results) > 1:
        hint = "leave it out: numbers are stored as f32, indices as i32"
        recording.fail(f"`{given}` cannot be the dtype of all these results", hint)
    recording.fail(f"this cannot be stored as `{given}`", f"there are {', '.join(known)}")


def _shape(recording: Recording, keyword: str, given: object, have: ValueType | None) -> Shape | None:
    if given is None and have is not None:
        return None
    found = shape(given)
    if found is None:
        want = "`tile[M, N]`" if keyword == "store" else "`col[M]`, `row[N]` or `scalar`"
        message = f"does not say its shape: {want}" if given is None else f"needs a shape ({want}), got {given!r}"
        hint = None
        if isinstance(given, str):
            hint = f'a dtype is given as `dtype="{given}"`' if given in STORAGE_DTYPES else None
        recording.fail(f"`{keyword}` {message}", hint)
    return found
