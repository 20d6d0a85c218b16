"""What a program moves: the type, storage and bytes of each value, and what each statement loads, stores, multiplies.

Extents stay polynomials of dimension names until sizes are given, so bytes are polynomials, too.

| value                                    | is stored in                                             |
|------------------------------------------|----------------------------------------------------------|
| parameter without annotation             | the matmul's dtype; f32 where it is read as a col        |
| result tile of an epilogue, and a matmul | its annotation, or the dtype of A (hosted: of the host)  |
| reduction, vector, scalar                | its annotation, or f32                                   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue, Output, Reduce, State, Store
from codalang.ir.graph_text import GraphText
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Product, Program, Statement, TensorType, Vector
from codalang.ir.types import Dtype, Kind
from codalang.lower.spec import DTYPE_BYTES

NOTHING = Dim()
_LONG = 24  # nodes of an expression that is not written out
# What a kernel does besides its matmul, in the order in which it is told.
PRIMITIVES = ("map", "tile load", "vector load", "tile store", "vector store", "tile reduction", "stateful transform")


@attrs.frozen
class Stored:
    """A value of a program: its type, the dtype that it is stored in, and its bytes."""

    name: str
    type: TensorType
    dtype: str

    @property
    def bytes(self) -> Dim:
        """As a polynomial of the program's dimension names."""
        return self.type.vector * DTYPE_BYTES[self.dtype]

    @property
    def is_large(self) -> bool:
        """True for a matrix: everything else is small beside one."""
        return self.type.matrix is not None


@attrs.frozen
class Work:
    """What one statement does.

    Attributes:
        kind: `matmul` (with or without an epilogue), `hosted` (an epilogue on plain tensors) or `vector`.
        epilogue: the epilogue's name; of a vector step the kind of step; None for a matmul alone.
        host: the matmul as it is written, the host tensor's name, or None.
        extents: M, N, K of the matmul, M, N of what is hosted, the length of vectors.
        operations: multiplications and additions of the matmul.
        operands: of the matmul.
        loads, stores: values by name, each once; the host tensor of a hosted epilogue is a load.
        primitives: how often the epilogue does each kind of work.
    """

    kind: str
    epilogue: str | None
    host: str | None
    extents: tuple[Dim, ...]
    operations: Dim
    operands: tuple[str, ...]
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    primitives: Mapping[str, int]


def values(program: Program, dtype: str, dtypes: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """Each value of a program by name.

    Args:
        program: any program.
        dtype: of tensors without an annotation.
        dtypes: storage dtypes of parameters that are known otherwise.
    """
    columns = _columns(program)
    found: dict[str, Stored] = {}
    for param in program.params:
        usual = "f32" if not param.type.shape or param.name in columns else dtype
        found[param.name] = Stored(param.name, param.type, param.dtype or (dtypes or {}).get(param.name, usual))
    for statement in program.statements:
        for stored in _made(statement, found):
            found[stored.name] = stored
    return found


def _columns(program: Program) -> set[str]:
    """The parameters that are read as one number for each row."""
    read: set[str] = set()
    for statement in program.statements:
        if isinstance(statement, Apply):
            kinds = {p.name: p.type.kind for p in statement.epilogue.params}
            read |= {value for name, value in statement.inputs if kinds[name] is Kind.COL and isinstance(value, str)}
    return read


def _made(statement: Statement, found: Mapping[str, Stored]) -> Iterator[Stored]:
    """The values that a statement makes."""
    if isinstance(statement, Product):
        a = found[statement.matmul.a]
        yield Stored(statement.result, TensorType(shape(statement.matmul, found)[:2]), a.dtype)
    elif isinstance(statement, Vector):
        (output,) = statement.expression.outputs
        extents = (statement.length,) if output.type.kind.has_columns else ()
        yield Stored(statement.result, TensorType(extents, output.type.dtype), _dtype(output, "f32"))
    else:
        host = statement.host.a if isinstance(statement.host, Matmul) else statement.host
        tiles = found[host].dtype if host is not None else "f32"
        for name, output in zip(statement.results, statement.epilogue.outputs, strict=True):
            if name is not None:
                yield Stored(name, _type(statement, output), _dtype(output, tiles))


def _type(statement: Apply, output: Output) -> TensorType:
    m, n, *samples = statement.extents
    rows = (samples[0] if output.type.kind is Kind.ROWS else m,) if output.type.kind.has_rows else ()
    columns = (n * output.type.width,) if output.type.width is not None else ()
    return TensorType(rows + columns, output.type.dtype)


def _dtype(output: Output, tiles: str) -> str:
    if output.dtype is not None:
        return output.dtype
    if output.type.dtype is not Dtype.F32:
        return output.type.dtype.value
    return tiles if output.type.kind is Kind.TILE else "f32"


def shape(matmul: Matmul, found: Mapping[str, Stored]) -> tuple[Dim, Dim, Dim]:
    """M, N and K of a matmul of these values."""
    a, b = found[matmul.a].type.matrix, found[matmul.b].type.matrix
    assert a is not None and b is not None
    (m, k), n = (a[::-1] if matmul.a_transposed else a), b[0] if matmul.b_transposed else b[1]
    return m, n, k


def work(statement: Statement, found: Mapping[str, Stored]) -> Work:
    """What a statement does, of a program with these values."""
    reads = tuple(dict.fromkeys(name for name in statement.reads if name in found))
    made = statement.makes
    if isinstance(statement, Product):
        m, n, k = shape(statement.matmul, found)
        return Work("matmul", None, str(statement.matmul), (m, n, k), m * n * k * 2, reads, (), made, {})
    if isinstance(statement, Vector):
        (output,) = statement.expression.outputs
        kind = "expression" if isinstance(output, Store) else getattr(output, "how", "state")
        return Work("vector", kind, None, (statement.length,), NOTHING, (), reads, made, {})
    counts = primitives(statement.epilogue)
    name, host = statement.epilogue.name, statement.host
    if isinstance(host, Matmul):
        m, n, k = shape(host, found)
        operands = tuple(dict.fromkeys((host.a, host.b)))
        loads = tuple(dict.fromkeys(v for _, v in statement.inputs if isinstance(v, str)))
        return Work("matmul", name, str(host), (m, n, k), m * n * k * 2, operands, loads, made, counts)
    return Work("hosted", name, host, statement.extents[:2], NOTHING, (), reads, made, counts)


def primitives(epilogue: Epilogue) -> dict[str, int]:
    """How often the body of an epilogue does each of the five kinds of work."""
    counts: Counter[str] = Counter()
    for param in epilogue.params[1:]:
        counts["tile load" if param.type.kind is Kind.TILE else "vector load"] += 1
    for node in epilogue.nodes:
        if node.op not in ("param", "const"):
            counts["map"] += 1
    for output in epilogue.outputs:
        if isinstance(output, Store):
            counts["tile store" if output.type.kind is Kind.TILE else "vector store"] += 1
        else:
            counts["stateful transform" if isinstance(output, State) else "tile reduction"] += 1
    return {name: counts[name] for name in PRIMITIVES if counts[name]}


def show_counts(counts: Mapping[str, int]) -> str:
    """`3 maps, 1 tile load`."""
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())


