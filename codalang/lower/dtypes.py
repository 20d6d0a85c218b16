"""Dtypes of a call: what parameters may have in memory, and what outputs are stored in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from codalang.ir.epilogue import Epilogue
from codalang.ir.evaluate import TORCH_DTYPES
from codalang.ir.types import Dtype

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# What a parameter of each register dtype may be in memory.
INPUT_DTYPES = {
    Dtype.F32: DTYPE_NAMES,
    Dtype.I32: {torch.int32: "i32", torch.int64: "i64"},
    Dtype.BOOL: {torch.bool: "bool"},
}
RESULT_DTYPES = {"f32": torch.float32, "i32": torch.int32}


def storage_dtypes(
    epilogue: Epilogue, default: torch.dtype, dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Each output's storage dtype: the call's, else the annotation, else `default` for tiles and f32 for reductions."""
    tiles = {o.name for o in epilogue.stores}
    fallback = {o.name: default if o.name in tiles else RESULT_DTYPES[o.type.dtype.value] for o in epilogue.outputs}
    annotated = {o.name: TORCH_DTYPES[o.dtype] for o in epilogue.outputs if o.dtype}
    return fallback | annotated | dict(dtypes)


def vector_dtypes(epilogue: Epilogue, storage: Mapping[str, torch.dtype]) -> tuple[str, ...]:
    """What kernels store rows, cols and scalars in, as `KernelSpec` has it: other dtypes are cast from f32."""
    found = tuple(DTYPE_NAMES.get(storage[v.name], "f32") for v in epilogue.vectors)
    return () if set(found) == {"f32"} else found
