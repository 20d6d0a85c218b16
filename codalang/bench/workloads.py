"""What is measured: patterns of a Transformer's layer, at a model's widths and a number of tokens.

A `Pattern` says which epilogue runs on which GEMM; a `Workload` is a pattern at given extents, with everything else
following from it: operands, floating-point operations, bytes.  Nothing here runs anything.

| group    | patterns                                                                                 | beside       |
|----------|------------------------------------------------------------------------------------------|--------------|
| epilogue | a GEMM with an epilogue, forward or derived backward                                     | cuBLAS alone |
| gemm     | the plain GEMMs of a layer: forward (TN), gradient of the input (NN), of the weight (NT) | cuBLAS       |
| hosted   | epilogues on plain tensors                                                               | a copy       |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor

import codalang.parser
from codalang.autodiff import Derivative, derive
from codalang.errors import Source
from codalang.ir.build import canonical
from codalang.ir.epilogue import Epilogue, Node
from codalang.ir.simplify import simplify
from codalang.ir.types import Dtype, Kind
from codalang.sources import resolve

Extents = tuple[int, int, int]  # M, N, K; N counts the accumulator's columns

VOCABULARY = 128256
ROPE_BASE = 500000.0


@attrs.frozen
class Width:
    """The sizes of a Llama-3 model's layer."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int = VOCABULARY

    @property
    def qkv(self) -> int:
        """Columns of the QKV projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_size


WIDTHS = {
    "8B": Width("8B", 4096, 14336, 32, 8, 128),
    "1B": Width("1B", 2048, 8192, 32, 8, 64),
    "70B": Width("70B", 8192, 28672, 64, 8, 128),
}
TOKENS = (8192, 4096, 16384)

# The residual stream as residual_rms has it, the weighted row first: its cotangent, the gradient of the GEMM that reads
# it, then hosts the derived backward.
WEIGHTED_RESIDUAL = """
epilogue weighted_residual(acc: tile[M, N], res: tile[M, N], gamma: row[N]) {
    let x = acc + res
    store h: tile[M, N] = x * gamma
    store x: tile[M, N]
    reduce ss: col[M] = sum(x * x)
}
"""
PLAIN = "epilogue plain(acc: tile[M, N]) { store y: tile[M, N] = acc }"


@attrs.frozen
class Pattern:
    """An epilogue and where it runs.

    Attributes:
        title: what tables call it.
        group: "epilogue", "gemm" or "hosted".
        epilogue: makes the epilogue.
        extents: M, N and K of its GEMM; hosted, K is 0 and N counts columns of the first parameter.
        majors: how A [M, K] and B [N, K] lie in memory.
    """

    name: str
    title: str
    group: str
    epilogue: Callable[[], Epilogue]
    extents: Callable[[Width, int], Extents]
    majors: tuple[str, str] = ("k", "k")


@attrs.frozen
class Workload:
    """A pattern at the widths of a model and a number of tokens."""

    pattern: Pattern
    width: Width
    tokens: int

    @property
    def name(self) -> str:
        """What filters match."""
        return f"{self.pattern.name} {self.width.name} {self.tokens}"

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue, made once."""
        return _made(self.pattern.epilogue)

    @property
    def on_gemm(self) -> bool:
        """Whether a GEMM hosts it."""
        return self.pattern.group != "hosted"

    @property
    def extents(self) -> Extents:
        """M, N, K."""
        return self.pattern.extents(self.width, self.tokens)

    @property
    def unit(self) -> int:
        """Columns of something of width 1."""
        width = self.epilogue.params[0].type.width
        return int(self.extents[1] / width) if width else self.extents[1]

    @property
    def flops(self) -> int:
        """Of its GEMM."""
        m, n, k = self.extents
        return 2 * m * n * k

    @property
    def tile_bytes(self) -> int:
        """Bytes of the tiles that the epilogue loads and stores in bf16, each once."""
        params = self.epilogue.params[1:] if self.on_gemm else self.epilogue.params
        types = [p.type for p in params] + [s.type for s in self.epilogue.stores]
        return sum(2 * self.extents[0] * int(self.unit * (t.width or 0)) for t in types if t.kind is Kind.TILE)

    @property
    def bytes(self) -> int:
        """Bytes that must move at least: operands and tiles in bf16, each once."""
        m, n, k = self.extents
        return self.tile_bytes + 2 * (m + n) * k


