"""What is derived of an operator, whatever the shapes of a call: once per subset of arguments and of cotangents.

    Operator    an epilogue and how it is hosted
    Recording   an operator whose arguments of a given subset require gradients: the forward that saves, what is kept
    Route       a recording's backward for given cotangents and wanted gradients: a hosted operator and its wiring

All three live as long as their operator, so a new sequence length derives nothing, and finds its kernels by epilogues
that are the same objects as before.
"""

from __future__ import annotations

import functools

import attrs

from codalang.autodiff import Derivative, Load, derive
from codalang.errors import CodaUnsupportedError
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Output, Store

Flags = tuple[bool, ...]

# Where a backward's parameter comes from: ("param", position of the argument), ("output" or "cotangent", its position).
Place = tuple[str, int]


@attrs.define(eq=False)
class Operator:
    """An epilogue, hosted on a GEMM (its first two arguments are A and B) or on plain tensors."""

    epilogue: Epilogue
    on_gemm: bool
    _recordings: dict[Flags, Recording] = attrs.field(factory=dict, init=False)

    def recording(self, requires: Flags) -> Recording:
        """The recording for arguments of which those so flagged require gradients."""
        if requires not in self._recordings:
            self._recordings[requires] = Recording(self, requires)
        return self._recordings[requires]

    def derive(self, needs: Flags, cotangents: list[str] | None = None, kept: list[Load] | None = None) -> Derivative:
        """The derivative for the gradients of arguments so flagged; see `autodiff.derive`."""
        return derive(self.epilogue, wrt=self.wanted(needs), cotangents=cotangents, hosted=not self.on_gemm, kept=kept)

    def wanted(self, needs: Flags) -> set[str]:
        """The parameters whose gradients the arguments so flagged need."""
        accumulator = {self.epilogue.params[0].name} if self.on_gemm and (needs[0] or needs[1]) else set()
        return accumulator | {name for name, slot in self.slots.items() if needs[slot]}

    @functools.cached_property
    def slots(self) -> dict[str, int]:
        """Parameter -> position of its argument.  The accumulator of a GEMM is no argument."""
        params = self.epilogue.params
        if self.on_gemm:
            return {p.name: position for position, p in enumerate(params[1:], start=2)}
        return {p.name: position for position, p in enumerate(params)}


