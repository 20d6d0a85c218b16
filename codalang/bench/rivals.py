"""Other libraries, by their public functions, where they can be imported.

| name  | package      | what of it                                                                              |
|-------|--------------|-----------------------------------------------------------------------------------------|
| liger | liger-kernel | kernels of its own after torch.matmul                                                   |
| quack | quack-kernels | GEMMs with fused epilogues, autotuned at the first call                                |
| coda  | coda-kernels | GEMMs with fused epilogues, autotuned at the first call                                 |

Where a library has no row scale, A's rows are scaled ahead, which gives the same results at no cost to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from codalang.bench import plain
from codalang.bench.implementations import Results, Skipped, Way
from codalang.bench.workloads import Operands, Workload

Inputs = dict[str, Tensor]
Adapter = Callable[[ModuleType, Workload, Tensor, Tensor, Inputs], Way]


def liger(workload: Workload, operands: Operands) -> Way:
    """Liger's kernels after cuBLAS's GEMM."""
    return _made("liger_kernel.transformers.functional", "Liger", LIGER, workload, operands)


def quack(workload: Workload, operands: Operands) -> Way:
    """QuACK's fused GEMMs."""
    return _made("quack.gemm_interface", "QuACK", QUACK, workload, operands)


def coda(workload: Workload, operands: Operands) -> Way:
    """CODA's fused GEMMs."""
    return _made("coda.core.gemm.functional", "CODA", CODA, workload, operands)