@cache
def _made(make: Callable[[], Epilogue]) -> Epilogue:
    return make()


def standard(name: str) -> Epilogue:
    """An epilogue of the standard library."""
    return simplify(codalang.parser.parse(resolve(name)).epilogues[name])


@cache
def derived(name: str) -> Derivative:
    """The derivative of a standard epilogue with respect to all its parameters."""
    return derive(standard(name))


def _written(name: str, text: str) -> Epilogue:
    return codalang.parser.parse(Source(f"{name}.coda", text)).epilogues[name]


def _plain() -> Epilogue:
    return _written("plain", PLAIN)


def _norm_backward() -> Epilogue:
    return derive(_written("weighted_residual", WEIGHTED_RESIDUAL)).backward


def _swiglu_backward() -> Epilogue:
    return recomputing(derived("scaled_swiglu"), "y")


def recomputing(derivative: Derivative, output: str) -> Epilogue:
    """The backward, storing an output of the forward beside its gradients: what the next GEMM's weight gradient reads
    need not be kept from the forward.

    The output is computed of what the backward loads: the accumulator must be among it, as a saved value.
    """
    forward, backward = derivative.forward, derivative.backward
    sources = {load.name: name for name, load in derivative.loads.items() if load.source in ("param", "saved")}
    stored = {node: s.name for s in forward.stores for node in s.values if s.name in derivative.saved}
    nodes = list(backward.nodes)
    place: dict[int, int] = {}
    for index, node in enumerate(forward.nodes):
        name = sources.get(stored.get(index, str(node.attr) if node.op == "param" else ""))
        args = tuple(place[a] for a in node.args)
        made = Node("param", (), node.type, name) if name else attrs.evolve(node, args=args)
        place[index] = len(nodes)
        nodes.append(made)
    store = next(s for s in forward.stores if s.name == output)
    outputs = (*backward.outputs, attrs.evolve(store, value=place[store.value]))
    return simplify(canonical(attrs.evolve(backward, nodes=tuple(nodes), outputs=outputs)))


def _gemm_patterns() -> Iterator[Pattern]:
    """The projections of a layer in their three directions, extents and majors as training has them."""
    projections: Mapping[str, tuple[str, Callable[[Width], tuple[int, int]]]] = {
        "qkv": ("QKV", lambda w: (w.qkv, w.hidden)),
        "out": ("attention output", lambda w: (w.hidden, w.heads * w.head_size)),
        "gate_up": ("gate/up", lambda w: (2 * w.ffn, w.hidden)),
        "down": ("down", lambda w: (w.hidden, w.ffn)),
    }
    directions: Mapping[str, tuple[str, tuple[str, str], Callable[[int, int, int], Extents]]] = {
        "tn": ("forward, TN", ("k", "k"), lambda t, n, k: (t, n, k)),
        "nn": ("gradient of the input, NN", ("k", "mn"), lambda t, n, k: (t, k, n)),
        "nt": ("gradient of the weight, NT", ("mn", "mn"), lambda t, n, k: (n, k, t)),
    }

    def at(sizes: Callable[[Width], tuple[int, int]], order: Callable[[int, int, int], Extents]) -> Any:
        return lambda width, tokens: order(tokens, *sizes(width))

    for name, (title, sizes) in projections.items():
        for direction, (words, majors, order) in directions.items():
            yield Pattern(f"gemm_{name}_{direction}", f"{title}: {words}", "gemm", _plain, at(sizes, order), majors)


