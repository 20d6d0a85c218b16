"""What decides a kernel's machine code, as plain frozen data.

    KernelSpec = epilogue, host, operand dtype and majors, storage dtypes, Config

Two calls with equal specs run the same kernel; the spec is the compile cache's key.  Shapes are not in it: M, N, K
and the strides are arguments of the compiled kernel.

Widths here are *relative to the accumulator*: where a derived backward's accumulator is the half-wide cotangent, a
full-width tile has relative width 2.
"""

from __future__ import annotations

from fractions import Fraction

import attrs

from codalang.errors import CodaUnsupportedError
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue, Output, Param, Reduce, State, Store
from codalang.ir.types import Dtype, Kind, ValueType

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "bool": 1}
K_TILE = 64  # elements of K per stage of a GEMM's ring: one 128-byte swizzle row of a 16-bit dtype
SLAB_ROWS = 16  # rows of one warp in a 64-row block of the accumulator: of what it moves of a tile at a time

# The relative widths that the register layout of two adjacent columns per thread can hold.
RELATIVE_WIDTHS = (Fraction(1, 2), Fraction(1), Fraction(2))


@attrs.frozen
class Config:
    """How a GEMM kernel is tiled and scheduled; chosen by `plan.choose`.

    Attributes:
        tile: rows and columns of the accumulator tile of one CTA.
        cluster: CTAs that share operands by TMA multicast, along M and N.
        ping_pong: two consumer warpgroups alternate tiles; otherwise they share one.
        stages: depth of the A/B ring.
        subtile: accumulator columns that the epilogue handles at a time.
        load_stages: sub-tiles of tile inputs in flight per warp (0 where there are none); it divides `steps`.
        store_stages: sub-tiles of tile outputs in flight per warp (0 where there are none); it divides `steps`.
        raster: clusters of one group along N, for L2 locality.
        split: parts of K that are multiplied apart and added by the last that is done; see `gather`.
        balanced: the tiles of the last wave are divided along K among all multiprocessors; see `balance`.
        a_rows: rows of A that are loaded for a tile, where M has no more: TMA takes longer for a row outside than for
            one inside.  0: all.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    ping_pong: bool
    stages: int
    subtile: int
    load_stages: int
    store_stages: int
    raster: int = 8
    split: int = 1
    a_rows: int = 0
    balanced: bool = False

    @property
    def steps(self) -> int:
        """Sub-tiles, of 16 rows each, that a warp takes of a tile one after the other."""
        return self.tile[0] // (64 if self.ping_pong else 128) * (self.tile[1] // self.subtile)

    @property
    def is_in_step(self) -> bool:
        """Every tile begins at the first slab of each ring, as a kernel takes for granted: else it would take one that
        the tile before is still storing, or would not wait for what it loads."""
        return all(self.steps % stages == 0 for stages in (self.load_stages, self.store_stages) if stages)

    @property
    def gathers(self) -> bool:
        """Tiles may come in parts: the kernel has a workspace and counters."""
        return self.split > 1 or self.balanced


@attrs.frozen
class Folding:
    """How a matrix lies in a tensor of more dimensions: its row index is the row-major flattening of the leading ones,
    its column index of the others.  Extents of all but the outermost are part of the kernel, since TMA takes boxes.

    Attributes:
        rows, columns: extents of the dimensions inside the outermost, outside in; none where it is the only one.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


PLAIN = Folding()


@attrs.frozen
class Operand:
    """Dtype and majors of A [M, K] and B [N, K]: `k` where K is contiguous, `mn` where M (of A) or N (of B) is."""

    dtype: str
    a_major: str
    b_major: str
    a_folding: Folding = PLAIN
    b_folding: Folding = PLAIN


@attrs.frozen
class KernelSpec:
    """One kernel.

    Attributes:
        epilogue: the simplified epilogue.
        operand: A and B of a GEMM-hosted kernel; None for a kernel hosted on plain tensors.
        input_dtypes: storage dtype of each input in parameter order, without the accumulator of a GEMM; a scalar that
            is passed as a number has dtype `number`.
        output_dtypes: storage dtype of each store, in order; reductions write f32 partials.
        config: the GEMM's configuration; None for a hosted kernel.
        aligned: hosted kernels only: every row starts on a 16-byte boundary, so that vectors may be used.
        merge: the kernel merges the partials of this element of `folds`, and does nothing else.
        input_foldings, output_foldings: of each input and store, in order; empty where all are plain.
        overlap: the kernel starts while the one before it in the stream ends, and waits for its end before it touches
            global memory; see `sm90`.
        parts: the kernel is that of an auxiliary step: for each input how the parts that it comes in are merged (sum,
            max, min), empty where it is whole; None for the other kernels.
        vector_dtypes: storage dtype of each row, col or scalar that is stored, in order; empty where all are f32.
    """

    epilogue: Epilogue
    operand: Operand | None
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    config: Config | None
    aligned: bool = True
    merge: int | None = None
    input_foldings: tuple[Folding, ...] = ()
    output_foldings: tuple[Folding, ...] = ()
    overlap: bool = False
    parts: tuple[str, ...] | None = None
    vector_dtypes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[tuple[Param, str], ...]:
        """Loaded parameters with their storage dtypes."""
        return tuple(zip(loaded_params(self.epilogue, self.operand is not None), self.input_dtypes, strict=True))

    @property
    def stores(self) -> tuple[tuple[Store, str], ...]:
        """Tile outputs with their storage dtypes."""
        return tuple(zip(self.epilogue.stores, self.output_dtypes, strict=True))

    @property
    def vectors(self) -> tuple[tuple[Store, str], ...]:
        """The other stores with their storage dtypes."""
        stored = self.epilogue.vectors
        return tuple(zip(stored, self.vector_dtypes or ("f32",) * len(stored), strict=True))


