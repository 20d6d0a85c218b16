"""The standard library in Python.  `tests/test_builder.py` compares each function with the epilogue of its name."""

from codalang import builder as coda
from codalang.builder import (
    B,
    M,
    N,
    col,
    col_index,
    erf,
    exp,
    group_sum,
    join,
    log,
    online_logsumexp,
    reduce,
    rotate,
    row,
    rsqrt,
    scalar,
    split,
    state,
    store,
    tile,
    welford,
    where,
)

# activations


def positive(x):
    return where(x <= 0, 0, x)


def swish(x):
    return x * coda.sigmoid(x)


def gelu_erf(x):
    return 0.5 * x * (1 + erf(x * 0.7071067811865476))


def gelu_by_tanh(x):
    return 0.5 * x * (1 + coda.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def log_1_plus(u):
    return where(u < 0.001, u * (1 - u * (0.5 - 0.3333333333333333 * u)), log(1 + u))


def at_most(x, high):
    return where(x > high, high, x)


def at_least(x, low):
    return where(x < low, low, x)


def relu(acc: tile[M, N]):
    store("y", positive(acc), tile[M, N])


def relu_squared(acc: tile[M, N]):
    rectified = positive(acc)
    store("y", rectified * rectified)


def silu(acc: tile[M, N]):
    store("y", swish(acc))


def gelu(acc: tile[M, N]):
    store("y", gelu_erf(acc))


def gelu_tanh(acc: tile[M, N]):
    store("y", gelu_by_tanh(acc))


def sigmoid(acc: tile[M, N]):
    store("y", coda.sigmoid(acc))


def tanh(acc: tile[M, N]):
    store("y", coda.tanh(acc))


def softplus(acc: tile[M, N]):
    store("y", coda.max(acc, 0) + log_1_plus(exp(-abs(acc))))


def softcap(acc: tile[M, N], cap: scalar):
    store("y", cap * coda.tanh(acc / cap))


def gated(acc, activation):
    """A helper that stores."""
    gate, up = split(acc)
    store("y", activation(gate) * up, tile[M, N / 2])


def swiglu(acc: tile[M, N]):
    gated(acc, swish)


def geglu(acc: tile[M, N]):
    gated(acc, gelu_erf)


def geglu_tanh(acc: tile[M, N]):
    gated(acc, gelu_by_tanh)


def reglu(acc: tile[M, N]):
    gated(acc, positive)


def glu(acc: tile[M, N]):
    gated(acc, coda.sigmoid)


def swiglu_oai(acc: tile[M, N], bias: row[N], alpha: scalar, limit: scalar):
    gate, up = split(acc + bias)
    g = at_most(gate, limit)
    u = at_most(at_least(up, -limit), limit)
    store("y", g * coda.sigmoid(alpha * g) * (u + 1), tile[M, N // 2])


# biases, residuals, scales


def bias(acc: tile[M, N], bias: row[N]):
    store("y", acc + bias)


def bias_gelu(acc: tile[M, N], bias: row[N]):
    store("y", gelu_erf(acc + bias))


def residual(acc: tile[M, N], res: tile[M, N]):
    store("x", acc + res)


def residual_rms(acc: tile[M, N], res: tile[M, N], gamma: row[N]):
    x = acc + res
    store("x", x)
    store("h", x * gamma)
    reduce("ss", coda.sum(x * x), col[M])


def residual_gate(acc: tile[M, N], res: tile[M, N], gate: row[B, N]):
    x = res + gate * acc
    store("x", x)
    state(("mean", "var"), welford(x), col[M])


def scaled(acc: tile[M, N], r: col[M]):
    store("y", acc * r)


def scaled_swiglu(acc: tile[M, N], r: col[M]):
    gated(acc * r, swish)


def dequant(acc: tile[M, N], token_scale: col[M], channel_scale: row[N]):
    store("y", acc * token_scale * channel_scale)


def amax(acc: tile[M, N]):
    store("y", acc)
    reduce("amax", coda.max(abs(acc)), scalar)


def token_amax(acc: tile[M, N]):
    store("y", acc)
    reduce("amax", coda.max(abs(acc)), col[M])


# norms


def layernorm_stats(acc: tile[M, N], res: tile[M, N]):
    x = acc + res
    store("x", x)
    state(("mean", "var"), welford(x), col[M])


def layernorm_apply(
    x: tile[M, N],
    mean: col[M],
    var: col[M],
    gamma: row[N],
    beta: row[N],
    eps: scalar,
):
    store("y", (x - mean) * rsqrt(var + eps) * gamma + beta)


def adaln_apply(x: tile[M, N], mean: col[M], var: col[M], scale: row[B, N], shift: row[B, N], eps: scalar):
    store("y", (x - mean) * rsqrt(var + eps) * (1 + scale) + shift)


def head_norm(acc, gamma, eps, head):
    return acc * rsqrt(group_sum(acc * acc, head) * (1 / head) + eps) * gamma


def qk_norm(acc: tile[M, N], gamma: row[N], eps: scalar):
    store("y", head_norm(acc, gamma, eps, 128))


def qk_norm_64(acc: tile[M, N], gamma: row[N], eps: scalar):
    store("y", head_norm(acc, gamma, eps, 64))


# rotary embedding


def rotated(x, position, frequency):
    a, b = split(x)
    return join(*rotate(a, b, coda.float(position) * frequency))


def rope(acc: tile[M, N], position: col[M].i64, frequency: row[N / 2]):
    store("y", rotated(acc, position, frequency))


def scaled_rope(acc: tile[M, N], r: col[M], position: col[M].i64, frequency: row[N / 2]):
    store("y", rotated(acc * r, position, frequency))


def qk_norm_rope(acc: tile[M, N], gamma: row[N], position: col[M].i64, frequency: row[N / 2], eps: scalar):
    store("y", rotated(head_norm(acc, gamma, eps, 128), position, frequency))


# cross-entropy


def at_target(logits, target):
    return coda.sum(where(col_index() == target, logits, 0))


def logsumexp(acc: tile[M, N]):
    state("lse", online_logsumexp(acc), col[M])


def logsumexp_target(acc: tile[M, N], target: col[M].i64):
    state("lse", online_logsumexp(acc), col[M])
    reduce("logit", at_target(acc, target), col[M])


def capped_logsumexp_target(acc: tile[M, N], cap: scalar, target: col[M].i64):
    z = cap * coda.tanh(acc / cap)
    state("lse", online_logsumexp(z), col[M])
    reduce("logit", at_target(z, target), col[M])


def cross_entropy(acc: tile[M, N], target: col[M].i64):
    state("lse", online_logsumexp(acc), col[M])
    reduce("logit", at_target(acc, target), col[M])
    reduce("total", coda.sum(acc), col[M])


def token_loss(
    lse: col[M],
    logit: col[M],
    total: col[M],
    target: col[M].i64,
    weight: col[M],
    smoothing: scalar,
    z: scalar,
    classes: scalar,
):
    smoothed = (1 - smoothing) * logit + smoothing * total / classes
    loss = weight * (lse - smoothed + z * lse * lse)
    store("loss", where(target < 0, 0, loss), col[M])


_HELPERS = (
    positive,
    swish,
    gelu_erf,
    gelu_by_tanh,
    log_1_plus,
    at_most,
    at_least,
    gated,
    head_norm,
    rotated,
    at_target,
)
EPILOGUES = {
    name: thing
    for name, thing in list(globals().items())
    if getattr(thing, "__module__", None) == __name__ and thing not in _HELPERS
}
