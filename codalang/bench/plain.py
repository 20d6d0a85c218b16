"""The same work in plain torch, as people write it: what runs eagerly and what torch.compile gets.

Each function takes the matmul's result (or, hosted, the first tile) and the other inputs, and returns the epilogue's
outputs by name.  Tensors are laid out as torch likes them, not as a fused kernel does: gate and up are two halves, and
RoPE's cosines and sines are tables that are made ahead.  `prepared` makes that of a workload's operands, outside what
is timed, and `restored` undoes it in results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from codalang.bench.workloads import Operands, Workload

Tensors = Mapping[str, Tensor]


def plain(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """Nothing."""
    return {"y": acc}


def residual_rms(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """The residual stream, the weighted row, the sum of squares."""
    x = acc + inputs["res"]
    wide = x.float()
    return {"x": x, "h": (wide * inputs["gamma"]).to(x.dtype), "ss": wide.square().sum(-1)}


def swiglu(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """SwiGLU of scaled rows; the pre-activation is a result, too."""
    gate, up = (acc.float() * inputs["r"][:, None]).chunk(2, -1)
    return {"y": (functional.silu(gate) * up).to(acc.dtype), "saved_acc": acc}


def rope(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """Scaled rows; the heads of Q and K rotated in adjacent pairs, V as it is."""
    cos, sin = inputs["cos"], inputs["sin"]
    tokens, pairs = cos.shape[0], cos.shape[-1]
    scaled = acc.float() * inputs["r"][:, None]
    rotated, values = scaled.split(inputs["rotated"].shape[0], -1)
    first, second = rotated.reshape(tokens, -1, pairs, 2).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return {"y": torch.cat([turned.reshape(tokens, -1), values], -1).to(acc.dtype)}


def logsumexp(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """Logsumexp of each row, and the target's logit."""
    logit = acc.gather(-1, inputs["target"][:, None])[:, 0]
    return {"lse": torch.logsumexp(acc.float(), -1), "logit": logit.float()}


def norm_backward(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """Gradient of the residual stream, of which RMSNorm is a part, and of the norm's weight."""
    d_h, x = acc.float(), inputs["x"].float()
    d_acc = inputs["d_x"] + d_h * inputs["gamma"] + 2 * inputs["d_ss"][:, None] * x
    return {"d_acc": d_acc.to(acc.dtype), "d_gamma": (d_h * x).sum(0)}


def swiglu_backward(acc: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """Gradient of SwiGLU of scaled rows, of the scale, and SwiGLU itself."""
    d_y, saved, r = acc.float(), inputs["saved_acc"].float(), inputs["r"][:, None]
    gate, up = (saved * r).chunk(2, -1)
    slope = torch.sigmoid(gate)
    silu = gate * slope
    d_scaled = torch.cat([d_y * up * (slope + silu * (1 - slope)), d_y * silu], -1)
    return {
        "d_acc": (d_scaled * r).to(acc.dtype),
        "d_r": (d_scaled * saved).sum(-1),
        "y": (silu * up).to(acc.dtype),
    }


def layernorm(x: Tensor, inputs: Tensors) -> dict[str, Tensor]:
    """LayerNorm from known statistics."""
    scale = torch.rsqrt(inputs["var"] + inputs["eps"])[:, None]
    y = (x.float() - inputs["mean"][:, None]) * scale * inputs["gamma"] + inputs["beta"]
    return {"y": y.to(x.dtype)}


MATHS: dict[str, Callable[[Tensor, Tensors], dict[str, Tensor]]] = {
    "residual_rms": residual_rms,
    "swiglu": swiglu,
    "rope": rope,
    "logsumexp": logsumexp,
    "norm_backward": norm_backward,
    "swiglu_backward": swiglu_backward,
    "layernorm": layernorm,
}


def maths(workload: Workload) -> Callable[[Tensor, Tensors], dict[str, Tensor]]:
    """The function of a workload."""
    name = workload.pattern.name.removeprefix("hosted_")
    return plain if workload.pattern.group == "gemm" else MATHS[name]


def prepared(workload: Workload, operands: Operands) -> Operands:
    """The operands as torch likes them; see the module's docstring."""
    b, inputs = operands.b, dict(operands.inputs)
    if workload.pattern.name == "swiglu":
        assert b is not None
        b = halves(b, 0)
    if "saved_acc" in inputs:
        inputs["saved_acc"] = halves(inputs["saved_acc"], 1)
    if "frequency" in inputs:
        inputs |= _tables(workload, inputs.pop("position"), inputs.pop("frequency"))
    return Operands(operands.a, b, inputs)


def restored(workload: Workload, results: Tensors) -> dict[str, Tensor]:
    """Results in the order of columns that ours have."""
    paired = ("saved_acc", "d_acc") if "swiglu" in workload.pattern.name else ()
    return {name: pairs(value) if name in paired else value for name, value in results.items()}


def halves(tensor: Tensor, axis: int) -> Tensor:
    """Adjacent pairs along an axis as two halves."""
    return torch.cat([tensor.unflatten(axis, (-1, 2)).select(axis + 1, i) for i in (0, 1)], axis)


def pairs(tensor: Tensor) -> Tensor:
    """Two halves of the columns as adjacent pairs."""
    return torch.stack(tensor.chunk(2, -1), -1).flatten(-2)


def _tables(workload: Workload, position: Tensor, frequency: Tensor) -> dict[str, Tensor]:
    """RoPE's tables [tokens, 1, pairs of a head]; `rotated` has as many elements as Q and K have columns."""
    width = workload.width
    angle = (position.double()[:, None] * frequency[: width.head_size // 2].double())[:, None, :]
    rotated = (width.heads + width.kv_heads) * width.head_size
    return {
        "cos": angle.cos().float(),
        "sin": angle.sin().float(),
        "rotated": torch.empty(rotated, device=position.device),
    }
