"""Small moves between registers and memory, shared by the kernels.

Registers are f32 tuples; memory holds a storage dtype.  Addresses in shared memory are integers, so that the swizzle
can be computed by hand where it costs one instruction.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, scf
from cutlass.cutlass_dsl import T

from codalang.lower.blocks import NEUTRAL
from codalang.lower.body import Fold
from codalang.lower.device import DEVICE_OPS, Registers, choose, constant

CUTE_DTYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": Int64,
    "bool": cutlass.Uint8,  # torch's bool is a byte
}


WIDEST_ACCESS = 16  # bytes


def _vector(dtype: Any, address: Any, count: int, space: cute.AddressSpace) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, space, assumed_align=min(WIDEST_ACCESS, count * dtype.width // 8))
    return cute.make_tensor(pointer, cute.make_layout(count))


def widened(value: Any) -> Any:
    """A stored element in its register dtype: f32, i32, or a mask."""
    if isinstance(value, cutlass.Uint8):
        return value != 0
    if isinstance(value, Int64):  # what does not fit must not become the index of some column
        value = choose(value < Int64(_LEAST), Int64(_LEAST), value)
        value = choose(value > Int64(_MOST), Int64(_MOST), value)
    return value.to(Int32 if isinstance(value, Int32 | Int64) else Float32)


_LEAST, _MOST = -(2**31), 2**31 - 1  # of an i32


def as_word(value: Any) -> Any:
    """A register as what shared memory holds of it: f32 and i32 as they are, a mask as 0 or 1."""
    return choose(value, Int32(1), Int32(0)) if isinstance(value, Boolean) else value


def load(dtype: Any, address: Any, count: int, space: cute.AddressSpace) -> Registers:
    """`count` adjacent elements, widened to their register dtype, by the widest accesses.

    The address must be a multiple of the whole size, or of 16 bytes where that is more.
    """
    if dtype is cutlass.BFloat16 and count % 2 == 0:
        words = load(Int32, address, count // 2, space)
        return tuple(value for word in words for value in _widened_pair(word))
    fragment = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(_vector(dtype, address, count, space), fragment)
    return tuple(widened(fragment[i]) for i in range(count))


def _widened_pair(word: Int32) -> Registers:
    """Two bf16 in f32: one instruction each, where the compiler's conversion of the upper one takes two."""
    return tuple(bits.bitcast(Float32) for bits in (word << 16, word & -(1 << 16)))


def store(dtype: Any, address: Any, values: Registers, space: cute.AddressSpace) -> None:
    """Round `values` to the storage dtype and write them; the address as in `load`."""
    fragment = cute.make_rmem_tensor((len(values),), dtype)
    for i, value in enumerate(values):
        fragment[i] = value.to(dtype)
    cute.autovec_copy(fragment, _vector(dtype, address, len(values), space))


def load_shared(dtype: Any, address: Any, count: int) -> Registers:
    """See `load`."""
    return load(dtype, address, count, cute.AddressSpace.smem)


def store_shared(dtype: Any, address: Any, values: Registers) -> None:
    """See `store`."""
    store(dtype, address, values, cute.AddressSpace.smem)


MATRICES = 4  # 8x8 matrices of 16-bit elements that one instruction of the warp moves


def load_matrices(dtype: Any, address: Int32) -> tuple[Registers, ...]:
    """The lane's pair of adjacent columns in each of four 8x8 matrices of 16-bit elements, widened to f32.

    `address` is that of a row of 16 bytes: of row l % 8 in matrix l // 8 for lane l.  The lane gets row l // 4,
    columns 2 * (l % 4) and the next of each: the layout of the accumulator.
    """
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * MATRICES),
        [Int32(address).ir_value()],
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
    )
    if dtype is cutlass.BFloat16:
        return tuple(_widened_pair(Int32(llvm.extractvalue(T.i32(), words, [i]))) for i in range(MATRICES))
    fragment = cute.make_rmem_tensor((2 * MATRICES,), dtype)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in range(MATRICES):
        pairs[i] = Int32(llvm.extractvalue(T.i32(), words, [i]))
    return tuple(tuple(widened(fragment[2 * i + j]) for j in (0, 1)) for i in range(MATRICES))


