"""A program at given extents and dtypes, as a flat list of steps over slots: everything is decided once.

Slots hold one value each; arguments first, then numbers, then what steps make.  What decides a plan is in `Setting` and
`Wanted`; tensors differ from call to call in their addresses only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.ir.program import Program
from codalang.lower import run
from codalang.torch.execute import kernels_possible
from codalang.torch.program_planner import Planner
from codalang.torch.program_step import Setting, Wanted
from codalang.torch.program_values import live

_MOST_FORMS = 64  # of arguments, remembered by a plan


class Plan:
    """See the module's docstring.

    Attributes:
        shapes, flat: of each result, as the caller gets it and as the value is.
        dtypes: of each result.
    """

    def __init__(
        self,
        program: Program,
        setting: Setting,
        wanted: Sequence[Wanted] | None = None,
        *,
        annotated: Collection[str] | None = None,
        owned: Collection[str] = (),
    ) -> None:
        """`wanted`: the results (default: the program's); `annotated`: values whose annotation is the author's (default
        all): in others f32 stands for what is computed in; `owned`: arguments that nobody else has, which may be
        overwritten."""
        wanted = tuple(wanted) if wanted is not None else tuple(map(Wanted, program.results))
        program = live(attrs.evolve(program, results=tuple(w.name for w in wanted)))
        planner = Planner(program, setting, wanted, annotated, frozenset(owned))
        self.program, self.setting, self.wanted = program, setting, wanted
        self.steps = planner.steps()
        self._constants = tuple(planner.constants)
        self._count = len(program.params)
        self._repeated: dict[object, tuple[Callable[[list[Any]], None], ...]] = {}
        self._spare: list[Any] = [None] * (planner.count - len(program.params) - len(self._constants))
        known = [planner.values[w.name] for w in wanted]
        self.results = tuple((value.slot, planner.finish(w)) for value, w in zip(known, wanted, strict=True))
        self.own = tuple((value.flat, value.dtype) for value in known)
        self.flat = tuple(value.flat for value in known)
        self.shapes = tuple(
            finish.shape if finish is not None else value.shape
            for value, (_, finish) in zip(known, self.results, strict=True)
        )
        self.dtypes = tuple(w.dtype or value.dtype for value, w in zip(known, wanted, strict=True))

    def run(self, values: list[Any]) -> list[Tensor]:
        """The results, for the arguments in order.  Takes the list: what is in it is dropped as soon as it can be."""
        slots = values
        slots += self._constants
        slots += self._spare
        device = self.setting.device
        if not kernels_possible(device):
            for step in self.steps:
                step.run(slots)
        elif torch.cuda.current_device() == device.index:
            self._launch(slots)
        else:
            with torch.cuda.device(device):
                self._launch(slots)
        return [slots[slot] if finish is None else finish(slots[slot]) for slot, finish in self.results]

    def _launch(self, slots: list[Any]) -> None:
        """Run the steps; where they ran before on arguments of the same forms, nothing but addresses is looked at."""
        forms = [(v.stride(), v.data_ptr() & 15) if isinstance(v, Tensor) else None for v in slots[: self._count]]
        key = (run.function, run.overlap, *forms)  # the first is what tests and recordings replace, the second a switch
        steps = self._repeated.get(key)
        if steps is None:
            if len(self._repeated) >= _MOST_FORMS:
                self._repeated.clear()
            self._repeated[key] = tuple([step.run_listening(slots) for step in self.steps])
            return
        for step in steps:
            step(slots)
