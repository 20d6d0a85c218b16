"""What derived gradients are compared with: torch.autograd over the reference, and a bound on rounding errors.

A gradient is a sum of contributions, one per path from an output to the parameter and per element that a broadcast
repeats.  Two exact-arithmetic-equal ways to compute it differ by rounding in proportion to the sum of the *absolute*
contributions, not to the gradient, which may cancel to nothing.  `absolute_contributions` computes that sum for each
element of each parameter: reverse mode with every cotangent and every local derivative replaced by its absolute
value.  It is written on torch's own local derivatives and shares nothing with the pass that is tested.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codalang.autodiff import Derivative
from codalang.ir import reference
from codalang.ir.bind import Call, bind
from codalang.ir.epilogue import Epilogue, Node, Output, Reduce, State, Store
from codalang.ir.evaluate import Context, evaluate_function, evaluate_node
from codalang.ir.fold import contribution
from codalang.ir.types import Dtype, Kind

Tensors = dict[str, Tensor]
Extents = tuple[int, ...]


def autograd(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    extents: Extents,
    dtype: torch.dtype = torch.float64,
) -> Tensors:
    """The gradient of every parameter by torch.autograd; zeros where none flows.  A missing cotangent is zero.

    In a dtype of 16 bits this is what PyTorch does in eager mode: the result of every op is rounded.
    """
    leaves = {name: as_leaf(value) for name, value in inputs.items()}
    outputs = reference.run(epilogue, leaves, dtype=dtype, extents=extents)
    chosen = [name for name in outputs if name in cotangents and outputs[name].requires_grad]
    gradients = {name: torch.zeros_like(value) for name, value in inputs.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if chosen and wanted:
        found = torch.autograd.grad(
            [outputs[name] for name in chosen],
            list(wanted.values()),
            [cotangents[name] for name in chosen],
            allow_unused=True,
        )
        gradients |= {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}
    return gradients


def as_leaf(value: Tensor) -> Tensor:
    """A copy that requires a gradient, where it is of floats."""
    return value.detach().clone().requires_grad_(value.is_floating_point())


def backward_inputs(
    derivative: Derivative, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], extents: Extents
) -> Tensors:
    """What the backward declares that it loads, and nothing else."""
    stored = reference.run(derivative.forward, inputs, extents=extents)
    sources = {"param": inputs, "output": stored, "saved": stored, "cotangent": cotangents}
    assert list(derivative.loads) == [p.name for p in derivative.backward.params]
    return {name: sources[load.source][load.name] for name, load in derivative.loads.items()}


def derived(
    derivative: Derivative, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], extents: Extents
) -> Tensors:
    """The gradient of every parameter asked for by the derived backward; zeros where it says that there is none."""
    loaded = backward_inputs(derivative, inputs, cotangents, extents)
    results = reference.run(derivative.backward, loaded, extents=extents)
    return {
        name: torch.zeros_like(inputs[name]) if output is None else results[output]
        for name, output in derivative.gradients.items()
    }


def absolute_contributions(
    epilogue: Epilogue,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    extents: Extents,
) -> Tensors:
    """For each parameter, elementwise, the sum of the absolute contributions to its gradient."""
    rows, columns = extents[:2]
    call = bind(epilogue, inputs, torch.float64, extents)
    values = _values(epilogue, call)
    # Per node [M, w*N], or [M, 1] summed over the columns for what has none.
    totals = [torch.zeros(rows, _columns(node, columns), dtype=torch.float64) for node in epilogue.nodes]
    for output in epilogue.outputs:
        if output.name in cotangents:
            for value, wide in _seeds(epilogue, output, values, cotangents[output.name], call.whole):
                totals[value] += _folded(epilogue.nodes[value], wide)
    result = {name: torch.zeros_like(value) for name, value in inputs.items()}
    for index in reversed(range(len(epilogue.nodes))):
        node = epilogue.nodes[index]
        if node.type.dtype is not Dtype.F32:
            continue
        if node.op == "param":
            total = totals[index] if node.type.kind.has_rows else totals[index].sum(0)
            if node.type.kind is Kind.ROWS:
                total = total.unflatten(0, (len(call.whole.samples), -1)).sum(1)
            result[str(node.attr)] = total.reshape(inputs[str(node.attr)].shape)
        elif node.op != "const":
            for arg, part in zip(node.args, _parts(epilogue, node, values, totals[index], call.whole), strict=True):
                if part is not None:
                    totals[arg] += _folded(epilogue.nodes[arg], part)
    return result


def _values(epilogue: Epilogue, call: Call) -> list[Tensor]:
    """The value of every node, in the shape of its kind."""
    values: list[Tensor] = []
    for node in epilogue.nodes:
        if node.op == "param":
            values.append(call.values[str(node.attr)])
        else:
            values.append(evaluate_node(node, [values[a] for a in node.args], call.whole))
    return values


def _seeds(
    epilogue: Epilogue, output: Output, values: list[Tensor], cotangent: Tensor, context: Context
) -> list[tuple[int, Tensor]]:
    """|derivative of an output| * |its cotangent|, on the output's whole domain, for each value that it is made of."""
    shape = (len(context.rows), int(epilogue.domain_width(output) * len(context.columns)))
    operands = [values[v].expand(shape).clone() for v in output.values]
    wanted = {
        value: operand.requires_grad_()
        for value, operand in zip(output.values, operands, strict=True)
        if operand.is_floating_point()
    }
    kind = output.type.kind
    if isinstance(output, Store):
        first = operands[0] if kind.has_rows else operands[0][0]
        result = first if kind.has_columns else first[..., 0]
    elif isinstance(output, Reduce):
        (result,) = contribution(output, operands, context)
    else:
        carried = contribution(output, operands, context)
        result = evaluate_function(output.definition.finalize, carried, context)[output.result]
    if not result.requires_grad:
        return []
    found = torch.autograd.grad(result, list(wanted.values()), cotangent.abs(), allow_unused=True)
    # What a `vjp` subtracts before it multiplies is of the order of its inputs, which are of the order of 1.
    floor = _wide(cotangent, kind, context, shape).abs() if isinstance(output, State) else 0.0
    return [(value, grad.abs() + floor) for value, grad in zip(wanted, found, strict=True) if grad is not None]


