"""A program at given extents and dtypes, as a flat list of steps over slots: everything is decided once.

Slots hold one value each; arguments first, then numbers, then what steps make.  What decides a plan is in `Setting` and
`Wanted`; tensors differ from call to call in their addresses only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.ir.program import Program
from codalang.lower import call, run
from codalang.lower.beside import foreseen
from codalang.lower.spec import KernelSpec
from codalang.torch import execute
from codalang.torch.execute import launches_repeat, rehearsal
from codalang.torch.opaque import Looking
from codalang.torch.program_planner import Planner
from codalang.torch.program_step import Setting, Wanted
from codalang.torch.program_straight import Straight, straight
from codalang.torch.program_values import live
from codalang.torch.signature import PLAIN, has_memory, remember

_MOST_FORMS = 64  # of arguments, remembered by a plan


class Plan:
    """See the module's docstring.

    Attributes:
        shapes, flat: of each result, as the caller gets it and as the value is.
        dtypes: of each result.
        later: the kernels of what is likely to run after it, for its arguments on `meta`.
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
        self._annotated, self._owned = annotated, owned
        self.later: Callable[[list[Any]], Iterable[KernelSpec]] = lambda values: ()
        self.steps = planner.steps()
        self._constants = tuple(planner.constants)
        self._count = len(program.params)
        self._repeated: dict[object, Straight] = {}
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
        device = self.setting.device
        if not launches_repeat(device):
            slots = self._slots(values)
            for step in self.steps:
                step.run(slots)
            return self._finished(slots)
        if execute.current_device() == device.index:
            return self._launch(values)
        with torch.cuda.device(device):
            return self._launch(values)

    def traced(self) -> Plan:
        """The same plan as a tracer sees it."""
        with Looking():
            return Plan(self.program, self.setting, self.wanted, annotated=self._annotated)

    def again(self, values: list[Any]) -> Straight | None:
        """What runs it on arguments of these forms, where it ran on such and their device is the current one."""
        device = self.setting.device
        if launches_repeat(device) and execute.current_device() == device.index:
            return self._repeated.get(key_of(lie(values)))
        return None

    def _launch(self, values: list[Any]) -> list[Tensor]:
        """Run the steps; where they ran before on arguments of the same forms, nothing but addresses is looked at."""
        forms = lie(values)
        key = key_of(forms)
        again = self._repeated.get(key)
        if again is not None:
            return again(values)
        given = [v if form is None else form for v, form in zip(values, forms, strict=True)]
        slots = self._slots(values)
        with foreseen(functools.partial(self._kernels, given)):
            ran = [(step, step.run_listening(slots)) for step in self.steps]
        remember(self._repeated, key, straight(self._count, self._constants, ran, self.results), _MOST_FORMS)
        return self._finished(slots)

    def _kernels(self, given: list[Any]) -> Iterator[Iterable[KernelSpec]]:
        """The kernels that a call launches, then those of what is likely to run next.  `given`: numbers, and of tensors
        strides and addresses modulo 16."""
        setting = attrs.evolve(self.setting, device=torch.device("meta"))
        forms = zip(given, setting.shapes, setting.dtypes, strict=True)
        values = [v if dtype is None else _on_meta(shape, dtype, *v) for v, shape, dtype in forms]
        with rehearsal(self.setting.device) as specs:
            plan = Plan(self.program, setting, self.wanted, annotated=self._annotated, owned=self._owned)
            plan.run(list(values))
        yield specs
        yield self.later(values)

    def _slots(self, values: list[Any]) -> list[Any]:
        values += self._constants
        values += self._spare
        return values

    def _finished(self, slots: list[Any]) -> list[Tensor]:
        return [slots[slot] if finish is None else finish(slots[slot]) for slot, finish in self.results]


def lie(values: Sequence[Any]) -> list[tuple[tuple[int, ...], int] | None]:
    """How tensors lie in memory: their strides, and their addresses modulo 16.

    Raises RuntimeError for those that do not, batches above all.
    """
    return [(v.stride(), v.data_ptr() & 15) if type(v) in PLAIN or has_memory(v) else None for v in values]


def key_of(forms: Sequence[object]) -> tuple[object, ...]:
    """What launches are remembered under: forms of values, what tests and recordings replace, and a switch."""
    return (run.function, call.empty, run.overlap, *forms)


def _on_meta(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int], address: int) -> Tensor:
    """A tensor without memory in place of one of that form."""
    offset = address // dtype.itemsize
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.empty(offset + max(extent, 0), dtype=dtype, device="meta").as_strided(shape, stride, offset)
