"""A small Llama trained twice from one seed: by codalang's programs, and in plain PyTorch.

    python examples/train_llama.py                     a few minutes on two CPU cores, by the reference interpreter
    python examples/train_llama.py --size gpu          on a Hopper GPU, by kernels, in bfloat16

All of the first model but the embedding and the attention (`scaled_dot_product_attention`) is programs:
llama_block.coda between the attentions, lm_head_cross_entropy.coda at the end, and the backward that codalang derives
of them.  The other is the usual modules.  Both see the same bytes of this repository's own pages and sources.

Training amplifies rounding, so two correct implementations drift apart, as two seeds of one implementation do from the
start.  The PyTorch model is therefore trained from a second seed, too; the curves agree where codalang's is no farther
from PyTorch's than the second seed's is.  They are drawn into an SVG.  Exits with 1 where they do not agree.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

import codalang

ROOT = Path(__file__).parents[1]
BLOCK = codalang.load(ROOT / "examples/llama_block.coda")
HEAD = codalang.load(ROOT / "examples/lm_head_cross_entropy.coda")
BYTES = 256
EPS = 1e-5
BASE = 10000.0


@attrs.frozen
class Size:
    """Widths of a model, and how long it is trained on which batches.

    Heads have 2 * `pairs` numbers; `queries` heads share `keys` heads of keys and values.
    """

    layers: int
    width: int
    queries: int
    keys: int
    pairs: int
    hidden: int
    batch: int
    length: int
    steps: int
    rate: float
    dtype: torch.dtype
    device: str

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return 2 * self.pairs

    @property
    def wide(self) -> torch.dtype:
        """What angles and the loss are computed in."""
        return torch.promote_types(self.dtype, torch.float32)


SIZES = {
    "test": Size(2, 32, 4, 2, 4, 48, 2, 24, 6, 3e-3, torch.float32, "cpu"),
    "cpu": Size(3, 128, 4, 2, 16, 352, 4, 128, 150, 2e-3, torch.float32, "cpu"),
    "gpu": Size(8, 1024, 16, 4, 32, 2816, 16, 1024, 500, 6e-4, torch.bfloat16, "cuda"),
    "1b": Size(16, 2048, 32, 8, 32, 8192, 4, 2048, 500, 3e-4, torch.bfloat16, "cuda"),
}


# ---- the model, twice ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The weights of a layer, as checkpoints have them: gate and up, and q and k, concatenated by halves."""

    def __init__(self, size: Size, draw: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        width, out = size.width, (2 * size.layers) ** -0.5  # what ends in the residual stream is smaller in deep models
        self.g_attention = nn.Parameter(torch.ones(width))
        self.w_q = draw(size.queries * size.head, width)
        self.w_k = draw(size.keys * size.head, width)
        self.w_v = draw(size.keys * size.head, width)
        self.w_o = draw(width, size.queries * size.head, scale=out)
        self.g_mlp = nn.Parameter(torch.ones(width))
        self.w_gate_up = draw(2, size.hidden, width)
        self.w_down = draw(width, size.hidden, scale=out)


class Weights(nn.Module):
    """A model's weights, drawn from a seed, in float32: each step rounds them to the dtype that it computes in."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5)

        self.size = size
        self.embedding = nn.Parameter(torch.randn(BYTES, size.width, generator=generator))
        self.layers = nn.ModuleList(Layer(size, draw) for _ in range(size.layers))
        self.g_final = nn.Parameter(torch.ones(size.width))
        self.w_head = draw(BYTES, size.width)

    def rounded(self) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """The weights in the dtype of the computation: the model's, and each layer's."""
        dtype = self.size.dtype
        own = {name: value.to(dtype) for name, value in self.named_parameters(recurse=False)}
        return own, [{name: value.to(dtype) for name, value in layer.named_parameters()} for layer in self.layers]


def attention(size: Size, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [T, heads * 2*P], T being batch * length."""
    heads = [x.view(size.batch, size.length, -1, size.head).transpose(1, 2) for x in (q, k, v)]
    y = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(size.batch * size.length, -1)


def frequencies(size: Size, device: str) -> Tensor:
    """The angle per position of each pair of a head."""
    return BASE ** -(torch.arange(size.pairs, device=device, dtype=size.wide) / size.pairs)


class Programs(Weights):
    """The model by codalang's programs."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of [batch, length] tokens."""
        size, (own, layers) = self.size, self.rounded()
        rotation = self._rotation(tokens.device.type)
        x = own["embedding"][tokens.flatten()]
        q, k, v = BLOCK.llama_first(x, layers[0]["g_attention"], **self._projections(layers[0]), **rotation)
        for here, there in zip(layers, layers[1:], strict=False):
            y = attention(size, q, k, v)
            x, q, k, v = BLOCK.llama_block(
                y, x, **_feed_forward(here), g_attention=there["g_attention"], **self._projections(there), **rotation
            )
        y = attention(size, q, k, v)
        h, r = BLOCK.llama_last(y, x, **_feed_forward(layers[-1]), g_final=own["g_final"])
        return HEAD.cross_entropy_mean(h, r, own["w_head"], targets.flatten())

    def _projections(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of queries and keys by heads, halves and pairs: views."""
        heads = (-1, 2, self.size.pairs, self.size.width)
        return {"w_q": layer["w_q"].view(heads), "w_k": layer["w_k"].view(heads), "w_v": layer["w_v"]}

    def _rotation(self, device: str) -> dict[str, Tensor]:
        """The position of each token, and the frequencies of each head."""
        size, frequency = self.size, frequencies(self.size, device)
        return {
            "positions": torch.arange(size.length, device=device).repeat(size.batch),
            "q_frequency": frequency.expand(size.queries, -1).contiguous(),
            "k_frequency": frequency.expand(size.keys, -1).contiguous(),
        }


def _feed_forward(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: layer[name] for name in ("w_o", "g_mlp", "w_gate_up", "w_down")}


class Plain(Weights):
    """The model in plain PyTorch."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of [batch, length] tokens."""
        size, (own, layers) = self.size, self.rounded()
        angle = torch.arange(size.length, device=tokens.device)[:, None] * frequencies(size, tokens.device.type)
        angle = angle.repeat(size.batch, 1)[:, None]
        cos, sin = angle.cos(), angle.sin()

        def rope(z: Tensor) -> Tensor:
            a, b = z.to(size.wide).unflatten(1, (-1, size.head)).chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(1).to(z.dtype)

        x = own["embedding"][tokens.flatten()]
        for layer in layers:
            n = functional.rms_norm(x, (size.width,), layer["g_attention"], EPS)
            q, k, v = (functional.linear(n, layer[name]) for name in ("w_q", "w_k", "w_v"))
            x = x + functional.linear(attention(size, rope(q), rope(k), v), layer["w_o"])
            n = functional.rms_norm(x, (size.width,), layer["g_mlp"], EPS)
            gate, up = (functional.linear(n, w) for w in layer["w_gate_up"])
            x = x + functional.linear(functional.silu(gate) * up, layer["w_down"])
        n = functional.rms_norm(x, (size.width,), own["g_final"], EPS)
        logits = functional.linear(n, own["w_head"])
        return functional.cross_entropy(logits.to(size.wide), targets.flatten())


# ---- training --------------------------------------------------------------------------------------------------------


def corpus() -> Tensor:
    """The bytes of the repository's own text, in the order of their names."""
    files = [ROOT / "README.md"]
    for folder, suffix in (("docs", "md"), ("stdlib", "coda"), ("examples", "coda"), ("codalang", "py")):
        files += sorted((ROOT / folder).rglob(f"*.{suffix}"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)


def batches(text: Tensor, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text: tokens, and those that follow them."""
    generator = torch.Generator().manual_seed(seed + 1000)
    while True:
        starts = torch.randint(0, len(text) - size.length, (size.batch,), generator=generator)
        windows = torch.stack([text[i : i + size.length + 1] for i in starts]).to(size.device)
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(
    kind: type[Weights], text: Tensor, size: Size, seed: int, progress: Callable[[int, float], None]
) -> list[float]:
    """Train a model on a text from a seed, which draws weights and batches; the loss of each step."""
    model = kind(size, seed).to(size.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, size.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / size.steps))
    )
    losses = []
    for step, (tokens, targets) in zip(range(size.steps), batches(text, size, seed), strict=False):
        loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress(step + 1, losses[-1])
    return losses


class Progress:
    """One line that shows how far a run is; on a file, only its end."""

    def __init__(self, label: str, steps: int) -> None:
        self.label, self.steps, self.begin = label, steps, time.perf_counter()

    def __call__(self, step: int, loss: float) -> None:
        """`step` steps are done."""
        done = step == self.steps
        if not (done or sys.stdout.isatty()):
            return
        spent = time.perf_counter() - self.begin
        bar = "#" * (24 * step // self.steps)
        left = "" if done else f", {spent / step * (self.steps - step):.0f} s left"
        line = f"{self.label:<18} [{bar:<24}] {step}/{self.steps}, loss {loss:.4f}, {spent:.0f} s{left}"
        print(f"\r{line:<100}" if sys.stdout.isatty() else line, end="\n" if done else "", flush=True)


# ---- what comes out --------------------------------------------------------------------------------------------------


def smoothed(losses: Sequence[float], share: int = 20) -> list[float]:
    """The mean of the last steps at each step: losses jump from batch to batch."""
    window = max(1, len(losses) // share)
    return [sum(losses[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(losses))]


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The mean distance of two smoothed curves."""
    pairs = zip(smoothed(first), smoothed(second), strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(first)


def plot(curves: Mapping[str, Sequence[float]], title: str) -> str:
    """An SVG of loss curves over steps: smoothed as lines, each step's loss as a faint one behind."""
    width, height, left, top, right, bottom = 860, 480, 62, 48, 24, 46
    steps = max(len(losses) for losses in curves.values())
    values = [v for losses in curves.values() for v in losses]
    low, high = min(values), max(values)
    tick = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    tick = tick / 2 if (high - low) / tick < 4 else tick
    low, high = math.floor(low / tick) * tick, math.ceil(high / tick) * tick

    def place(step: float, loss: float) -> tuple[float, float]:
        x = left + (width - left - right) * (step - 1) / max(1, steps - 1)
        return x, top + (height - top - bottom) * (high - loss) / (high - low)

    def path(losses: Sequence[float]) -> str:
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(i + 1, v) for i, v in enumerate(losses)))

    lines = [f'<text x="{left}" y="26" font-size="15" font-weight="600">{title}</text>']
    for i in range(round((high - low) / tick) + 1):
        x, y = place(1, low + i * tick)
        lines.append(f'<path d="M{x} {y:.1f}H{width - right}" stroke="#e3e7eb"/>')
        lines.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{low + i * tick:.3g}</text>')
    for i in range(5):
        step = 1 + round((steps - 1) * i / 4)
        x, _ = place(step, low)
        lines.append(f'<text x="{x:.1f}" y="{height - bottom + 20}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    lines.append(f'<text x="14" y="{top - 10}">loss, nats per byte</text>')
    for i, (name, losses) in enumerate(curves.items()):
        # Dashes of different lengths: curves that agree lie on each other, and all must be seen.
        colour, dash = (("#d1495b", ""), ("#1d6fa5", "7 5"), ("#8b95a1", "2 3"))[i % 3]
        lines.append(f'<path d="{path(losses)}" fill="none" stroke="{colour}" stroke-opacity="0.18"/>')
        lines.append(
            f'<path d="{path(smoothed(losses))}" fill="none" stroke="{colour}" stroke-width="2.2" '
            f'stroke-dasharray="{dash}"/>'
        )
        y = top + 16 + 20 * i
        lines.append(
            f'<path d="M{width - 250} {y - 4}h34" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/>'
            f'<text x="{width - 208}" y="{y}">{name}</text>'
        )
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train three models, compare and draw their curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="cpu", help="default: cpu")
    parser.add_argument("--steps", type=int, help="how many (default: the size's)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/train_llama.svg"), help="where the plot goes")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    if options.steps is not None:
        size = attrs.evolve(size, steps=options.steps)
    if size.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--size {options.size} needs a GPU")
    count = sum(p.numel() for p in Weights(size, 0).parameters())
    print(f"{count / 1e6:.1f} million weights, {size.batch * size.length} bytes of text a step, {size.steps} steps")
    other = options.seed + 1
    runs = {
        f"codalang, seed {options.seed}": (Programs, options.seed),
        f"PyTorch, seed {options.seed}": (Plain, options.seed),
        f"PyTorch, seed {other}": (Plain, other),
    }
    text = corpus()
    curves = {name: train(kind, text, size, seed, Progress(name, size.steps)) for name, (kind, seed) in runs.items()}
    ours, theirs, second = curves.values()
    apart, spread = distance(ours, theirs), distance(second, theirs)
    agree = apart <= spread and all(map(math.isfinite, ours))
    print(f"mean distance of the smoothed curves: codalang from PyTorch {apart:.2g}, two seeds of PyTorch {spread:.2g}")
    print(f"the curves {'agree' if agree else 'DO NOT agree'} within the spread of two seeds")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(plot(curves, f"A Llama of {count / 1e6:.1f} million weights on bytes"))
    print(f"loss curves: {options.output}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
