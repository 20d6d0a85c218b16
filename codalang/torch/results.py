"""What a caller gets: the one result as a tensor, or several as a named tuple."""

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
    made = make(f"{name}_" if keyword.iskeyword(name) else name, fields, rename=True)
    made.__reduce__ = lambda results: (_results, (name, fields, *results))
    return made


def _results(name: str, fields: tuple[str, ...], *values: Tensor) -> Any:
    return _results_type(name, fields)._make(values)
