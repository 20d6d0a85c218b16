"""The kernel of a typical call, where there is no call: what `emit` and `compile` lower.

A and B are contiguous along K.  Storage dtypes, where the program does not annotate them:

| item                                | dtype                             |
|-------------------------------------|-----------------------------------|
| tile or row parameter, tile output  | the matmul's                      |
| col parameter, reduction            | f32                               |
| scalar                              | a number; f32 in a backward       |
| cotangent, saved value, gradient    | that of the value it belongs to   |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs

from codalang.autodiff import Derivative
from codalang.ir.epilogue import Epilogue, Output, Param
from codalang.ir.ops import OPS
from codalang.ir.types import Kind
from codalang.lower.plan import choose
from codalang.lower.spec import KernelSpec, Operand, loaded_params

DTYPES = ("bf16", "f16")
FLOATS = (*DTYPES, "f32")


def forward_spec(epilogue: Epilogue, dtype: str, rows: int, columns: int, depth: int) -> KernelSpec:
    """The kernel of an epilogue on a GEMM whose accumulator is rows x columns, and whose K is `depth`; without an
    accumulator, hosted on plain tensors.

    Raises CodaUnsupportedError where no kernel covers it.
    """
    on_gemm = epilogue.accumulator is not None
    inputs = tuple(param_dtype(p, dtype) for p in loaded_params(epilogue, on_gemm))
    stores = tuple(output_dtype(s, dtype) for s in epilogue.stores)
    vectors = _unless_f32(output_dtype(v, dtype) for v in epilogue.vectors)
    if not on_gemm:
        return KernelSpec(epilogue, None, inputs, stores, None, vector_dtypes=vectors)
    spec = KernelSpec(epilogue, Operand(dtype, "k", "k"), inputs, stores, None, vector_dtypes=vectors)
    return attrs.evolve(spec, config=choose(spec, rows, columns, depth))


def column_step(epilogue: Epilogue) -> int:
    """The columns of the matmul are a multiple of this: every width is whole, and groups divide what they are of."""
    own = epilogue.params[0].type.width if epilogue.accumulator is not None else None
    widths = [(item.type.width, 1) for item in (*epilogue.params, *epilogue.nodes, *epilogue.outputs)]
    groups = [
        (node.type.width, int(node.attr or 1))
        for node in epilogue.nodes
        if node.op in OPS and OPS[node.op].attr == "group"
    ]
    steps = [1]
    for width, group in widths + groups:
        if width is not None:  # columns / own * width is a multiple of the group
            steps.append((group * (own or 1) / width).numerator)
    return math.lcm(*steps)


def backward_spec(derivative: Derivative, dtype: str) -> KernelSpec:
    """The kernel of a derived backward, hosted on its cotangents.

    Raises CodaUnsupportedError where no kernel covers it.
    """
    forward, backward = derivative.forward, derivative.backward
    dtypes = {p.name: param_dtype(p, dtype) for p in forward.params}
    dtypes = {name: "f32" if kind == "number" else kind for name, kind in dtypes.items()}
    dtypes |= {o.name: output_dtype(o, dtype) for o in forward.outputs}
    loaded = {name: dtypes[load.name] for name, load in derivative.loads.items()}
    inputs = tuple(loaded[p.name] for p in loaded_params(backward, False))
    gradients = _gradient_dtypes(derivative, dtypes, dtype)
    stores = tuple(gradients[s.name] for s in backward.stores)
    vectors = _unless_f32(gradients[v.name] for v in backward.vectors)
    return KernelSpec(backward, None, inputs, stores, None, vector_dtypes=vectors)


def _unless_f32(dtypes: Iterable[str]) -> tuple[str, ...]:
    """As `KernelSpec` has them: what is no float is stored as f32."""
    found = tuple(name if name in FLOATS else "f32" for name in dtypes)
    return () if set(found) == {"f32"} else found


def _gradient_dtypes(derivative: Derivative, dtypes: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Each gradient has the dtype of its parameter, that of the accumulator the matmul's; one that several parameters
    share has f32 where they differ."""
    accumulator = derivative.forward.params[0].name
    found: dict[str, str] = {}
    for param, name in derivative.gradients.items():
        if name is not None:
            own = dtype if param == accumulator else dtypes[param]
            found[name] = own if found.get(name, own) == own else "f32"
    return found


def param_dtype(param: Param, dtype: str) -> str:
    """By the table above."""
    if param.dtype is not None:
        narrow = param.dtype == "i64" and param.type.kind in (Kind.TILE, Kind.ROWS)
        return "i32" if narrow else param.dtype
    return {Kind.COL: "f32", Kind.SCALAR: "number"}.get(param.type.kind, dtype)


def output_dtype(output: Output, dtype: str) -> str:
    """By the table above."""
    return output.dtype or (dtype if output.type.kind is Kind.TILE else output.type.dtype.value)
