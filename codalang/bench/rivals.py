"""Other libraries, by their public functions, where they can be imported.

| name  | package      | what of it                                                                              |
|-------|--------------|-----------------------------------------------------------------------------------------|
| liger | liger-kernel | kernels of its own after torch.matmul                                                   |
| quack | quack-kernels | GEMMs with fused epilogues, autotuned at the first call; 0.6.5                         |
| coda  | coda-kernels | GEMMs with fused epilogues, autotuned at the first call; it needs quack-kernels 0.6.1   |

Where a library has no row scale, A's rows are scaled ahead, which gives the same results at no cost to it.

QuACK's autotuner, which CODA uses, too, compiles and times up to 76 configurations, which takes minutes.  Here it
begins with the library's default one, times each by fewer calls, and takes the best of what it has timed when
`TUNING_SECONDS` are over.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import attrs
import torch
from torch import Tensor

from codalang.bench import plain
from codalang.bench.implementations import Results, Skipped, Way
from codalang.bench.workloads import Operands, Workload

TUNING_SECONDS = 10.0  # of one call: several tuned functions share them
TIMED_CALLS = 20  # of each configuration; the library's own number is 200

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


def imported(module: str, title: str) -> ModuleType:
    """A library's module.  Raises Skipped where it cannot be imported."""
    try:
        found = importlib.import_module(module)
        if "quack.autotuner" in sys.modules:
            hurry()
    except Exception as error:  # a library that is installed may fail at import, with other versions of what it needs
        raise Skipped(f"{title} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _made(module: str, title: str, adapters: dict[str, Adapter], workload: Workload, operands: Operands) -> Way:
    name = "gemm" if workload.pattern.group == "gemm" else workload.pattern.name
    if name not in adapters or operands.a is None or operands.b is None:
        raise Skipped(f"{title} has no function for it")
    try:
        return adapters[name](imported(module, title), workload, operands.a, operands.b, operands.inputs)
    except AttributeError as error:
        raise Skipped(f"this version of {title} differs: {error}") from error


def _scaled(a: Tensor, r: Tensor) -> Tensor:
    return (a.float() * r[:, None]).to(a.dtype)


# ---- a limit of time for QuACK's autotuner ---------------------------------------------------------------------------


class _Hurry:
    """The tuners that run, the outermost first: whether each has timed a configuration; and until when they may."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds, self.clock = seconds, clock
        self.found: list[bool] = []
        self.deadline = math.inf

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """While a tuner runs, which another may have called."""
        if not self.found:
            self.deadline = self.clock() + self.seconds
        self.found.append(False)
        try:
            yield
        finally:
            self.found.pop()

    @property
    def over(self) -> bool:
        """Whether the innermost tuner should take what it has."""
        return bool(self.found) and self.found[-1] and self.clock() > self.deadline


@cache
def hurry(seconds: float = TUNING_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
    """Limit QuACK's autotuner; see the module's docstring.  Raises ImportError or AttributeError where it differs."""
    autotuner, interface, async_compile = (
        importlib.import_module(f"quack.{name}") for name in ("autotuner", "gemm_interface", "cache.async_compile")
    )
    tuner, pool, state = autotuner.Autotuner, async_compile.CompilePool, _Hurry(seconds, clock)
    run, timed, pruned, poll = tuner.__call__, tuner._bench, tuner.prune_configs, pool.poll

    def run_within(self: Any, *args: Any, **kwargs: Any) -> Any:
        with state.tuning():
            return run(self, *args, **kwargs)

    def timed_within(self: Any, *args: Any, config: Any, **kwargs: Any) -> list[float]:
        if state.over:
            return [math.inf] * 3
        times: list[float] = timed(self, *args, config=config, **kwargs)
        state.found[-1] = state.found[-1] or math.isfinite(times[0])
        return times

    def default_first(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        default = interface.default_config(torch.device("cuda"))
        return sorted(pruned(self, kwargs), key=lambda config: config.kwargs.get("config") != default)

    def polled(self: Any, key: str) -> tuple[str, str | None]:
        outcome: tuple[str, str | None] = poll(self, key)
        return ("done", None) if outcome[0] == "pending" and state.over else outcome

    tuner.__call__, tuner._bench, tuner.prune_configs, pool.poll = run_within, timed_within, default_first, polled
    measured = "_bench_cuda_graph_l2_rotate"
    fewer = partial(getattr(autotuner, measured), n_timed_calls=TIMED_CALLS, warmup_target_ms=TIMED_CALLS)
    setattr(autotuner, measured, fewer)


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
    return Way(lambda: {"loss": function(a, b, target, reduction="none")}, note="the loss alone; waits for the device")


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


@attrs.frozen
class Fused:
    """An epilogue of QuACK's library (`quack.epilogue.library`, since 0.6.5) that does what a workload does.

    Attributes:
        name: of the epilogue.
        c: the input that it adds, or reads beside the accumulator.
        operands: its parameters -> inputs.
        results: our results -> its.
    """

    name: str
    c: str | None
    operands: dict[str, str]
    results: dict[str, str]


FUSED = {
    "residual_rms": Fused("rms_partial_epi", "res", {"weight": "gamma"}, {"x": "resid_out", "h": "D", "ss": "sqsum"}),
    "swiglu": Fused("rstd_swiglu_preact_epi", None, {"rstd": "r"}, {"y": "postact", "saved_acc": "D"}),
    "rope": Fused("rope_epi", None, {"table": "table"}, {"y": "D"}),
    "logsumexp": Fused("lse_target_epi", None, {"target": "target"}, {"lse": "lse", "logit": "target_logit"}),
    "norm_backward": Fused(
        "rms_bwd_apply_epi", "d_x", {"y": "x", "w": "gamma", "corr": "factor"}, {"d_acc": "D", "d_gamma": "dw"}
    ),
    "swiglu_backward": Fused(
        "dswiglu_rstd_preact_mod", "saved_acc", {"rstd": "r"}, {"d_acc": "D", "d_r": "dsum", "y": "postact"}
    ),
}


def _quack_fused(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    fused, tables = FUSED[workload.pattern.name], dict(inputs)
    function = getattr(imported("quack.epilogue.library", "QuACK"), fused.name)
    if "d_ss" in inputs:
        tables["factor"] = 2 * inputs["d_ss"]
    if "frequency" in inputs:  # a tile, which takes the row scale, too
        angle = inputs["position"].double()[:, None] * inputs["frequency"].double()
        turned = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
        tables["table"] = (turned * inputs["r"][:, None]).to(a.dtype)
    c = tables[fused.c] if fused.c else None
    operands = {name: tables[ours] for name, ours in fused.operands.items()}
    stored = "D" in fused.results.values()

    def call() -> Results:
        results: dict[str, Tensor] = function(a, b.t(), c, store_d=stored, **operands)
        return results

    def restore(results: Results) -> Results:
        return {ours: results[name] for ours, name in fused.results.items()}

    return Way(call, restore, "reads cosines and sines of each element" if "table" in operands else "")


QUACK: dict[str, Adapter] = {"gemm": _quack_gemm, **dict.fromkeys(FUSED, _quack_fused)}

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
    position, frequency = inputs["position"].int(), coda_frequencies(inputs["frequency"])
    return Way(lambda: {"y": function(a, b.t(), r, position, frequency)})


def coda_frequencies(frequency: Tensor) -> Tensor:
    """Radians a position per pair of columns as CODA wants them per column: turns, in two parts; it turns backwards."""
    turns = -frequency.double() / (2 * math.pi)
    high = turns.float()
    return torch.stack([high, (turns - high).float()], -1).flatten()


def _coda_logsumexp(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, target = library.gemm_lse_select_logits, inputs["target"].int()

    def call() -> Results:
        loss, lse, logit = function(a, b.t(), target, -100, True)
        return {"loss": loss, "lse": lse, "logit": logit}

    return Way(call)


def _coda_norm_backward(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function = library.gemm_residual_partial_rmsnorm_bwd
    gamma, statistic = inputs["gamma"].to(a.dtype), -2 * inputs["d_ss"]
    r, d_x = torch.ones_like(statistic), inputs["d_x"].clone()

    def call() -> Results:
        d_acc, d_gamma, h = function(a, b, gamma, inputs["x"], statistic, r, dX=d_x)
        return {"d_acc": d_acc, "d_gamma": d_gamma, "h": h}

    def restore(results: Results) -> Results:
        return {"d_acc": results["d_acc"].clone(), "d_gamma": results["d_gamma"]}

    return Way(call, restore, "adds into d_x; stores the weighted row, too")


def _coda_swiglu_backward(library: ModuleType, workload: Workload, a: Tensor, b: Tensor, inputs: Inputs) -> Way:
    function, r = library.gemm_swiglu_bwd_zdz, inputs["r"]
    pre = _scaled(inputs["saved_acc"], r)

    def call() -> Results:
        d_scaled, statistic, y = function(a, b, pre)
        return {"d_scaled": d_scaled, "statistic": statistic, "y": y}

    def restore(results: Results) -> Results:
        return {"d_acc": _scaled(results["d_scaled"], r), "d_r": results["statistic"] / r, "y": results["y"]}

    return Way(call, restore, "without the row scale")


CODA: dict[str, Adapter] = {
    "gemm": _coda_gemm,
    "residual_rms": _coda_residual_rms,
    "swiglu": _coda_swiglu,
    "rope": _coda_rope,
    "logsumexp": _coda_logsumexp,
    "norm_backward": _coda_norm_backward,
    "swiglu_backward": _coda_swiglu_backward,
}
