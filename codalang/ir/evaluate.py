"""Values of nodes as torch tensors: what every op means.

Tensors have the shape of their kind (see `reference`), so torch's broadcasting is the language's, and `even`, `odd`,
`join` and the group ops act on the last axis.  Everything is torch ops, hence differentiable by torch.autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.ir.epilogue import Node
from codalang.ir.ops import OPS
from codalang.ir.states import Function
from codalang.ir.types import Dtype

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}


@attrs.frozen
class Context:
    """What values depend on beside their operands.

    Attributes:
        dtype: what floats are computed in; indices are int32.
        device: of literals and indices.
        rows, columns: the part of the output, in units of (M, N), that is evaluated.
        samples: the rows of each sample of the whole output, where there are samples.
    """

    dtype: torch.dtype = torch.float64
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    rows: range = range(0)
    columns: range = range(0)
    samples: tuple[range, ...] = ()

    def torch_dtype(self, dtype: Dtype) -> torch.dtype:
        """What torch computes a register dtype in."""
        return {Dtype.F32: self.dtype, Dtype.I32: torch.int32, Dtype.BOOL: torch.bool}[dtype]


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Interleave columns: a's become the even ones, b's the odd ones."""
    pair = torch.stack(torch.broadcast_tensors(a, b), dim=-1)
    return pair.reshape(*pair.shape[:-2], 2 * pair.shape[-2])


class _Rounded(torch.autograd.Function):
    """Rounding to a storage dtype and back; its derivative is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _grouped(x: Tensor, group: int, fold: Callable[[Tensor], Tensor]) -> Tensor:
    """Fold groups of adjacent columns; every column gets its group's result."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return fold(groups).expand(groups.shape).reshape(x.shape)


# Called with the operands, and with the attribute where the op has one.
OP_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
    "min": torch.minimum,
    "max": torch.maximum,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": torch.pow,
    "cast": lambda x, dtype: _Rounded.apply(x, TORCH_DTYPES[dtype]),
    "group_sum": lambda x, group: _grouped(x, group, lambda groups: groups.sum(-1, keepdim=True)),
    "group_max": lambda x, group: _grouped(x, group, lambda groups: groups.amax(-1, keepdim=True)),
    "stop_gradient": Tensor.detach,
    "even": lambda x: x[..., 0::2],
    "odd": lambda x: x[..., 1::2],
    "join": _join,
}


# Called with the context and the operands: what depends on where the tile is, or on what is computed in.
CONTEXT_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "row_index": lambda context: _count(context.rows, context).unsqueeze(1),
    "col_index": lambda context: _count(context.columns, context),
    "float": lambda context, x: x.to(context.dtype),
}


def _count(along: range, context: Context) -> Tensor:
    return torch.arange(along.start, along.stop, dtype=torch.int32, device=context.device)


def evaluate_node(node: Node, operands: Sequence[Tensor], context: Context) -> Tensor:
    """The value of a node that is no parameter."""
    if node.op == "const":
        return torch.tensor(node.attr, dtype=context.torch_dtype(node.type.dtype), device=context.device)
    if node.op in CONTEXT_FUNCTIONS:
        return CONTEXT_FUNCTIONS[node.op](context, *operands)
    attribute = () if OPS[node.op].attr is None else (node.attr,)
    return OP_FUNCTIONS[node.op](*operands, *attribute)


def evaluate_nodes(
    nodes: Sequence[Node], roots: Sequence[int], values: Mapping[str, Tensor], context: Context
) -> list[Tensor]:
    """The value of each root, in order, from those of the parameters by name.

    A value is dropped after its last use, so that long programs fit.
    """
    uses = Counter([arg for node in nodes for arg in node.args] + list(roots))
    results: dict[int, Tensor] = {}
    for index, node in enumerate(nodes):
        if node.op == "param":
            results[index] = values[str(node.attr)]
        else:
            results[index] = evaluate_node(node, [results[a] for a in node.args], context)
        for arg in node.args:
            uses[arg] -= 1
            if not uses[arg]:
                results.pop(arg, None)
    return [results[root] for root in roots]


def evaluate_function(function: Function, values: Sequence[Tensor], context: Context) -> list[Tensor]:
    """The results of a function of scalars, elementwise on tensors that broadcast: one for each parameter, in order."""
    named = {name: value for (name, _), value in zip(function.params, values, strict=True)}
    return evaluate_nodes(function.nodes, function.results, named, context)