def foldings_fit(spec: KernelSpec, tile: tuple[int, int], cluster: tuple[int, int]) -> bool:
    """Whether each piece that TMA moves of a folded matrix is a box."""
    operand = spec.operand
    if operand is None:
        return True
    pieces = [(f.rows, SLAB_ROWS) for f in (*spec.input_foldings, *spec.output_foldings)]
    for folding, extent, sharers in (
        (operand.a_folding, tile[0], cluster[1]),
        (operand.b_folding, tile[1], cluster[0]),
    ):
        pieces += [(folding.rows, extent), (folding.rows, extent // sharers), (folding.columns, K_TILE)]
    return all(_is_box(inner, extent) for inner, extent in pieces)


def _is_box(inner: tuple[int, ...], extent: int) -> bool:
    """Whether `extent` rows in a row, from a multiple of it on, are a box of dimensions with such inner extents."""
    for dimension in reversed(inner):
        if extent % dimension:
            return dimension % extent == 0
        extent //= dimension
    return True


def loaded_params(epilogue: Epilogue, on_gemm: bool) -> tuple[Param, ...]:
    """The parameters a kernel loads: all but the accumulator that a GEMM computes, and but those never used."""
    used = {node.attr for node in epilogue.nodes if node.op == "param"}
    params = epilogue.params[1:] if on_gemm else epilogue.params
    return tuple(p for p in params if p.name in used)


def base_width(epilogue: Epilogue) -> Fraction:
    """The width of the tile that hosts the epilogue: the accumulator's, or 1 where there is none."""
    accumulator = epilogue.accumulator
    return accumulator.type.width or Fraction(1) if accumulator else Fraction(1)


def relative_width(epilogue: Epilogue, item: Param | Output) -> Fraction:
    """An input's or output's width in units of the accumulator's.

    Raises CodaUnsupportedError where the register layout has no place for it.
    """
    width = item.type.width if isinstance(item, Param) else epilogue.domain_width(item)
    relative = (width or base_width(epilogue)) / base_width(epilogue)
    if relative not in RELATIVE_WIDTHS:
        raise CodaUnsupportedError(
            f"`{item.name}` is {relative} times as wide as the accumulator of `{epilogue.name}`; kernels cover 1/2, 1 "
            "and 2",
            item.loc,
            hint="kernels hold half, as many or twice as many columns beside the accumulator's; an epilogue, or a "
            "derived backward, that mixes N/2 with 2*N runs on the reference",
        )
    return relative


def merge_spec(output: Reduce | State, precise: bool = False) -> KernelSpec:
    """The kernel that merges the partials of a reduction: the same for every epilogue that has it."""
    is_scalar = output.type.kind is Kind.SCALAR
    result = ValueType(Kind.SCALAR) if is_scalar else ValueType(Kind.ROW, Fraction(1))
    if isinstance(output, Reduce):
        builder = EpilogueBuilder(f"merge_{output.how}", ("M", "N"))
        builder.reduce("merged", builder.param("x", ValueType(Kind.TILE, Fraction(1)), "f32"), result, output.how)
        return KernelSpec(builder.finish(), None, ("f32",), (), None, merge=0)
    definition = output.definition
    builder = EpilogueBuilder(f"merge_{definition.name}", ("M", "N"))
    builder.precise = precise
    storage = {Dtype.F32: "f32", Dtype.I32: "i32", Dtype.BOOL: "bool"}
    inputs = [storage[dtype] for _, dtype in definition.inputs]
    values = [
        builder.param(name, ValueType(Kind.TILE, Fraction(1), dtype), annotated)
        for (name, dtype), annotated in zip(definition.inputs, inputs, strict=True)
    ]
    builder.state([name for name, _ in definition.results], values, result, definition)
    return KernelSpec(builder.finish(), None, tuple(inputs), (), None, merge=0)


def folds(epilogue: Epilogue) -> tuple[tuple[Reduce | State, ...], ...]:
    """The reductions that a kernel makes, each with the outputs that it gives: results of one transform go together."""
    groups: dict[object, list[Reduce | State]] = {}
    for output in epilogue.outputs:
        if isinstance(output, Reduce):
            groups[output.name] = [output]
        elif isinstance(output, State):
            key = (output.definition, output.values, output.type.kind, output.type.width)
            groups.setdefault(key, []).append(output)
    return tuple(tuple(group) for group in groups.values())