class Recording:
    """What a forward runs and keeps.

    Attributes:
        operator: the one that also stores what must be saved.  Routes are derived from it: to them a saved value is an
            output like any other, whose cotangent a second derivative brings.
        visible: how many of its outputs the caller sees; the rest are the saved ones.
        inputs, outputs: positions of the arguments and of the outputs that are kept.
    """

    def __init__(self, operator: Operator, requires: Flags) -> None:
        self._requires = requires
        first = operator.derive(requires)
        # Where nothing is saved the operator stays: a kernel is found fastest by an epilogue that is the same object.
        self.operator = Operator(first.forward, operator.on_gemm) if first.saved else operator
        self.visible = len(operator.epilogue.outputs)
        self._outputs = {o.name: position for position, o in enumerate(self.operator.epilogue.outputs)}
        places = [self._place(load) for load in first.loads.values()]
        operands = {other for other, slot in ((1, 0), (0, 1)) if operator.on_gemm and requires[slot]}
        self.inputs = tuple(sorted(operands | {position for source, position in places if source == "param"}))
        self.outputs = tuple(sorted({position for source, position in places if source == "output"}))
        self._routes: dict[tuple[Flags, Flags], Route] = {}
        everything = tuple(position < self.visible for position in self._outputs.values())
        self._routes[requires, everything] = self._wire(first, requires)

    def route(self, needs: Flags, present: Flags) -> Route:
        """The backward that gives these arguments' gradients from these outputs' cotangents, and loads nothing but what
        was kept.  Raises CodaUnsupportedError where that is not enough."""
        route = self._routes.get((needs, present))
        if route is None:
            route = self._routes[needs, present] = self._wire(self._derivative(needs, present), needs)
        return route

    def _derivative(self, needs: Flags, present: Flags) -> Derivative:
        """Leaving out cotangents or gradients can make a backward load something that was not kept, so what cannot be
        left out stays: such a cotangent is zero, and such a gradient is dropped."""
        names = list(self._outputs)
        given = [name for name, position in self._outputs.items() if present[position]]
        visible = names[: self.visible] + [name for name in given if self._outputs[name] >= self.visible]
        kept = self._kept()
        attempts = ((needs, given), (needs, visible), (self._requires, visible), (self._requires, names))
        for wanted, cotangents in attempts[:-1]:
            try:
                return self.operator.derive(wanted, cotangents, kept)
            except CodaUnsupportedError:
                continue
        return self.operator.derive(*attempts[-1], kept)

    def _kept(self) -> list[Load]:
        params = [Load("param", name) for name, slot in self.operator.slots.items() if slot in self.inputs]
        return params + [Load("output", name) for name, position in self._outputs.items() if position in self.outputs]

    def _place(self, load: Load) -> Place:
        if load.source == "param":
            return "param", self.operator.slots[load.name]
        return "cotangent" if load.source == "cotangent" else "output", self._outputs[load.name]

    def _wire(self, derivative: Derivative, needs: Flags) -> Route:
        slots = self.operator.slots
        needed = self.operator.wanted(needs)
        named = {param: name for param, name in derivative.gradients.items() if name is not None and param in needed}
        gradients = tuple((slots[param], name) for param, name in named.items() if param in slots)
        d_acc = next((name for param, name in named.items() if param not in slots), None)
        found = {slot for slot, _ in gradients} | ({0, 1} if d_acc else set())
        backward = _with_only(derivative.backward, set(named.values()))
        aliases = {o.name: param for o in backward.outputs if (param := _alias(backward, o))}
        backward = _with_only(backward, set(named.values()) - set(aliases))
        loaded = tuple(p.name for p in backward.params)
        return Route(
            operator=Operator(backward, on_gemm=False) if backward.outputs else None,
            loaded=loaded,
            places={name: self._place(derivative.loads[name]) for name in (*loaded, *aliases.values())},
            aliases=aliases,
            gradients=gradients,
            d_acc=d_acc,
            zeros=tuple(slot for slot, need in enumerate(needs) if need and slot not in found),
        )


@attrs.frozen(eq=False)
class Route:
    """A backward.

    Attributes:
        operator: the derived epilogue, hosted on plain tensors; None where no gradient needs a kernel.
        loaded: its arguments, by name.
        places: where each argument, and each alias, comes from.
        aliases: results that merely repeat a tensor that would be loaded: result -> argument.
        gradients: (position of an argument, name of the result that is its gradient).
        d_acc: the result that is the gradient of the matmul, None where that is zero or there is none.
        zeros: positions of arguments whose gradient is zero.
    """

    operator: Operator | None
    loaded: tuple[str, ...]
    places: dict[str, Place]
    aliases: dict[str, str]
    gradients: tuple[tuple[int, str], ...]
    d_acc: str | None
    zeros: tuple[int, ...]


def _alias(backward: Epilogue, output: Output) -> str | None:
    """The parameter that an output merely repeats, or None."""
    node = backward.nodes[output.value]
    if node.op == "param" and isinstance(output, Store) and node.type == output.type:
        return str(node.attr)
    return None


def _with_only(backward: Epilogue, kept: set[str]) -> Epilogue:
    """The epilogue with only these outputs, and with only the parameters that they use."""
    if len(kept) == len(backward.outputs):
        return backward
    rest = canonical(attrs.evolve(backward, outputs=tuple(o for o in backward.outputs if o.name in kept)))
    used = {node.attr for node in rest.nodes if node.op == "param"}
    return attrs.evolve(rest, params=tuple(p for p in rest.params if p.name in used))