def _made(module: str, title: str, adapters: dict[str, Adapter], workload: Workload, operands: Operands) -> Way:
    name = "gemm" if workload.pattern.group == "gemm" else workload.pattern.name
    if name not in adapters or operands.a is None or operands.b is None:
        raise Skipped(f"{title} has no function for it")
    try:
        library = importlib.import_module(module)
    except Exception as error:  # a library that is installed may fail at import, with other versions of what it needs
        raise Skipped(f"{title} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return adapters[name](library, workload, operands.a, operands.b, operands.inputs)
    except AttributeError as error:
        raise Skipped(f"this version of {title} differs: {error}") from error


def _scaled(a: Tensor, r: Tensor) -> Tensor:
    return (a.float() * r[:, None]).to(a.dtype)


# ---- Liger -----------------------------------------------------------------------------------------------------------


def _liger_residual_rms(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, res, gamma = library.liger_fused_add_rms_norm, inputs["res"], inputs["gamma"].to(a.dtype)

    def call() -> Results:
        normalized, x = function(torch.matmul(a, b.t()), res, gamma, 1e-5)
        return {"x": x, "normalized": normalized}

    return Way(call, lambda results: {"x": results["x"]}, "normalizes at once; no sum of squares")


def _liger_swiglu(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, scaled = library.liger_swiglu, _scaled(a, inputs["r"])
    gate, up = (half.contiguous() for half in plain.halves(b, 0).chunk(2))

    def call() -> Results:
        return {"y": function(torch.matmul(scaled, gate.t()), torch.matmul(scaled, up.t()))}

    return Way(call, note="two GEMMs, without the row scale")


def _liger_rope(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, width, scaled = library.liger_rope, workload.width, _scaled(a, inputs["r"])
    size, tokens = width.head_size, a.shape[0]
    by_head = b.reshape(-1, size // 2, 2, b.shape[1]).transpose(1, 2).reshape(b.shape)  # pairs as halves of a head
    q_columns, k_columns = width.heads * size, width.kv_heads * size
    weight = torch.cat([by_head[: q_columns + k_columns], b[q_columns + k_columns :]]).contiguous()
    angle = inputs["position"].double()[:, None] * inputs["frequency"][: size // 2].double()
    cos, sin = (torch.cat([t, t], -1).to(a.dtype)[None] for t in (angle.cos(), angle.sin()))

    def call() -> Results:
        q, k, v = torch.matmul(scaled, weight.t()).split([q_columns, k_columns, k_columns], -1)
        heads = (t.view(1, tokens, -1, size).transpose(1, 2) for t in (q, k))
        turned_q, turned_k = function(*heads, cos, sin)
        return {"q": turned_q, "k": turned_k, "v": v}

    def restore(results: Results) -> Results:
        def flat(heads: Tensor) -> Tensor:
            both = heads.transpose(1, 2).reshape(tokens, -1, 2, size // 2)
            return both.transpose(2, 3).reshape(tokens, -1)

        return {"y": torch.cat([flat(results["q"]), flat(results["k"]), results["v"]], -1)}

    return Way(call, restore, "without the row scale; Q, K and V apart")


def _liger_logsumexp(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, target = library.liger_fused_linear_cross_entropy, inputs["target"]
    return Way(lambda: {"loss": function(a, b, target, reduction="none")}, note="the loss alone")


LIGER: dict[str, Adapter] = {
    "residual_rms": _liger_residual_rms,
    "swiglu": _liger_swiglu,
    "rope": _liger_rope,
    "logsumexp": _liger_logsumexp,
}

# ---- QuACK -----------------------------------------------------------------------------------------------------------


def _quack_gemm(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function = library.gemm
    return Way(lambda: {"y": function(a, b.t(), tuned=True)})


def _quack_residual_rms(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, res, gamma = library.gemm_rms, inputs["res"], inputs["gamma"]

    def call() -> Results:
        x = torch.empty_like(res)
        h, rstd = function(a, b.t(), C=res, norm_weight=gamma, premult_out=x, eps=0.0, tuned=True)
        return {"x": x, "h": h, "rstd": rstd}

    def restore(results: Results) -> Results:
        ss = results["x"].shape[1] / results["rstd"].float().square()
        return {"x": results["x"], "h": results["h"], "ss": ss}

    return Way(call, restore)


def _quack_swiglu(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, r = library.gemm_norm_act, inputs["r"]

    def call() -> Results:
        scaled, y = function(a, b.t(), rstd=r, activation="swiglu", store_preact=True, tuned=True)
        return {"scaled": scaled, "y": y}

    return Way(call, lambda results: {"y": results["y"]})


def _quack_swiglu_backward(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, pre = library.gemm_dgated, _scaled(inputs["saved_acc"], inputs["r"])

    def call() -> Results:
        d_scaled, y = function(a, b.t(), pre, activation="swiglu", tuned=True)[:2]
        return {"d_scaled": d_scaled, "y": y}

    return Way(call, lambda results: {"y": results["y"]}, "without the row scale and the row statistic")


QUACK: dict[str, Adapter] = {
    "gemm": _quack_gemm,
    "residual_rms": _quack_residual_rms,
    "swiglu": _quack_swiglu,
    "swiglu_backward": _quack_swiglu_backward,
}

# ---- CODA ------------------------------------------------------------------------------------------------------------


def _coda_gemm(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function = library.gemm
    return Way(lambda: {"y": function(a, b.t())}, note="the better of QuACK and cuBLAS")


def _coda_residual_rms(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, res, gamma = library.gemm_residual_partial_rmsnorm, inputs["res"], inputs["gamma"].to(a.dtype)

    def call() -> Results:
        x, h, rstd = function(a, b.t(), res, gamma, 0.0)
        return {"x": x, "h": h, "rstd": rstd}

    def restore(results: Results) -> Results:
        return {"x": results["x"], "ss": results["x"].shape[1] / results["rstd"].square()}

    return Way(call, restore, "the weight in bf16")


def _coda_swiglu(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, r = library.gemm_rmsnorm_swiglu, inputs["r"]

    def call() -> Results:
        pre, y = function(a, b.t(), r)
        return {"pre": pre, "y": y}

    return Way(call, lambda results: {"y": results["y"]})


def _coda_rope(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, r = library.gemm_rmsnorm_rope, inputs["r"]
    position, frequency = inputs["position"].int(), inputs["frequency"].repeat_interleave(2)
    return Way(lambda: {"y": function(a, b.t(), r, position, frequency)})


def _coda_logsumexp(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, target = library.gemm_lse_select_logits, inputs["target"].int()

    def call() -> Results:
        loss, lse, logit = function(a, b.t(), target, -100, True)
        return {"loss": loss, "lse": lse, "logit": logit}

    return Way(call)


def _coda_norm_backward(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function = library.gemm_residual_partial_rmsnorm_bwd
    gamma, r = inputs["gamma"].to(a.dtype), torch.ones_like(inputs["d_ss"])
    d_x = inputs["d_x"].clone()

    def call() -> Results:
        d_acc, d_gamma, h = function(a, b, gamma, inputs["x"], inputs["d_ss"], r, dX=d_x)
        return {"d_acc": d_acc, "d_gamma": d_gamma, "h": h}

    return Way(call, lambda results: {"d_gamma": results["d_gamma"]}, "adds into d_x; stores the weighted row, too")


def _coda_swiglu_backward(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, pre = library.gemm_swiglu_bwd_zdz, _scaled(inputs["saved_acc"], inputs["r"])

    def call() -> Results:
        d_scaled, statistic, y = function(a, b, pre)
        return {"d_scaled": d_scaled, "statistic": statistic, "y": y}

    return Way(call, lambda results: {"y": results["y"]}, "without the row scale")


CODA: dict[str, Adapter] = {
    "gemm": _coda_gemm,
    "residual_rms": _coda_residual_rms,
    "swiglu": _coda_swiglu,
    "rope": _coda_rope,
    "logsumexp": _coda_logsumexp,
    "norm_backward": _coda_norm_backward,
    "swiglu_backward": _coda_swiglu_backward,
}