PATTERNS: dict[str, Pattern] = {
    p.name: p
    for p in (
        Pattern(
            "residual_rms",
            "residual + partial RMS + weight",
            "epilogue",
            lambda: derived("residual_rms").forward,
            lambda w, t: (t, w.hidden, w.ffn),
        ),
        Pattern(
            "swiglu",
            "scaled SwiGLU, pre-activation also stored",
            "epilogue",
            lambda: derived("scaled_swiglu").forward,
            lambda w, t: (t, 2 * w.ffn, w.hidden),
        ),
        Pattern(
            "rope",
            "scaled RoPE on QKV",
            "epilogue",
            lambda: standard("scaled_rope"),
            lambda w, t: (t, w.qkv, w.hidden),
        ),
        Pattern(
            "logsumexp",
            "logsumexp + target logit, logits not stored",
            "epilogue",
            lambda: standard("logsumexp_target"),
            lambda w, t: (t, w.vocabulary, w.hidden),
        ),
        Pattern(
            "norm_backward",
            "RMSNorm backward on the gate/up dgrad (derived)",
            "epilogue",
            _norm_backward,
            lambda w, t: (t, w.hidden, 2 * w.ffn),
            ("k", "mn"),
        ),
        Pattern(
            "swiglu_backward",
            "SwiGLU backward + row statistic + recomputed output (derived)",
            "epilogue",
            _swiglu_backward,
            lambda w, t: (t, w.ffn, w.hidden),
            ("k", "mn"),
        ),
        *_gemm_patterns(),
        Pattern(
            "hosted_norm_backward",
            "RMSNorm backward",
            "hosted",
            _norm_backward,
            lambda w, t: (t, w.hidden, 0),
        ),
        Pattern(
            "hosted_swiglu_backward",
            "SwiGLU backward + row statistic + recomputed output",
            "hosted",
            _swiglu_backward,
            lambda w, t: (t, w.ffn, 0),
        ),
        Pattern(
            "hosted_rope",
            "scaled RoPE",
            "hosted",
            lambda: standard("scaled_rope"),
            lambda w, t: (t, w.qkv, 0),
        ),
        Pattern(
            "hosted_layernorm",
            "LayerNorm from known statistics",
            "hosted",
            lambda: standard("layernorm_apply"),
            lambda w, t: (t, w.hidden, 0),
        ),
    )
}
GROUPS = ("epilogue", "gemm", "hosted")


@attrs.frozen
class Operands:
    """The tensors of a workload: A [M, K] and B [N, K] (None where hosted), and the epilogue's inputs by name."""

    a: Tensor | None
    b: Tensor | None
    inputs: dict[str, Tensor]


def make_operands(workload: Workload, device: str, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Random operands: tiles in `dtype`, vectors in f32, indices in i64.  On "meta" they have no memory."""
    m, n, k = workload.extents
    a = b = None
    if workload.on_gemm:
        a = _operand(m, k, workload.pattern.majors[0], device, dtype, 1.0)
        b = _operand(n, k, workload.pattern.majors[1], device, dtype, k**-0.5)
    params = workload.epilogue.params[1:] if workload.on_gemm else workload.epilogue.params
    inputs = {}
    for param in params:
        rows = (m,) if param.type.kind.has_rows else ()
        columns = (int(workload.unit * param.type.width),) if param.type.width is not None else ()
        if param.name == "frequency":
            inputs[param.name] = frequencies(workload.width, device)
        elif param.type.dtype is Dtype.I32:  # positions, or targets
            inputs[param.name] = torch.arange(m, device=device) % n
        elif param.type.kind is Kind.TILE:
            inputs[param.name] = torch.randn(rows + columns, device=device, dtype=dtype)
        else:
            inputs[param.name] = torch.rand(rows + columns, device=device) + 0.5
    return Operands(a, b, inputs)


def _operand(rows: int, k: int, major: str, device: str, dtype: torch.dtype, scale: float) -> Tensor:
    """A random [rows, k], contiguous along k or along the rows."""
    data = torch.randn((rows, k) if major == "k" else (k, rows), device=device, dtype=dtype).mul_(scale)
    return data if major == "k" else data.t()


def frequencies(width: Width, device: str) -> Tensor:
    """RoPE's frequency of each pair of QKV's columns: the same for every head of Q and K, 0 for V."""
    pairs = width.head_size // 2
    one = ROPE_BASE ** (-torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
    rotated = one.float().repeat(width.heads + width.kv_heads)
    return torch.cat([rotated, torch.zeros(width.kv_heads * pairs, device=device)])
