"""One step of a plan, and what plans know of their arguments, values and results before they are there.

Setting    what is known of a program's arguments
Known      what is known of a value
Wanted     what is asked of a result
Finish     what makes the caller's tensor of it
Step       one epilogue on its host (`execute.Job`), or one cast; where its arguments come from and its results go
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.ir.program import TensorType
from codalang.torch.execute import Job, Launch, execute, execute_listening
from codalang.torch.program_call import Shape
from codalang.torch.signature import Extent

Prepare = Callable[[Tensor], Any]


@attrs.frozen(eq=False)
class Setting:
    """What is known of a program's arguments.

    Attributes:
        sizes: the number that each dimension name stands for.
        shapes: of each argument, batch dimensions included.
        flat: of each argument, as it is declared.
        dtypes: of each argument, None for numbers.
        compute: what the reference computes in.
        device: where it runs.
        autocast: what operands of matmuls are cast to, or None.
        derived: the program was derived: operands of two dtypes are brought to the one that the forward multiplied.
    """

    sizes: Mapping[str, Extent]
    shapes: tuple[Shape, ...]
    flat: tuple[Shape, ...]
    dtypes: tuple[torch.dtype | None, ...]
    compute: torch.dtype
    device: torch.device
    autocast: torch.dtype | None = None
    derived: bool = False

    @property
    def is_half(self) -> bool:
        """Is anything stored in f16?"""
        return torch.float16 in (self.autocast, *self.dtypes)


@attrs.frozen
class Wanted:
    """A result, each value once, and what is asked of it.

    Attributes:
        name: of the value.
        dtype: None for its own.
        type: the type whose view it is, None for its own.
        shape: None for that of the type.
        copied: where it is an argument, a new tensor.
    """

    name: str
    dtype: torch.dtype | None = None
    type: TensorType | None = None
    shape: Shape | None = None
    copied: bool = True


@attrs.frozen(eq=False)
class Finish:
    """What makes the caller's tensor of a value.

    Attributes:
        shape: of that tensor.
        dtype: None for the value's own.
        viewed: the type with pairs whose view the value is, which are brought apart; `flat`: its shape.
        copied: the value is an argument or another's result, too, and is copied.
        permuted: the value lies where the caller gets it, and this permutation undoes its view.
    """

    shape: Shape
    dtype: torch.dtype | None = None
    viewed: TensorType | None = None
    flat: Shape = ()
    copied: bool = False
    permuted: tuple[int, ...] | None = None

    @property
    def has_pairs(self) -> bool:
        """Is the value a view of what the caller gets that is not only of another shape?"""
        return self.viewed is not None

    def undone(self, tensor: Tensor, value: Shape) -> Tensor:
        """A tensor like the caller's as one like the value."""
        if self.viewed is None:
            return tensor
        return tensor.reshape(self.flat).permute(self.viewed.order).reshape(value)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.permuted is not None:
            return tensor.permute(self.permuted)
        if self.viewed is not None:
            order = self.viewed.order
            tensor = tensor.reshape([self.flat[axis] for axis in order]).permute(order).contiguous()
        if self.dtype not in (None, tensor.dtype):
            tensor = tensor.to(self.dtype)
        elif self.copied:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor if tensor.shape == self.shape else tensor.reshape(self.shape)


@attrs.frozen
class Placed:
    """An output that is written where the caller gets it: `order` is the permutation that makes its view of `shape`."""

    output: str
    shape: Shape
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """The view that the output fills."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).permute(self.order)


@attrs.frozen(eq=False)
class Step:
    """Attributes:
    job: what is run; None casts the one argument to `dtype`.
    arguments: slots.
    prepare: for each argument what makes a view of it, None where it is taken as it is.
    results: a slot for each output.
    dead: slots that hold nothing needed after this step.
    in_place: (output, argument): that argument's memory is the output's.
    """

    job: Job | None
    arguments: tuple[int, ...]
    prepare: tuple[Prepare | None, ...]
    results: tuple[int, ...]
    dtype: torch.dtype | None = None
    dead: tuple[int, ...] = ()
    in_place: tuple[tuple[str, int], ...] = ()
    placed: tuple[Placed, ...] = ()
    taken: tuple[tuple[int, Prepare | None], ...] = attrs.field(init=False)

    @taken.default
    def _taken(self) -> tuple[tuple[int, Prepare | None], ...]:
        return tuple(zip(self.arguments, self.prepare, strict=True))

    def run(self, slots: list[Any]) -> None:
        """Run it on the slots' values."""
        self._finish(slots, self.outputs(self._values(slots)))

    def run_listening(self, slots: list[Any]) -> Launch | None:
        """The same; what it launched, where that was one kernel."""
        if self.job is None:
            self.run(slots)
            return None
        values = self._values(slots)
        outputs, launch = execute_listening(self.job, values, self._out(values))
        self._finish(slots, outputs)
        return launch

    def outputs(self, values: list[Any]) -> list[Tensor]:
        """What it makes of its arguments."""
        if self.job is None:
            return [values[0].to(self.dtype)]
        return execute(self.job, values, self._out(values))

    def _values(self, slots: list[Any]) -> list[Any]:
        return [p(slots[i]) if p else slots[i] for i, p in self.taken]

    def _out(self, values: list[Any]) -> dict[str, Tensor] | None:
        out = {name: values[i] for name, i in self.in_place} if self.in_place else None
        if self.placed:
            out = (out or {}) | {place.output: place.allocate() for place in self.placed}
        return out

    def _finish(self, slots: list[Any], outputs: Iterable[Tensor]) -> None:
        for slot, tensor in zip(self.results, outputs, strict=True):
            slots[slot] = tensor
        for slot in self.dead:
            slots[slot] = None


@attrs.frozen(eq=False)
class Known:
    """What a plan knows of a value before it is there.

    Attributes:
        shape: of the tensor in the slot; `flat`: as it is declared.
        dtype: None for numbers.
        order: where the slot holds a view of what the caller gets, the permutation that makes it that again.
    """

    slot: int
    type: TensorType
    shape: Shape
    flat: Shape
    dtype: torch.dtype | None
    order: tuple[int, ...] | None = None
