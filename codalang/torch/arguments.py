"""The arguments of a call in the order of its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from codalang.errors import CodaCallError

Callee = TypeVar("Callee")
MISSING = object()


def in_order(
    callee: Callee,
    show: Callable[[Callee], str],
    count: int,
    positions: Mapping[str, int],
    args: Sequence[object],
    named: Mapping[str, object],
) -> list[object]:
    """`count` arguments by the positions of their names, MISSING where there is none.

    `show` gives the call as it is written.  Of two parameters of one name, the first is given by position only.

    Raises CodaCallError, naming the argument, where one is given twice, unknown, or there are too many.
    """
    if len(args) > count:
        raise CodaCallError(
            f"`{show(callee)}` takes {count} arguments, got {len(args)}", argument=f"argument {count + 1}"
        )
    slots = list(args) + [MISSING] * (count - len(args))
    for name, value in named.items():
        position = positions.get(name)
        if position is None:
            near = difflib.get_close_matches(name, positions, n=1)
            raise CodaCallError(
                f"`{show(callee)}` has no parameter `{name}`",
                argument=name,
                hint=f"did you mean `{near[0]}`?" if near else None,
            )
        if slots[position] is not MISSING:
            raise CodaCallError(f"`{show(callee)}` got `{name}` twice", argument=name)
        slots[position] = value
    return slots
