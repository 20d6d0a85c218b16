"""Calls that were checked once: what calls of epilogues and of programs have in common.

What a call runs depends on the forms of its arguments and on what is around it: the extents that the caller gives,
autocast.  It is found once for each combination, and then looked up: first its launches, for arguments that also lie
in memory as those of a call before did; then what checks have found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from codalang.torch.execute import launches_repeat_now
from codalang.torch.opaque import is_traced
from codalang.torch.program_autograd import Again, Shaped, recorded
from codalang.torch.program_plan import key_of
from codalang.torch.signature import dispatches, forms, key, remember
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

    def __init__(self, check: Callable[..., tuple[Binding, Shaped | Run]]) -> None:
        self._check = check
        self._found: dict[object, tuple[Binding, Shaped | Run]] = {}
        self._again: dict[object, Again] = {}

    def run(self, values: list[Any], *around: object) -> Sequence[Tensor]:
        """Run a call.  Takes the list.  Raises what `check` raises, and CodaUnsupportedError inside transforms."""
        refuse_transforms(values)
        if is_traced():  # sizes may be symbols, which are no keys
            return self._run(*self._check(values, *around), values)
        try:
            seen = (*key_of(forms(values)), torch.is_grad_enabled(), around)
        except RuntimeError:  # what has no memory runs on no kernel
            anew = any(map(dispatches, values))  # sizes may be symbols here, too
            return self._run(*(self._check(values, *around) if anew else self._call(values, around)), values)
        again = self._again.get(seen)
        if again is not None and launches_repeat_now(again.device):
            return again.launches(values) if again.tape is None else recorded(again.tape, again.launches, *values)
        binding, run = self._call(values, around)
        if isinstance(run, Shaped) and not binding.moved:
            again = run.again(values)
            if again is not None:
                remember(self._again, seen, again, _MOST)
        return self._run(binding, run, values)

    def _run(self, binding: Binding, run: Shaped | Run, values: list[Any]) -> Sequence[Tensor]:
        for slot in binding.moved:
            values[slot] = values[slot].to(binding.device)
        return run(values)

    def _call(self, values: list[Any], around: tuple[object, ...]) -> tuple[Binding, Shaped | Run]:
        try:
            seen = (key(values), around)
        except RuntimeError:  # a tensor without a shape: `check` says which
            return self._check(values, *around)
        found = self._found.get(seen)
        return found or remember(self._found, seen, self._check(values, *around), _MOST)
