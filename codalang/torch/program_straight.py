"""The steps of a plan that ran once, as one Python function: for tensors of the same forms only addresses differ.

    def steps(given):
        s0, s1 = given
        given.clear()
        s2 = empty(shape, strides, dtype)
        launch(s0, s1, (), (s2,), *tail)
        del s0, s1
        return [s2]

A launch costs the host what its allocations and itself cost: nothing is looked up, counted or put into a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.lower import call
from codalang.torch.execute import Launch
from codalang.torch.program_step import Finish, Step

Straight = Callable[[list[Any]], list[Tensor]]


def straight(
    count: int,
    constants: Sequence[Any],
    steps: Sequence[tuple[Step, Launch | None]],
    results: Sequence[tuple[int, Finish | None]],
) -> Straight:
    """What runs steps again.  It takes the list of `count` arguments; `constants` are in the slots behind them.

    `steps`: each with what it launched, where that was one kernel; the others run as they ran before.
    """
    function = _Function({f"s{slot}": constant for slot, constant in enumerate(constants, count)})
    if count:
        function.line(f"{_tuple(map(_slot, range(count)))} = given")
        function.line("given.clear()")  # what is dropped below is held by the caller alone
    for step, launch in steps:
        function.step(step, launch)
    finished = [_slot(slot) if f is None else f"{function.name('finish', f)}({_slot(slot)})" for slot, f in results]
    function.line(f"return [{', '.join(finished)}]")
    return function.compiled()


def _slot(index: int) -> str:
    return f"s{index}"


def _tuple(items: Any) -> str:
    return "(" + "".join(f"{item}, " for item in items).rstrip() + ")"


@attrs.define
class _Function:
    """The function in the making: its lines, and what their names stand for."""

    names: dict[str, Any]
    lines: list[str] = attrs.field(factory=list)

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}\n")

    def name(self, called: str, value: Any) -> str:
        """The name of a value that is the same in every call."""
        name = f"{called}{len(self.names)}"
        self.names[name] = value
        return name

    def compiled(self) -> Straight:
        text = "def steps(given):\n" + "".join(self.lines)
        exec(compile(text, "<steps of a plan>", "exec"), self.names)
        steps: Straight = self.names["steps"]
        steps.__doc__ = text
        return steps

    def step(self, step: Step, launch: Launch | None) -> None:
        made = _tuple(map(_slot, step.results))
        if launch is None:
            self.line(f"{made} = {self.name('execute', step.outputs)}([{', '.join(self._values(step))}])")
        else:
            values = [f"{v}.tensor" if i in launch.folded else v for i, v in enumerate(self._values(step))]
            self._launch(step, launch, [values[i] for i in launch.order], made)
        if step.dead:
            self.line(f"del {', '.join(map(_slot, step.dead))}")

    def _values(self, step: Step) -> list[str]:
        return [_slot(i) if p is None else f"{self.name('view', p)}({_slot(i)})" for i, p in step.taken]

    def _launch(self, step: Step, launch: Launch, values: Sequence[str], made: str) -> None:
        """`values`: in the kernel's order."""
        known, given = launch.call, self._given(step)
        buffers = known.straight
        if buffers is None or given.keys() != {name for name, buffer in buffers if buffer.given is not None}:
            out = ", ".join(f"{name!r}: {tensor}" for name, tensor in given.items())
            self.line(f"{made} = {self.name('repeat', known.repeat)}({_tuple(values)}, {{{out}}})")
            return
        slots = dict(zip(known.names, map(_slot, step.results), strict=True))
        for name, buffer in buffers:
            self.line(f"{slots[name]} = {given.get(name) or self._new(buffer, known.device)}")
        first = known.operands
        outputs = _tuple(slots[name] for name, _ in buffers)
        tail = [repr(number) for number in known.tail]
        arguments = ", ".join([*values[:first], _tuple(values[first:]), outputs, *tail])
        self.line(f"{self.name('launch', known.launch)}({arguments})")

    def _new(self, buffer: call.Buffer, device: torch.device) -> str:
        empty, dtype = self.name("empty", call.allocator(device)), self.name("dtype", buffer.dtype)
        return f"{empty}({buffer.shape}, {call.contiguous(buffer.shape)}, {dtype})"

    def _given(self, step: Step) -> Mapping[str, str]:
        """The tensors that outputs are written into, by the outputs' names."""
        placed = {place.output: f"{self.name('allocate', place.allocate)}()" for place in step.placed}
        return {name: _slot(step.arguments[i]) for name, i in step.in_place} | placed
