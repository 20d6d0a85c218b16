"""The torch operators that compilers and tracers see in place of our Python.

    codalang::execute   one epilogue on a GEMM or on plain tensors, without gradients; opaque to everybody
    codalang::call      a whole call: checked, differentiable.  Composite: tracers see through it to `execute`

Both name the epilogue by its .coda text: a traced graph means the same in another process, and may be cached on disk.
The text is brought to one line, because compilers copy constants into the comments of what they generate.
In eager mode neither is used, because dispatching to Python costs more than the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from codalang.ir.epilogue import Epilogue, Param
from codalang.torch import execute as backend
from codalang.torch.execute import Job
from codalang.torch.signature import ELEMENTS, FLOATING, Extent, Value, columns_of, lead_of

T = TypeVar("T")

# By name, because torch 2.11 hands a list of dtypes to Python as numbers.
_DTYPES = {str(dtype): dtype for dtype in (*FLOATING, torch.int32, torch.int64)}

_jobs: dict[tuple[object, ...], Job] = {}


def is_traced() -> bool:
    """True where some tracer or mode looks on (fake tensors, functionalization, proxies)."""
    return torch._C._len_torch_dispatch_stack() > 0


def execute(job: Job, values: Sequence[Value]) -> Sequence[Tensor]:
    """Run a job: directly, or where a tracer looks on, as one opaque operator."""
    if not is_traced():
        return backend.execute(job, values)
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    params = job.epilogue.params[1:] if job.on_gemm else job.epilogue.params
    tensors = as_tensors(values, params, job.compute, device)
    outputs = torch.ops.codalang.execute(
        text_of(job.epilogue),
        job.on_gemm,
        tensors,
        job.rows,
        job.columns,
        str(job.compute),
        [str(d) for d in job.dtypes],
        job.samples,
    )
    return cast(list[Tensor], outputs)


def as_tensors(
    values: Sequence[Value], params: Sequence[Param], compute: torch.dtype, device: torch.device | None
) -> list[Tensor]:
    """Numbers among the values as tensors of what their parameters hold; `params` are those of the last values."""
    lead = len(values) - len(params)
    return [
        v if isinstance(v, Tensor) else ELEMENTS[params[i - lead].type.dtype].as_tensor(v, compute, device)
        for i, v in enumerate(values)
    ]


def one_line(text: str) -> str:
    """The text with its line breaks written as `\\n`; printed .coda has no backslash of its own."""
    return text.replace("\n", "\\n")


def in_lines(text: str) -> str:
    """The inverse of `one_line`; a text that has lines already is left alone."""
    return text.replace("\\n", "\n")


class Texts(Generic[T]):
    """Definitions and their texts in one line: each is printed once, and parsed once where this process did not print
    it."""

    def __init__(self, show: Callable[[T], str], parse: Callable[[str], T]) -> None:
        self._show, self._parse = show, parse
        self._texts: dict[int, tuple[T, str]] = {}
        self._definitions: dict[str, T] = {}

    def of(self, definition: T) -> str:
        """The text of a definition."""
        key = id(definition)
        if key not in self._texts:
            text = one_line(self._show(definition))
            self._texts[key] = (definition, text)  # holding the definition keeps its id from being reused
            self._definitions.setdefault(text, definition)
        return self._texts[key][1]

    def definition(self, text: str) -> T:
        """The definition of a text, in one line or several."""
        if text not in self._definitions:
            self._definitions[text] = self._parse(in_lines(text))
        return self._definitions[text]


def _print(epilogue: Epilogue) -> str:
    from codalang.ir.printer import print_epilogue

    return print_epilogue(epilogue)


def _parse(text: str) -> Epilogue:
    from codalang.parser import parse

    (epilogue,) = parse(text).epilogues.values()
    return epilogue


_texts = Texts(_print, _parse)
text_of, epilogue_of = _texts.of, _texts.definition


def _execute(
    text: str,
    on_gemm: bool,
    values: Sequence[Tensor],
    rows: int,
    columns: int,
    compute: str,
    dtypes: Sequence[str],
    samples: int = 0,
) -> list[Tensor]:
    key = (text, on_gemm, rows, columns, compute, *dtypes, samples)
    job = _jobs.get(key)
    if job is None:
        if len(_jobs) > 4096:
            _jobs.clear()
        job = _jobs[key] = Job(
            epilogue_of(text), on_gemm, rows, columns, _DTYPES[compute], tuple(_DTYPES[d] for d in dtypes), samples
        )
    return backend.execute(job, values)


def _execute_fake(
    text: str,
    on_gemm: bool,
    values: Sequence[Tensor],
    rows: Extent,
    columns: Extent,
    compute: str,
    dtypes: Sequence[str],
    samples: Extent = 0,
) -> list[Tensor]:
    results = []
    for output, dtype in zip(epilogue_of(text).outputs, dtypes, strict=True):
        lead = lead_of(output, (rows,), samples)
        results.append(values[0].new_empty(lead + columns_of(output.type.width, columns), dtype=_DTYPES[dtype]))
    return results


_library: Any = torch.library.Library("codalang", "DEF")
_library.define(
    "execute(str text, bool on_gemm, Tensor[] values, SymInt rows, SymInt columns, str compute, str[] dtypes,"
    " SymInt samples=0) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("execute", _execute, _key)
torch.library.register_fake("codalang::execute", _execute_fake, lib=_library)
_library.define("call(str text, bool on_gemm, Tensor[] values, SymInt[]? extents) -> Tensor[]")


def _call(text: str, on_gemm: bool, values: Sequence[Tensor], extents: Sequence[Extent] | None) -> list[Tensor]:
    from codalang.torch.module import callable_of

    found = callable_of(text, on_gemm)
    return list(found.call_bound(list(values), None if extents is None else tuple(extents)))


_library.impl("call", _call, "CompositeImplicitAutograd")
