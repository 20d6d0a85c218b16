"""What Python does with a value and the language cannot: each is an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from codalang.builder.place import Test, frames, here
from codalang.builder.recording import current
from codalang.builder.shapes import Dim
from codalang.errors import CodaError, CodaLocalityError, CodaTypeError, Loc
from codalang.ir.ops import OPS

BUILDER = "codalang.builder"

_LOCALITY = (
    "a reduction is complete only after every tile: read it in a later epilogue, as a parameter; a factor of each row "
    "commutes with the next matmul, so apply it to that matmul's result"
)
_HALVES = "`even, odd = split(x)` gives the even and the odd columns"
_NUMBER = f"functions of values are in {BUILDER}, not in `math`"
_ARITHMETIC = "there are `+`, `-`, `*`, `/` and `pow(x, exponent)`"
_SYMBOLIC = "its dimensions are symbols, bound at the call"
_REDUCE = 'over an axis: `reduce("s", sum(x), col[M])`, whose shape says what is left'
_XOR = ("there is no `^` of values", "`pow(x, 2)` is a power; of two masks: `(p & ~q) | (~p & q)`")
_MATMUL = ("the matmul is not written", "an epilogue's first parameter is the matmul's result")

# Special methods: the message, in which {value} is the value, and the hint.
METHODS: dict[str, tuple[str, str]] = {
    "len": ("{value} has no length", _SYMBOLIC),
    "getitem": ("values are not indexed", _HALVES),
    "setitem": ("values are not assigned to", "`where(mask, a, b)` chooses for each element"),
    "contains": ("`in` does not search in a value", "`==` compares each element"),
    "call": ("{value} is no function", "a product is written with `*`"),
    "float": ("{value} is not a Python number", _NUMBER),
    "int": ("{value} is not a Python number", _NUMBER),
    "index": ("{value} is not a Python number", _NUMBER),
    "complex": ("{value} is not a Python number", _NUMBER),
    "round": ("{value} is not a Python number", "`cast(x, bf16)` rounds to a storage dtype"),
    "array": ("{value} is no array", f"functions of values are in {BUILDER}, not in `numpy`"),
    "rpow": ("an exponent must be a constant", "`exp2(x)` is 2 to the x, `exp(x)` e to the x"),
    **{f"{side}matmul": _MATMUL for side in ("", "r")},
    **{f"{side}xor": _XOR for side in ("", "r")},
    **{
        f"{side}{name}": (f"there is no `{symbol}` of values", _ARITHMETIC)
        for side in ("", "r")
        for name, symbol in {"floordiv": "//", "mod": "%", "divmod": "divmod", "lshift": "<<", "rshift": ">>"}.items()
    },
}

# Attributes that a tensor has: what to write instead.
_ATTRIBUTES = {
    "sum": _REDUCE,
    "mean": _REDUCE + "; divide by the length in a later epilogue",
    "amax": _REDUCE.replace("sum", "max"),
    "amin": _REDUCE.replace("sum", "min"),
    "chunk": _HALVES,
    "split": _HALVES,
    "shape": _SYMBOLIC,
    "size": _SYMBOLIC,
    "to": "`cast(x, bf16)` rounds to a storage dtype; a store's dtype is `tile[M, N].bf16`",
    "dtype": "values are f32 in registers; a store's dtype is `tile[M, N].bf16`",
    "T": "values are not transposed",
    "detach": "write `stop_gradient(x)`",
    "clamp": "write `min(max(x, low), high)`",
    "square": "write `x * x`",
}

# What asks whether a value is true, by the name that `place` has for it.
_TRUTH = {
    "and": "write `&`, with each comparison in parentheses: `(a > 0) & (b > 0)`",
    "or": "write `|`, with each comparison in parentheses: `(a > 0) | (b > 0)`",
    "not": "write `~mask`",
    "chain": "comparisons do not chain: write `(a < b) & (b < c)`",
    "max": f"this is Python's own `max`; take the one of {BUILDER}",
    "min": f"this is Python's own `min`; take the one of {BUILDER}",
    "in": "compare with one after the other, and combine the masks with `|`",
}


class ValueAttributeError(CodaTypeError, AttributeError):
    """A value has no such attribute."""


def method(name: str) -> Callable[..., NoReturn]:
    """The special method that refuses."""
    message, hint = METHODS[name]

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise located(CodaTypeError(message.replace("{value}", repr(self)), hint=hint))

    return refuse


def attribute(name: str) -> NoReturn:
    """A value has no attributes."""
    if name in OPS and OPS[name].infix is None:
        hint = f"write `{name}(...)`, with `{name}` from {BUILDER}"
    else:
        hint = _ATTRIBUTES.get(name, f"functions of values are in {BUILDER}")
    raise located(ValueAttributeError(f"a value has no attribute `{name}`", hint=hint))


def truth(value: object) -> NoReturn:
    """A value is neither true nor false."""
    test, place = _test()
    error = located(
        CodaTypeError(
            f"{value!r} has no single truth value: each element has its own",
            hint=_TRUTH.get(
                test.what if test else "",
                "`where(mask, a, b)` chooses for each element; masks combine with `&`, `|`, `~`",
            ),
        )
    )
    error.loc = place or error.loc
    raise error


def iteration(value: object) -> NoReturn:
    """A value has no parts that Python could go through."""
    test, _ = _test()
    own = f"this is Python's own `{test.what}`; take the one of {BUILDER}" if test else None
    hint = own if test and test.what in ("sum", "max", "min") else _HALVES
    raise located(CodaTypeError(f"{value!r} cannot be unpacked or iterated over", hint=hint))


def call(library: str, function: str, arguments: Sequence[object]) -> NoReturn:
    """A function of torch or numpy got a value."""
    for argument in arguments:
        if _library(argument) is not None:
            raise located(stranger(argument))
    known = function in OPS and OPS[function].infix is None
    raise located(
        CodaTypeError(
            f"{library}'s `{function}` cannot take a value of an epilogue",
            hint=f"take the `{function}` of {BUILDER}" if known else f"functions of values are in {BUILDER}",
        )
    )


def locality(name: str, reduced: Loc) -> CodaError:
    """The error for reading a reduction."""
    return CodaLocalityError(
        f"`{name}` is a reduction of this same epilogue", notes=((reduced, "it is reduced here"),), hint=_LOCALITY
    )


def no_mask(symbol: str, operand: object) -> CodaError:
    """The error for `&` and `|` of what is no mask: most often a comparison without parentheses."""
    return CodaTypeError(
        f"`{symbol}` combines masks, got {operand!r}",
        hint=f"Python's `{symbol}` binds more tightly than comparisons: write `(a > 0) {symbol} (b > 0)`",
    )


def stranger(operand: object) -> CodaError:
    """The error for what can be no operand."""
    library = _library(operand)
    name = type(operand).__name__
    what = f"{library}.{name}" if library else name
    article = "an" if what[0] in "aeiou" else "a"
    if library:
        return CodaTypeError(
            f"{article} {what} cannot be part of an epilogue: an epilogue is made once, for all calls",
            hint="declare it as a parameter, such as `bias: row[N]`, and pass it at the call; a number that never "
            "changes may be written as one: `float(t)`",
        )
    if operand is None:
        hint = "a function without `return` gives None; so does `store`"
        return CodaTypeError("expected a value, got None", hint=hint)
    if isinstance(operand, tuple | list):
        hint = "`even, odd = split(x)` unpacks the two halves"
        return CodaTypeError(f"expected a value, got {article} {what}", hint=hint)
    if isinstance(operand, Dim):
        hint = "pass what is needed of it as a `scalar` parameter"
        return CodaTypeError(f"`{operand}` is a dimension, not a value", hint=hint)
    hint_ = "call it" if callable(operand) and not isinstance(operand, type) else None
    return CodaTypeError(f"expected a value or a number, got {article} {what}", hint=hint_)


def located(error: CodaError) -> CodaError:
    """The error at the user's line, inside of an epilogue or outside."""
    recording = current()
    if recording is not None:
        return recording.located(error)
    return type(error)(error.message, here(), notes=error.notes, hint=error.hint)


def _library(operand: object) -> str | None:
    """torch or numpy, where the operand is theirs."""
    library = type(operand).__module__.partition(".")[0]
    return library if library in ("torch", "numpy") else None


def _test() -> tuple[Test | None, Loc | None]:
    """What asks for the truth of a value, or goes through it, and where."""
    innermost = next(frames())
    test = innermost.file.test(innermost.span) if innermost.span else None
    return test, innermost.file.loc(test.shown) if test else None
