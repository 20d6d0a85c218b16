"""Small moves between registers and memory, shared by the kernels.

Registers are f32 tuples; memory holds a storage dtype.  Addresses in shared memory are integers, so that the swizzle
can be computed by hand where it costs one instruction.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cutlass_dsl import select_

from codalang.lower.device import Registers

CUTE_DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "f32": cutlass.Float32}


WIDEST_ACCESS = 16  # bytes


def _vector(dtype: Any, address: Any, count: int, space: cute.AddressSpace) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, space, assumed_align=min(WIDEST_ACCESS, count * dtype.width // 8))
    return cute.make_tensor(pointer, cute.make_layout(count))


def load(dtype: Any, address: Any, count: int, space: cute.AddressSpace) -> Registers:
    """`count` adjacent elements, widened to f32, by the widest accesses.

    The address must be a multiple of the whole size, or of 16 bytes where that is more.
    """
    fragment = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(_vector(dtype, address, count, space), fragment)
    return tuple(fragment[i].to(Float32) for i in range(count))


def store(dtype: Any, address: Any, values: Registers, space: cute.AddressSpace) -> None:
    """Round `values` to the storage dtype and write them; the address as in `load`."""
    fragment = cute.make_rmem_tensor((len(values),), dtype)
    for i, value in enumerate(values):
        fragment[i] = Float32(value).to(dtype)
    cute.autovec_copy(fragment, _vector(dtype, address, len(values), space))


def load_shared(dtype: Any, address: Any, count: int) -> Registers:
    """See `load`."""
    return load(dtype, address, count, cute.AddressSpace.smem)


def store_shared(dtype: Any, address: Any, values: Registers) -> None:
    """See `store`."""
    store(dtype, address, values, cute.AddressSpace.smem)


def broadcast(value: Registers, lanes: int) -> Registers:
    """A value on `lanes` registers: a single register stands for all."""
    return tuple(value[i if len(value) > 1 else 0] for i in range(lanes))


def masked(value: Any, valid: Boolean) -> Float32:
    """The value where valid, else 0: what padding must add to a sum."""
    return select_(valid, Float32(value), Float32(0.0))


def fold_lanes(value: Float32, offsets: tuple[int, ...]) -> Float32:
    """Sum over the lanes that differ in the given bits (a butterfly: every lane gets the sum)."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


def minimum(a: Any, b: Any) -> Int32:
    """min of two integers, at least one of them dynamic."""
    return select_(a < b, Int32(a), Int32(b))


@cute.jit
def store_if(valid: Boolean, tensor: cute.Tensor, row: Int32, column: Int32, value: Any) -> None:
    """tensor[row, column] = value where valid."""
    if valid:
        tensor[row, column] = value
