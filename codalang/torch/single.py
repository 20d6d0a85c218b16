"""An epilogue on its own as a program of one statement: calls of either run, and are differentiated, in one way.

epilogue swiglu(acc: tile[M, N]) { ... store y }

on a GEMM       program call_swiglu(a: [M, K], w: [N, K]) { y = swiglu(a @ w.T)   return y }
hosted          program call_swiglu(acc: [M, N])          { y = swiglu(acc)       return y }
"""

from __future__ import annotations

from codalang.ir.dims import Dim
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import Namer
from codalang.ir.program import Apply, Matmul, Program, ProgramParam, TensorType
from codalang.ir.types import Kind, ValueType


def single(epilogue: Epilogue, on_gemm: bool) -> Program:
    """The program whose results are the epilogue's outputs.

    Its parameters are A and B in place of the accumulator, where it is `on_gemm`; then those of the epilogue; then, for
    each dimension that none of them has, a vector of that length which nothing reads.
    """
    namer = Namer(epilogue.dims)
    m, n, *_ = dims = [Dim.of(name) for name in epilogue.dims]
    k = Dim.of(namer.fresh("K"))

    def shape(type_: ValueType) -> tuple[Dim, ...]:
        rows = dims[2:] if type_.kind is Kind.ROWS else [m] if type_.kind.has_rows else []
        return (*rows, *([n * type_.width] if type_.width is not None else []))

    given = epilogue.params[on_gemm:]
    values = {p.name: namer.fresh(p.name) for p in given}
    params = [ProgramParam(values[p.name], TensorType(shape(p.type), p.type.dtype), p.dtype, loc=p.loc) for p in given]
    inputs = [(p.name, values[p.name]) for p in given]
    host: Matmul | str | None = None
    if on_gemm:
        host = Matmul(namer.fresh("a"), namer.fresh("w"), b_transposed=True)
        columns = shape(epilogue.params[0].type)[1]
        params = [ProgramParam(host.a, TensorType((m, k))), ProgramParam(host.b, TensorType((columns, k))), *params]
    elif epilogue.accumulator is not None:
        host = inputs.pop(0)[1]
    have = {name for p in params for extent in p.type.shape for name in extent.names}
    params += [ProgramParam(namer.fresh("along"), TensorType((dim,))) for dim in dims if not dim.names <= have]
    results = tuple(namer.fresh(output.name) for output in epilogue.outputs)
    statement = Apply(results, epilogue, host, tuple(inputs), tuple(dims), epilogue.loc)
    return Program(f"call_{epilogue.name}", tuple(params), (statement,), results, epilogue.loc)