def _wide(cotangent: Tensor, kind: Kind, context: Context, shape: tuple[int, int]) -> Tensor:
    if kind is Kind.ROWS:
        return cotangent.repeat_interleave(len(context.rows) // len(context.samples), 0)
    return (cotangent.unsqueeze(1) if kind is Kind.COL else cotangent).expand(shape)


def _parts(
    epilogue: Epilogue, node: Node, values: list[Tensor], total: Tensor, context: Context
) -> list[Tensor | None]:
    """|local derivative| * total for each operand, on the operation's whole domain."""
    rows, columns = total.shape
    columns = {"even": 2 * columns, "odd": 2 * columns, "join": columns // 2}.get(node.op, columns)
    operands = [as_leaf(values[arg].expand(rows, columns)) for arg in node.args]
    wanted = [o for o in operands if o.requires_grad]
    result = evaluate_node(node, operands, context)
    if not result.requires_grad:
        return [None] * len(operands)
    found = iter(torch.autograd.grad(result, wanted, total))
    return [next(found).abs() if o.requires_grad else None for o in operands]


def _columns(node: Node, columns: int) -> int:
    return 1 if node.type.width is None else int(node.type.width * columns)


def _folded(node: Node, part: Tensor) -> Tensor:
    """What has no columns gets the sum over them."""
    return part if node.type.width is not None else part.sum(1, keepdim=True)


def assert_within(actual: Tensor, expected: Tensor, scale: Tensor, relative: float, what: str) -> None:
    """|actual - expected| <= relative * scale, elementwise; NaN must meet NaN."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN at other places than expected"
    error = (actual - expected).nan_to_num(nan=0.0).abs()
    allowed = relative * scale.nan_to_num(nan=0.0)
    worst = (error - allowed).max() if error.numel() else torch.zeros(())
    assert worst <= 0, f"{what}: off by {error.max():.3e} where {allowed.min():.3e} to {allowed.max():.3e} is allowed"
