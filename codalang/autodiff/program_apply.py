"""The backward of one application of an epilogue: its derived epilogue, on a host.

The host is, where there is one,

    the pending matmul     that makes the cotangent of one of the results, which is its accumulator
    the forward's matmul   run again, where the accumulator is needed and was not to be kept (`recompute acc`)
    a plain cotangent      that the caller, or another statement, gave; or else a forward tile, or nothing

A derived epilogue that only passes cotangents on is none: they are passed on as they are, matmuls pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import attrs

from codalang.autodiff.derivative import Derivative, Load
from codalang.autodiff.program_emit import Cotangent
from codalang.autodiff.program_flow import Flow
from codalang.autodiff.program_fuse import Term, fused, hosted_on, is_float_tile, passed_through, with_outputs
from codalang.ir.dims import ONE, Dim
from codalang.ir.epilogue import Epilogue, Param
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Value
from codalang.ir.types import Kind, ValueType


@attrs.define
class Application:
    """The backward of one application of an epilogue."""

    flow: Flow
    index: int
    statement: Apply
    derivative: Derivative
    wanted: tuple[str, ...]
    rerun: bool
    given: dict[str, Value] = attrs.field(init=False)  # parameter of the forward -> value, but for an accumulator
    results: dict[str, str] = attrs.field(init=False)  # output of the forward that saves -> value

    def run(self) -> None:
        """Emit it, and have what it makes arrive."""
        statement, flow = self.statement, self.flow
        self.given = dict(statement.inputs)
        if isinstance(statement.host, str):
            self.given[statement.epilogue.params[0].name] = statement.host
        self.results = flow.kept.saving(self.index, self.derivative)
        backward = self.derivative.backward
        through = passed_through(backward)
        sources = self.derivative.loads
        if all(o.name in through and sources[through[o.name]].source == "cotangent" for o in backward.outputs):
            made = self._passed_on(through)
        else:
            made = self._emitted(through)
        for param in self.wanted:
            gradient = self.derivative.gradients[param]
            if gradient in made:
                self._arrive(param, made[gradient])
        for output, name in self.derivative.again.items():
            flow.kept.again[self.results[output]] = made[name]

    def _arrive(self, param: str, name: str) -> None:
        value = self.given.get(param)
        if isinstance(value, str):
            self.flow.arrive(value, name)
        elif isinstance(self.statement.host, Matmul):
            self.flow.through_matmul(self.statement.host, name)

    def _passed_on(self, through: Mapping[str, str]) -> dict[str, str]:
        """The cotangents of results, for the parameters whose gradient they are."""
        made: dict[str, str] = {}
        for output in self.derivative.backward.outputs:
            param = through[output.name]
            targets = [p for p in self.wanted if self.derivative.gradients[p] == output.name]
            arrived = self._arrived(param)
            value = self.given.get(targets[0])
            if len(targets) == 1 and isinstance(value, str):
                # Nobody else has it: what is pending stays so.
                for matmul in arrived.pending:
                    self.flow.await_(value, matmul)
                for name, times in arrived.loaded.items():
                    self.flow.arrive(value, name, times)
            else:
                made[output.name] = self._total(self.derivative.backward.param(param), arrived)
        return made

    def _result(self, param: Param) -> str:
        """The result whose cotangent a parameter of the derived epilogue is."""
        return self.results[self.derivative.loads[param.name].name]

    def _arrived(self, param: str) -> Cotangent:
        return self.flow.cotangents[self.results[self.derivative.loads[param].name]]

    def _total(self, param: Param, arrived: Cotangent) -> str:
        """What arrived at a cotangent as one value."""
        flow, value = self.flow, self._result(param)
        flow.resolve(arrived)
        shape = self._shape(param.type)
        if param.type.kind in (Kind.TILE, Kind.ROWS):
            flow.refuse_vectors(value, arrived, self.statement.loc)
            return flow.emission.matrix(arrived, shape, f"d_{value}")
        return flow.emission.vector_sum(arrived, shape[0] * shape[1], f"d_{value}")

    def _shape(self, type_: ValueType) -> tuple[Dim, Dim]:
        m, n, *samples = self.statement.extents
        rows = samples[0] if type_.kind is Kind.ROWS else m if type_.kind.has_rows else ONE
        return rows, n * type_.width if type_.width is not None else ONE

    # ---- a derived epilogue -----------------------------------------------------------------------------------------

    def _emitted(self, through: Mapping[str, str]) -> dict[str, str]:
        """The derived epilogue on its host; each of its outputs as a value."""
        backward = self.derivative.backward
        host = None if self.rerun else self._host(through)
        namer = Namer([*backward.dims, *(p.name for p in backward.params), *(o.name for o in backward.outputs)])
        sums: dict[str, list[Term]] = {}
        inputs: dict[str, Value] = {}
        for param in backward.params:
            if self.derivative.loads[param.name].source == "cotangent":
                sums[param.name] = self._terms(param, param is host, namer, inputs)
            elif not (self.rerun and self._is_accumulator(param)):
                inputs[param.name] = self._value(param)
        whole = fused(backward, sums)
        alone = {t.name for terms in sums.values() for t in terms if t.times == 1 and t.name in inputs}
        made = {o: str(inputs[p]) for o, p in passed_through(whole).items() if p in alone}
        rest = [o for o in whole.outputs if o.name not in made]
        if rest:
            epilogue = with_outputs(whole, rest)
            names = self._on_host(epilogue, host, inputs, [self._name(o.name) for o in rest])
            made |= {o.name: name for o, name in zip(rest, names, strict=True)}
        return made

    def _on_host(
        self, epilogue: Epilogue, host: Param | None, inputs: dict[str, Value], wanted: list[str]
    ) -> list[str]:
        emission = self.flow.emission
        on: Matmul | str | None = None
        first: str | None = None
        if self.rerun:
            assert isinstance(self.statement.host, Matmul)
            on = self.flow.resolved(self.statement.host)
            first = next(p.name for p in self.derivative.backward.params if self._is_accumulator(p))
        elif host is not None:
            on, first = self._arrived(host.name).pending.pop(), host.name
        elif tiles := [p for p in epilogue.params if is_float_tile(p)]:
            first = tiles[0].name
            value = inputs[first]
            assert isinstance(value, str)
            on = value
        epilogue = hosted_on(epilogue, first)
        if isinstance(on, Matmul) and list(passed_through(epilogue).values()) == [first] and len(wanted) == 1:
            return [emission.product(on, wanted[0])]
        return emission.apply(epilogue, on, inputs, self.statement.extents, wanted)

    def _host(self, through: Mapping[str, str]) -> Param | None:
        """The cotangent whose pending matmul is the host: the one that saves the most traffic, of those the widest."""

        def cost(param: Param) -> tuple[Fraction, Fraction]:
            """What moves besides, where it is the host."""
            passed = set(through.values())
            others = sum((width(p) * 2 for p in pending if p is not param), start=Fraction(0))
            return others + (width(param) if param.name in passed else 0), -width(param)

        def width(param: Param) -> Fraction:
            assert param.type.width is not None
            return param.type.width

        pending = [
            p
            for p in self.derivative.backward.params
            if self.derivative.loads[p.name].source == "cotangent"
            and is_float_tile(p)
            and self._arrived(p.name).pending
        ]
        return min(pending, key=cost, default=None)

    def _terms(self, param: Param, hosts: bool, namer: Namer, inputs: dict[str, Value]) -> list[Term]:
        """What a cotangent is the sum of; emits what it cannot take as it is."""
        emission, arrived = self.flow.emission, self._arrived(param.name)
        if param.type.kind in (Kind.TILE, Kind.ROWS):
            value = self._result(param)
            self.flow.refuse_vectors(value, arrived, self.statement.loc)
            self.flow.resolve(arrived)
            emission.accumulated(arrived, len(arrived.pending) - hosts, self._shape(param.type), f"d_{value}")
        else:
            arrived = Cotangent({self._total(param, arrived): 1})
        names = [
            param.name if i == 0 and not hosts else namer.fresh(f"{param.name}_2") for i in range(len(arrived.loaded))
        ]
        terms, values = emission.terms(arrived, names, param.type)
        inputs.update(values)
        return [Term(param.name, param.type), *terms] if hosts else terms

    def _is_accumulator(self, param: Param) -> bool:
        accumulator = self.statement.epilogue.accumulator
        return accumulator is not None and self.derivative.loads[param.name] == Load("param", accumulator.name)

    def _value(self, param: Param) -> Value:
        """What a parameter that is no cotangent is given."""
        load = self.derivative.loads[param.name]
        value = self.given[load.name] if load.source == "param" else self.results[load.name]
        return self.flow.kept.read(value) if isinstance(value, str) else value

    def _name(self, output: str) -> str:
        """What to call an output."""
        for param in self.wanted:
            if self.derivative.gradients[param] == output:
                value = self.given.get(param)
                if isinstance(value, str):
                    return f"d_{value}"
        first = next(r for r in self.statement.results if r is not None)
        for source, name in self.derivative.again.items():
            if name == output:
                return f"{self.results[source]}_again"
        return f"d_acc_{first}"
