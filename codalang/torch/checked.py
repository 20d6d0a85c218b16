"""Calls that were checked once: what calls of epilogues and of programs have in common.

What a call runs depends on the forms of its arguments (`key`) and on what is around it: the extents that the caller
gives, autocast.  It is found once for each combination, and then looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from codalang.torch.opaque import is_traced
from codalang.torch.signature import key
from codalang.torch.transforms import refuse_transforms

_MOST = 1024  # more are not remembered at once: a training run with a new sequence length in every step


class Binding(Protocol):
    """A call that was checked: see `signature` and `program_call`."""

    @property
    def moved(self) -> tuple[int, ...]:
        """The arguments that must be brought to the device."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""


Run = Callable[[list[Any]], Sequence[Tensor]]  # takes the list of arguments, see `Plan.run`


class Checked:
    """What runs calls.  `check` gives it for arguments in order and what is around them."""

    def __init__(self, check: Callable[..., tuple[Binding, Run]]) -> None:
        self._check = check
        self._found: dict[object, tuple[Binding, Run]] = {}

    def run(self, values: list[Any], *around: object) -> Sequence[Tensor]:
        """Run a call.  Takes the list.  Raises what `check` raises, and CodaUnsupportedError inside transforms."""
        refuse_transforms(values)
        binding, run = self._call(values, around)
        for slot in binding.moved:
            values[slot] = values[slot].to(binding.device)
        return run(values)

    def _call(self, values: list[Any], around: tuple[object, ...]) -> tuple[Binding, Run]:
        if is_traced():  # sizes may be symbols, which are no keys
            return self._check(values, *around)
        try:
            seen = (key(values), around)
        except RuntimeError:  # a tensor without a shape: `check` says which
            return self._check(values, *around)
        found = self._found.get(seen)
        if found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[seen] = self._check(values, *around)
        return found