def packed(dtype: Any, pair: Registers) -> Int32:
    """Two values rounded to a 16-bit storage dtype, in one register: the first in its lower half."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    operands = [value.ir_value() for value in pair]
    return Int32(llvm.inline_asm(T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", has_side_effects=True))


def store_matrices(address: Int32, pairs: tuple[Int32, ...]) -> None:
    """Write four 8x8 matrices of 16-bit elements: `load_matrices` reversed, each lane's pairs `packed`."""
    llvm.inline_asm(
        None,
        [Int32(address).ir_value(), *(pair.ir_value() for pair in pairs)],
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
    )


def storage_words(dtype: Any, values: Registers) -> tuple[Int32, ...]:
    """Values rounded to a floating storage dtype, as memory holds them; an even number where that is of 16 bits."""
    if dtype is cutlass.Float32:
        return tuple(value.bitcast(Int32) for value in values)
    return tuple(packed(dtype, values[i : i + 2]) for i in range(0, len(values), 2))


def store_words_if(valid: Boolean, address: Int64, words: tuple[Int32, ...]) -> None:
    """Write adjacent words to global memory where valid, by the widest accesses: no branch, across which the compiler
    would move nothing."""
    for first in range(0, len(words), WIDEST_ACCESS // 4):
        some = words[first : first + WIDEST_ACCESS // 4]
        names = ", ".join(f"${i + 2}" for i in range(len(some)))
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[len(some)]
        llvm.inline_asm(
            None,
            [Int32(Boolean(valid)).ir_value(), (address + first * 4).ir_value(), *(w.ir_value() for w in some)],
            f"{{ .reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.{kind} [$1], {{{names}}}; }}",
            "r,l," + ",".join("r" * len(some)) + ",~{memory}",
            has_side_effects=True,
        )


def broadcast(value: Registers, lanes: int) -> Registers:
    """A value on `lanes` registers: a single register stands for all."""
    return tuple(value[i if len(value) > 1 else 0] for i in range(lanes))


def fold(fold: Fold, carried: tuple, values: tuple, valid: Any) -> tuple:
    """Fold one element into the carried values where it is valid: padding must not enter a reduction."""
    updated = _plain(fold.update(*_tuples(carried), *_tuples(values)))
    if valid is True:
        return updated
    return tuple(choose(valid, new, old) for new, old in zip(updated, carried, strict=True))


CHAINS = 4  # of a reduction over registers: none waits for the one before it


def reduced(how: str, values: Registers) -> Any:
    """The sum, maximum or minimum of registers, at least one."""
    step = DEVICE_OPS[{"sum": "add"}.get(how, how)]
    chains = [functools.reduce(step, values[i::CHAINS]) for i in range(min(CHAINS, len(values)))]
    return functools.reduce(step, chains)


def fold_block(
    fold: Fold, elements: tuple[Registers, ...], valid: Sequence[Any] | None, lanes: tuple[int, ...]
) -> tuple:
    """What is carried of a block of elements, of those that are valid (None: all); and of the lanes that differ in the
    given bits, if any."""
    assert fold.block is not None
    results: list[Registers] = []
    for how, value in fold.block.passes:
        values = broadcast(value(*elements, *results)[0], len(elements[0]))
        if valid is not None:
            neutral = neutral_of(how, values[0])
            values = tuple(choose(exists, v, neutral) for exists, v in zip(valid, values, strict=True))
        total = reduced(how, values)
        for lane in lanes:
            total = reduced(how, (total, cute.arch.shuffle_sync_bfly(total, lane)))
        results.append((total,))
    return opaque(_plain(fold.block.carried(*results)))


def neutral_of(how: str, like: Any) -> Any:
    """What changes no sum, maximum or minimum, in the dtype of a register."""
    whole = {"sum": 0, "max": _LEAST, "min": _MOST}
    return Int32(whole[how]) if isinstance(like, Int32) else Float32(NEUTRAL[how])


def branch(
    condition: Boolean, dtypes: Sequence[str], then: Callable[[], tuple], otherwise: Callable[[], tuple]
) -> tuple:
    """The registers that one of two functions gives: a real branch, for what all lanes of a warp agree on."""
    kinds = [CUTE_DTYPES[dtype] for dtype in dtypes]
    made = scf.IfOp(Boolean(condition).ir_value(), [kind.mlir_type for kind in kinds], has_else=True)
    for block, function in ((made.then_block, then), (made.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_([kind(value).ir_value() for kind, value in zip(kinds, function(), strict=True)])
    return tuple(kind(result) for kind, result in zip(kinds, made.results, strict=True))


def merge(fold: Fold, a: tuple, b: tuple) -> tuple:
    """The carried values of two parts together."""
    return _plain(fold.merge(*_tuples(a), *_tuples(b)))


def finalize(fold: Fold, carried: tuple) -> tuple:
    """The results."""
    return _plain(fold.finalize(*_tuples(carried)))


def initial(fold: Fold) -> tuple:
    """The carried values of nothing."""
    kinds = {"f32": float, "i32": int}
    return tuple(constant(kinds[dtype](value))[0] for dtype, value in zip(fold.dtypes, fold.initial, strict=True))


def opaque(carried: tuple) -> tuple:
    """The same values, unknown to compiler passes: one of them fails on a scalar that is constant, as of `sum(0)`."""
    kinds = {Float32: (T.f32(), "=f,f"), Int32: (T.i32(), "=r,r")}
    words = [(value, *kinds[type(value)]) for value in carried]
    return tuple(type(v)(llvm.inline_asm(t, [v.ir_value()], "mov.b32 $0, $1;", c)) for v, t, c in words)


def fold_lanes(fold: Fold, carried: tuple, offsets: tuple[int, ...]) -> tuple:
    """Merge the lanes that differ in the given bits (a butterfly: every lane gets the result)."""
    for offset in offsets:
        carried = merge(fold, carried, tuple(cute.arch.shuffle_sync_bfly(c, offset) for c in carried))
    return carried


def spread_lanes(fold: Fold, parts: list[tuple], lane: Int32, bits: tuple[int, ...]) -> tuple[list[tuple], Int32]:
    """`fold_lanes` of several values, each result to some lanes only: what a lane has of them, and of which on.

    For each bit the two lanes halve what they have and exchange the other's half, so that eight values of eight lanes
    take 7 shuffles, not 24.  The number of values must be a power of 2.  The fold must be commutative.
    """
    first = Int32(0)
    for bit in bits:
        half = len(parts) // 2
        if not half:
            parts = [fold_lanes(fold, part, (bit,)) for part in parts]
            continue
        upper = (lane & bit) != 0
        first = first + choose(upper, Int32(half), Int32(0))
        parts = [_exchanged(fold, low, high, upper, bit) for low, high in zip(parts[:half], parts[half:], strict=True)]
    return parts, first


def _exchanged(fold: Fold, low: tuple, high: tuple, upper: Boolean, bit: int) -> tuple:
    """Merged with the other lane: `high` in the upper lane, `low` in the lower."""
    kept = tuple(choose(upper, b, a) for a, b in zip(low, high, strict=True))
    sent = tuple(choose(upper, a, b) for a, b in zip(low, high, strict=True))
    return merge(fold, kept, tuple(cute.arch.shuffle_sync_bfly(value, bit) for value in sent))


def _tuples(values: tuple) -> tuple:
    return tuple((value,) for value in values)


def _plain(results: tuple) -> tuple:
    return tuple(result[0] for result in results)


def choose_whole(condition: Any, a: Any, b: Any) -> Int32:
    """a where the condition holds, else b: two integers."""
    return choose(Boolean(condition), Int32(a), Int32(b))


def minimum(a: Any, b: Any) -> Int32:
    """min of two integers, at least one of them dynamic."""
    return choose(a < b, Int32(a), Int32(b))


@cute.jit
def store_shared_if(valid: Boolean, dtype: cutlass.Constexpr, address: Int32, values: tuple) -> None:
    """`store_shared` where valid."""
    if valid:
        store_shared(dtype, address, values)


@cute.jit
def store_if(valid: Boolean, tensor: cute.Tensor, row: Int32, column: Int32, value: Any) -> None:
    """tensor[row, column] = value, in the tensor's dtype, where valid."""
    if valid:
        tensor[row, column] = value.to(tensor.element_type)
