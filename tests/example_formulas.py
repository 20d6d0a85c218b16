"""What the programs of examples/ compute, written again in plain torch: the formulas of their papers, no fusion.

Each function takes the tensors of its program by name and returns the program's results in order.  None shares code
with codalang, and each follows the usual modules of PyTorch and of model repositories rather than the .coda file.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Llama's RMSNorm."""
    return functional.rms_norm(x, (x.shape[-1],), gamma, eps)


def swiglu(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Llama's MLP, by gate_proj, up_proj and down_proj."""
    gate, up = (x @ w.T for w in w_gate_up)
    return (functional.silu(gate) * up) @ w_down.T


def rope(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """The rotary embedding of [T, heads, 2*P] by halves, as transformers' `rotate_half`; `frequency` is [heads, P]."""
    angle = positions[:, None, None] * frequency
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def adjacent(x: Tensor) -> Tensor:
    """Halves of each head of [T, heads, 2*P] -> adjacent pairs, [T, heads * 2*P]."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(1)


# ---- mlp.coda and mlp_gelu.coda --------------------------------------------------------------------------------------


def mlp(y0, x0, w0, w1, w2, g0, eps=1e-5):
    """Residual, RMSNorm, SwiGLU, residual."""
    x1 = x0 + y0 @ w0.T
    return (x1 + swiglu(rms_norm(x1, g0, eps), w1, w2),)


def mlp_gelu(n, x, w1, b1, w2, b2, approximate="none"):
    """GPT-2's feed-forward layer."""
    return (x + functional.linear(functional.gelu(functional.linear(n, w1, b1), approximate=approximate), w2, b2),)


def mlp_gelu_tanh(n, x, w1, b1, w2, b2):
    """The same with the approximation."""
    return mlp_gelu(n, x, w1, b1, w2, b2, approximate="tanh")


# ---- llama_block.coda ------------------------------------------------------------------------------------------------


def queries_keys_values(n, w_q, w_k, w_v, positions, q_frequency, k_frequency):
    """Projections of the normalized stream, rotated; pairs adjacent."""
    q, k = (
        adjacent(rope((n @ w.flatten(0, 2).T).unflatten(1, (w.shape[0], -1)), positions, frequency))
        for w, frequency in ((w_q, q_frequency), (w_k, k_frequency))
    )
    return q, k, n @ w_v.T


def feed_forward(y, x, w_o, g_mlp, w_gate_up, w_down, eps):
    """Output projection and MLP."""
    x1 = x + y @ w_o.T
    return x1 + swiglu(rms_norm(x1, g_mlp, eps), w_gate_up, w_down)


def llama_first(x, g_attention, w_q, w_k, w_v, positions, q_frequency, k_frequency, eps=1e-5):
    """The first queries, keys and values."""
    n = rms_norm(x, g_attention, eps)
    return queries_keys_values(n, w_q, w_k, w_v, positions, q_frequency, k_frequency)


def llama_block(
    y, x, w_o, g_mlp, w_gate_up, w_down, g_attention, w_q, w_k, w_v, positions, q_frequency, k_frequency, eps=1e-5
):
    """What lies between two attentions."""
    x2 = feed_forward(y, x, w_o, g_mlp, w_gate_up, w_down, eps)
    n = rms_norm(x2, g_attention, eps)
    return x2, *queries_keys_values(n, w_q, w_k, w_v, positions, q_frequency, k_frequency)


def llama_block_fused(y, x, w_o, g_mlp, w_gate_up, w_down, g_attention, w_qkv, positions, frequency, eps=1e-5):
    """The same with one weight of adjacent pairs, and one frequency for each pair."""
    x2 = feed_forward(y, x, w_o, g_mlp, w_gate_up, w_down, eps)
    z = rms_norm(x2, g_attention, eps) @ w_qkv.T
    turned = torch.view_as_complex(z.unflatten(1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(frequency), positions[:, None] * frequency)
    return x2, torch.view_as_real(turned).flatten(1)


def llama_last(y, x, w_o, g_mlp, w_gate_up, w_down, g_final, eps=1e-5):
    """The final norm's row, before its row factor, and that factor."""
    x2 = feed_forward(y, x, w_o, g_mlp, w_gate_up, w_down, eps)
    return x2 * g_final, (x2.square().mean(1) + eps) ** -0.5


# ---- lm_head_cross_entropy.coda --------------------------------------------------------------------------------------


def cross_entropy(reduction):
    """torch's cross entropy of stored logits."""

    def loss(h, r, w, target, smoothing=0.0, ignore_index=-100):
        logits = (h * r[:, None]) @ w.T
        return (
            functional.cross_entropy(
                logits, target, label_smoothing=smoothing, ignore_index=int(ignore_index), reduction=reduction
            ),
        )

    return loss


# ---- adaln_block.coda ------------------------------------------------------------------------------------------------


def modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """DiT's modulated LayerNorm of [B, S, D]."""
    return functional.layer_norm(x, (x.shape[-1],), eps=eps) * (1 + scale[:, None]) + shift[:, None]


def adaln_block(
    y, x, w_o, b_o, gate_1, scale_2, shift_2, w_1, b_1, w_2, b_2, gate_2, scale_3, shift_3, w_qkv, b_qkv, eps=1e-6
):
    """A DiT block between two attentions."""
    linear = functional.linear
    x1 = x + gate_1[:, None] * linear(y, w_o, b_o)
    hidden = functional.gelu(linear(modulate(x1, scale_2, shift_2, eps), w_1, b_1), approximate="tanh")
    x2 = x1 + gate_2[:, None] * linear(hidden, w_2, b_2)
    return x2, linear(modulate(x2, scale_3, shift_3, eps), w_qkv, b_qkv)
