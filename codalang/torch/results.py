"""What a caller gets: the one result as a tensor, or several as a named tuple.

A result has the field of its name, but where Python allows none: `class` is in `class_`, `_h` in `field_h`.
"""

from __future__ import annotations

import collections
import functools
import keyword
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor


def packer(name: str, fields: Sequence[str]) -> Callable[[Sequence[Tensor]], Any]:
    """What makes it of the results in order."""
    if len(fields) == 1:
        return lambda outputs: outputs[0]
    return cast(Callable[[Sequence[Tensor]], Any], _results_type(name, tuple(fields))._make)


@functools.cache
def _results_type(name: str, fields: tuple[str, ...]) -> Any:
    """The named tuple of several results.  It stands in no module, so that its values are pickled by its name and
    fields."""
    make: Any = collections.namedtuple
    made = make(f"{name}_" if keyword.iskeyword(name) else name, _field_names(fields))
    made.__reduce__ = lambda results: (_results, (name, fields, *results))
    return made


def _field_names(names: Sequence[str]) -> list[str]:
    """Names that fields may have, each once; what needs no change has none."""
    given = {name for name in names if name == _allowed(name)}
    fields = []
    for name in names:
        field = _allowed(name)
        while field != name and field in given:
            field += "_"
        given.add(field)
        fields.append(field)
    return fields


def _allowed(name: str) -> str:
    if name.startswith("_"):
        return f"field{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def _results(name: str, fields: tuple[str, ...], *values: Tensor) -> Any:
    return _results_type(name, fields)._make(values)