def text(statement: Statement) -> str:
    """A statement as it is written."""
    if isinstance(statement, Product):
        return f"{statement.result} = {statement.matmul}"
    if isinstance(statement, Vector):
        return f"{statement.result} = {_expression(statement)}"
    made = ", ".join(name or "_" for name in statement.results)
    host = [str(statement.host)] if statement.host is not None else []
    given = [f"{name} = {value}" for name, value in statement.inputs]
    results = made if len(statement.results) == 1 else f"({made})"
    return f"{results} = {statement.epilogue.name}({', '.join(host + given)})"


def _expression(statement: Vector) -> str:
    """On one line, what is used twice written twice; of a long one, what it is of."""
    expression = statement.expression
    (output,) = expression.outputs
    if len(expression.nodes) > _LONG:
        return f"an expression of {', '.join(statement.reads)}"
    nodes = tuple(attrs.evolve(node, hint=None) for node in expression.nodes)
    once = tuple(min(uses, 1) for uses in expression.uses())
    value = GraphText(nodes, once, Namer(statement.reads)).expression(output.values[0])
    return f"{output.how}({value})" if isinstance(output, Reduce) else value


# ---- quantities as text ----------------------------------------------------------------------------------------------


def known(extent: Dim, sizes: Mapping[str, int]) -> int | None:
    """The number that an extent is at these sizes, or None where a name has none."""
    if not extent.names <= sizes.keys():
        return None
    return int(extent.evaluate(sizes))


def show_bytes(amount: Dim, sizes: Mapping[str, int]) -> str:
    """`64 MiB` at sizes that are known, `2*D*T B` else."""
    number = known(amount, sizes)
    return f"{amount} B" if number is None else _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def show_operations(amount: Dim, sizes: Mapping[str, int]) -> str:
    """`275 GFLOP` at sizes that are known, `2*D*H*T FLOP` else."""
    number = known(amount, sizes)
    return f"{amount} FLOP" if number is None else _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def show_extents(extents: tuple[Dim, ...], sizes: Mapping[str, int]) -> str:
    """`8192 x 4096`, or the names that are not known."""
    numbers = [known(extent, sizes) for extent in extents]
    return " x ".join(str(e if n is None else n) for e, n in zip(extents, numbers, strict=True)) or "1"


def _scaled(number: int, step: int, units: tuple[str, ...]) -> str:
    value, unit = float(number), units[0]
    for unit in units:
        if value < step or unit == units[-1]:
            break
        value /= step
    return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.3g} {unit}"
