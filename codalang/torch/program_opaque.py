"""The operators that torch.compile and other tracers see in place of a program's plan.

    codalang::run_program    one plan, without gradients; opaque to everybody
    codalang::call_program   a whole call: checked, differentiable.  Composite: tracers see through it to `run_program`

Both name the program by its .coda text, see `opaque`.  Extents are symbols where the compiler has them: one trace
serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from codalang.ir.program import Program
from codalang.torch.opaque import DTYPES, in_lines, is_traced, one_line
from codalang.torch.program_plan import Plan
from codalang.torch.program_step import Setting, Wanted
from codalang.torch.program_values import types_of
from codalang.torch.signature import ELEMENTS, Extent, dispatches, remember

_plans: dict[tuple[object, ...], Plan] = {}
_MOST_PLANS = 4096


def run_plan(plan: Plan, values: list[Any]) -> list[Tensor]:
    """Run a plan: directly, or where a tracer looks on or an argument does operators itself, as one opaque operator.
    Takes the list, see `Plan.run`."""
    if not is_traced():
        if not any(map(dispatches, values)):
            return plan.run(values)
        plan = plan.traced()
    setting, program = plan.setting, plan.program
    names = sorted(setting.sizes)
    tensors = [
        v.reshape(flat)
        if isinstance(v, Tensor)
        else ELEMENTS[p.type.dtype].as_tensor(v, setting.compute, setting.device)
        for v, flat, p in zip(values, setting.flat, program.params, strict=True)
    ]
    raw = torch.ops.codalang.run_program(
        text_of(program),
        tensors,
        ",".join(names),
        [setting.sizes[name] for name in names],
        str(setting.compute),
        str(setting.autocast),
        setting.derived,
        [str(dtype) for _, dtype in plan.own],
    )
    finishes = [None if f is None else attrs.evolve(f, copied=False) for _, f in plan.results]
    return [t if f is None else f(t) for t, f in zip(raw, finishes, strict=True)]


class Texts:
    """Programs and their texts in one line: each is printed once, and parsed once where this process did not print
    it."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Program, str]] = {}
        self._programs: dict[str, Program] = {}

    def of(self, program: Program) -> str:
        """The text of a program, and of the epilogues that it applies."""
        key = id(program)
        if key not in self._texts:
            from codalang.ir.printer import print_program

            text = one_line(print_program(program))
            self._texts[key] = (program, text)  # holding the program keeps its id from being reused
            self._programs.setdefault(text, program)
        return self._texts[key][1]

    def program(self, text: str) -> Program:
        """The last program that a text defines, in one line or several."""
        if text not in self._programs:
            from codalang.parser import parse

            *_, self._programs[text] = parse(in_lines(text)).programs.values()
        return self._programs[text]


_texts = Texts()
text_of, program_of = _texts.of, _texts.program


def _run(
    text: str,
    values: Sequence[Tensor],
    names: str,
    sizes: Sequence[int],
    compute: str,
    autocast: str,
    derived: bool,
    dtypes: Sequence[str],
) -> list[Tensor]:
    key = (text, values[0].device, tuple(sizes), compute, autocast, derived, *dtypes, *(v.dtype for v in values))
    plan = _plans.get(key)
    if plan is None:
        program = program_of(text)
        shapes = tuple(tuple(v.shape) for v in values)
        setting = Setting(
            dict(zip(names.split(","), sizes, strict=True)) if names else {},
            shapes,
            shapes,
            tuple(v.dtype for v in values),
            DTYPES[compute],
            values[0].device,
            DTYPES.get(autocast),
            derived,
        )
        wanted = [Wanted(name, DTYPES[dtype]) for name, dtype in zip(program.results, dtypes, strict=True)]
        plan = remember(_plans, key, Plan(program, setting, wanted, annotated=() if derived else None), _MOST_PLANS)
    return plan.run(list(values))


def _run_fake(
    text: str,
    values: Sequence[Tensor],
    names: str,
    sizes: Sequence[Extent],
    compute: str,
    autocast: str,
    derived: bool,
    dtypes: Sequence[str],
) -> list[Tensor]:
    from codalang.torch.program_call import extent

    program = program_of(text)
    types, extents = types_of(program), dict(zip(names.split(","), sizes, strict=True)) if names else {}
    return [
        values[0].new_empty([extent(axis, extents) for axis in types[name].shape], dtype=DTYPES[dtype])
        for name, dtype in zip(program.results, dtypes, strict=True)
    ]


_library: Any = torch.library.Library("codalang", "FRAGMENT")
_library.define(
    "run_program(str text, Tensor[] values, str names, SymInt[] sizes, str compute, str autocast, bool derived,"
    " str[] dtypes) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# "Meta" is for fake tensors, too; `register_fake` would look for our source file among all that is imported.
for _key, _kernel in (("CPU", _run), ("CUDA", _run), ("Meta", _run_fake)):
    _library.impl("run_program", _kernel, _key)
_library.define("call_program(str text, Tensor[] values) -> Tensor[]")


def _call(text: str, values: Sequence[Tensor]) -> list[Tensor]:
    from codalang.torch.program import function_of

    return list(function_of(text).call_bound(list(values)))


_library.impl("call_program", _call, "CompositeImplicitAutograd")


def call(text: str, tensors: list[Tensor]) -> list[Tensor]:
    """What torch.compile records of a call."""
    return cast(list[Tensor], torch.ops.codalang.call_program(text, tensors))
