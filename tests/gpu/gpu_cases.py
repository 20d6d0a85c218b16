"""What the GPU tests run, as data: subjects (an epilogue and its host) and cases (dtypes, extents, memory layouts).

    Subject = what is checked: a forward or a derived backward, on a GEMM or hosted on plain tensors
    Case    = Subject + dtypes + (M, N, K) + the memory layout of each kind of input

M and N are the extents of the *forward* epilogue's output; a derived backward whose accumulator is half as wide runs
on a GEMM with N/2 columns.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import attrs

import codalang.parser
from codalang.autodiff import Derivative, derive
from codalang.errors import CodaUnsupportedError, Source
from codalang.ir.bind import granularity
from codalang.ir.epilogue import Epilogue
from codalang.lower import split
from codalang.lower.plan import TILINGS
from codalang.lower.spec import loaded_params, relative_width

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def _epilogues(folder: Path) -> dict[str, Epilogue]:
    """Every epilogue of every file, by its name."""
    found: dict[str, Epilogue] = {}
    for path in sorted(folder.glob("*.coda")):
        for name, epilogue in codalang.parser.parse(Source(str(path), path.read_text())).epilogues.items():
            assert name not in found, f"two epilogues are called {name}"
            found[name] = epilogue
    return found


LIBRARY = _epilogues(ROOT / "stdlib")
FEATURES = _epilogues(HERE)  # epilogues with every kind of load, store and reduction
SOURCES = LIBRARY | FEATURES
# Those that meet every layout, every ragged extent and every tiling; the others of the library meet a few.
CORE = ("swiglu", "bias_gelu", "residual_rms", "scaled_swiglu", "every_feature")

DTYPES = ("bf16", "f16")
RAGGED_M = (1, 7, 63, 129, 1000)
RAGGED_N = (8, 24, 104, 130, 1000, 4104)
# (M, N, K) for the library: ragged in every axis, one tile and many; N is made a multiple of what the epilogue needs.
FEW_EXTENTS = ((129, 264, 72), (1000, 520, 40))
RAGGED_K = (7, 8, 40, 72, 4096)
MAJORS = ("row", "column")
# Every way a caller may hold a matrix; see `gpu_checks.LAYOUTS` for what each is.
MATRIX_LAYOUTS = (
    "row",
    "column",
    "pitched",
    "odd pitch",
    "odd base",
    "every other row",
    "every other column",
    "expanded rows",
    "expanded columns",
)
VECTOR_LAYOUTS = ("dense", "strided", "odd base", "expanded")

# Llama-3-8B, 8192 tokens: (M, N, K) of the forward GEMM.
LLAMA_8B = {
    "swiglu": (8192, 28672, 4096),
    "scaled_swiglu": (8192, 28672, 4096),
    "bias_gelu": (8192, 28672, 4096),
    "residual_rms": (8192, 4096, 14336),
}

# Per epilogue, the size of its tiles at which products (of gate and up) and sums come near the largest f16.
NEAR_LIMIT = {"swiglu": (150.0,), "scaled_swiglu": (150.0,), "bias_gelu": (1.5e4,), "residual_rms": (1.5e4,)}


@attrs.frozen
class Subject:
    """An epilogue with its host.

    Attributes:
        name: the forward epilogue's name, a key of SOURCES (or of what was given to `add`).
        backward: the derived backward of it; otherwise the forward, with what the backward needs saved.
        on_gemm: the accumulator comes from a matmul; otherwise it is a plain tensor.
    """

    name: str
    backward: bool
    on_gemm: bool

    def __str__(self) -> str:
        return f"{self.name} {'backward' if self.backward else 'forward'} {'on GEMM' if self.on_gemm else 'hosted'}"

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue that runs."""
        derivative = derived(self.name)
        return derivative.backward if self.backward else derivative.forward


@attrs.frozen
class Case:
    """One run: see the module's docstring.

    `magnitude` scales the accumulator and every tile input; `tiling` is an index of `plan.TILINGS`, None for the
    heuristic's choice; `parts` an index of `split.TILINGS` and how many parts K is split into; `tame` inputs are those
    that random programs are written for: numbers in [-2, 2], indices in [-2, 9].
    """

    subject: Subject
    dtype: str
    m: int
    n: int
    k: int
    a: str = "row"
    b: str = "row"
    tile: str = "row"
    vector: str = "dense"
    vector_dtype: str = "f32"
    magnitude: float = 1.0
    tiling: int | None = None
    tame: bool = False
    parts: tuple[int, int] | None = None

    def __str__(self) -> str:
        layouts = f"a={self.a}, b={self.b}, " if self.subject.on_gemm else ""
        return (
            f"{self.subject}, {self.dtype}, M={self.m} N={self.n} K={self.k}, {layouts}tile={self.tile}, "
            f"vector={self.vector} {self.vector_dtype}, magnitude {self.magnitude:g}"
            f"{'' if self.tiling is None else f', {TILINGS[self.tiling]}'}"
            f"{'' if self.parts is None else f', {split.TILINGS[self.parts[0]]} in {self.parts[1]} parts'}"
        )


_added: dict[str, Epilogue] = {}


def add(name: str, epilogue: Epilogue) -> None:
    """Let subjects be of an epilogue that is in no file."""
    _added[name] = epilogue


def source(name: str) -> Epilogue:
    """The forward epilogue of that name, as its author wrote it."""
    return _added[name] if name in _added else SOURCES[name]


def derived(name: str) -> Derivative:
    """The forward with its saves, and the backward with respect to every parameter."""
    return _derived(source(name))


@cache
def _derived(epilogue: Epilogue) -> Derivative:
    return derive(epilogue)


def subjects(names: Sequence[str] = tuple(SOURCES)) -> list[Subject]:
    """Forward and backward of each, on both hosts, as far as there are kernels."""
    every = [Subject(*choice) for choice in itertools.product(names, (False, True), (True, False))]
    return [subject for subject in every if not lacking(subject)]


def lacking(subject: Subject) -> str | None:
    """Why there is no kernel for a subject, or None.  That a backward has nothing to compute is one reason."""
    epilogue = subject.epilogue
    if not epilogue.outputs:
        return "there is nothing to compute"
    if subject.on_gemm and epilogue.accumulator is None:
        return "it has no accumulator"
    try:
        for item in (*loaded_params(epilogue, subject.on_gemm), *epilogue.outputs):
            relative_width(epilogue, item)
    except CodaUnsupportedError as error:
        return str(error)
    return None


def fitted(name: str, n: int) -> int:
    """The least N that is no smaller and that the epilogue takes."""
    steps = (granularity(e) for e in (source(name), derived(name).forward, derived(name).backward))
    step = max(steps)
    return -(-n // step) * step


def pairwise(factors: dict[str, Sequence], seed: int = 0) -> Iterator[dict]:
    """Choices in which every pair of values of two factors occurs, in far fewer rows than the whole product."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {((x, u), (y, v)) for x, y in itertools.combinations(names, 2) for u in factors[x] for v in factors[y]}
    while missing:
        # Start from a missing pair, so that each row makes progress; fill in what covers most of the others.
        choice = dict(min(missing, key=repr))
        for name in rng.sample(names, len(names)):
            if name not in choice:
                gain = {value: _gain(missing, choice, names, name, value) for value in factors[name]}
                best = max(gain.values())
                choice[name] = rng.choice([value for value in factors[name] if gain[value] == best])
        missing -= {((x, choice[x]), (y, choice[y])) for x, y in itertools.combinations(names, 2)}
        yield choice


def _gain(missing: set, choice: dict, names: list[str], name: str, value: object) -> int:
    pairs = 0
    for other, chosen in choice.items():
        ends = sorted(((name, value), (other, chosen)), key=lambda end: names.index(end[0]))
        pairs += tuple(ends) in missing
    return pairs


def ragged(subject: Subject) -> list[Case]:
    """A pairwise subset of dtypes, ragged extents and layouts."""
    if subject.name not in CORE:
        return []
    factors: dict[str, Sequence] = {
        "dtypes": (("bf16", "f32"), ("bf16", "same"), ("f16", "same")),
        "m": RAGGED_M,
        "n": RAGGED_N,
        "tile": MATRIX_LAYOUTS,
        "vector": VECTOR_LAYOUTS,
    }
    if subject.on_gemm:
        # With A and B both of equal rows, every element of the accumulator has the same rounding error, and sums of
        # them are beyond what f32 can do; so B's rows stay distinct.
        distinct = [layout for layout in MATRIX_LAYOUTS if layout != "expanded rows"]
        factors |= {"k": RAGGED_K, "a": MATRIX_LAYOUTS, "b": distinct}
    cases = []
    for choice in pairwise(factors):
        dtype, vectors = choice.pop("dtypes")
        cases.append(Case(subject, **({"k": 0} | choice), dtype=dtype, vector_dtype=vectors, parts=pinned(subject)))
    return cases


def pinned(subject: Subject) -> tuple[int, int] | None:
    """A tiling for all ragged extents of a subject, since the heuristic would take one, hence compile a kernel, for
    nearly each; they take turns from subject to subject."""
    if not subject.on_gemm:
        return None
    usual = [i for i, t in enumerate(split.TILINGS) if t.tile[1] % 32 == 0 and t.tile[0] * t.tile[1] <= 128 * 128]
    return usual[core_turn(subject) % len(usual)], 1


def core_turn(subject: Subject) -> int:
    """A number that differs among the core's forwards and backwards."""
    return 2 * CORE.index(subject.name) + subject.backward


def sweep(subject: Subject) -> list[Case]:
    """Every ragged extent with every dtype and every pair of majors; the other layouts take turns."""
    if subject.name not in CORE:
        return []
    ks, majors = (RAGGED_K, MAJORS) if subject.on_gemm else ((0,), ("row",))
    product = itertools.product(DTYPES, RAGGED_M, RAGGED_N, ks, majors, majors)
    return [
        Case(
            subject,
            *choice,
            tile=MATRIX_LAYOUTS[i % len(MATRIX_LAYOUTS)],
            vector=VECTOR_LAYOUTS[i // 2 % len(VECTOR_LAYOUTS)],
            vector_dtype=("f32", "same")[i % 2],
            parts=pinned(subject),
        )
        for i, choice in enumerate(product)
    ]


def empty(subject: Subject) -> list[Case]:
    """Extents of zero.  K = 0 has an accumulator of zeros."""
    if subject.name not in (*CORE, *FEATURES):
        return []
    extents = [(0, 24, 40), (129, 0, 40), (0, 0, 0)]
    if subject.on_gemm:  # with no K there are kernels all the same
        extents += [(0, 24, 0)] + ([(129, 24, 0)] if subject.name in CORE else [])
    parts = pinned(subject) if subject.name in CORE else None
    return [Case(subject, dtype, *extent, vector_dtype="same", parts=parts) for dtype in DTYPES for extent in extents]


def turn_of(name: str) -> int:
    """A number that differs from subject to subject, to take turns by."""
    return sorted(SOURCES).index(name)


def library(subject: Subject) -> list[Case]:
    """A few cases: the dtype and layouts take turns from subject to subject.

    The second on a GEMM has a tiling on purpose, since for so little work the heuristic takes the smallest, and is left
    out of an epilogue that does nothing but a map of its accumulator.  Hosted, one kernel is enough for all.
    """
    if subject.name in CORE:
        return []
    turn, cases = turn_of(subject.name), []
    for i, (m, n, k) in enumerate(FEW_EXTENTS):
        if i and subject.on_gemm and _is_map(source(subject.name)):
            break
        tiling = (turn + subject.backward) % len(TILINGS) if i and subject.on_gemm else None
        dtype = DTYPES[(turn + i * subject.on_gemm) % 2]
        layout = MATRIX_LAYOUTS[:3][(turn + i) % 3] if subject.on_gemm else "row"
        vector = VECTOR_LAYOUTS[(turn + i) % len(VECTOR_LAYOUTS)]
        cases.append(Case(subject, dtype, m, fitted(subject.name, n), k, tile=layout, vector=vector, tiling=tiling))
    return cases


def samples(subject: Subject) -> list[Case]:
    """Samples of a multiple of 16 rows, and of none: few and large ones, many and small ones."""
    if not source(subject.name).has_samples:
        return []
    rows = (1, 77, 80, 128, 384, 1000, 1024)
    return [
        Case(
            subject,
            DTYPES[i % 2],
            m,
            fitted(subject.name, (264, 130)[i // 2 % 2]),
            72,
            vector=VECTOR_LAYOUTS[i % len(VECTOR_LAYOUTS)],
            vector_dtype=("f32", "same")[i % 2],
            tiling=(turn_of(subject.name) + i) % len(TILINGS) if subject.on_gemm and m > 300 else None,
        )
        for i, m in enumerate(rows)
    ]


def _is_map(epilogue: Epilogue) -> bool:
    return len(epilogue.params) == 1 and len(epilogue.stores) == len(epilogue.outputs)


def near_limit(subject: Subject) -> list[Case]:
    """Magnitudes at which f16 outputs come near the largest finite value, 65504, and some pass it."""
    magnitudes = NEAR_LIMIT.get(subject.name, ())
    parts = pinned(subject) if magnitudes else None
    return [
        Case(subject, "f16", 129, 1000, 72, vector_dtype="same", magnitude=magnitude, parts=parts)
        for magnitude in magnitudes
    ]


def tilings(subject: Subject) -> list[Case]:
    """Every second tiling that a GEMM may have, on fewer tiles than multiprocessors and on several for each; the next
    subject has the others."""
    extents = ((1000, 520, 40), (3000, 4104, 1000)) if subject.on_gemm and subject.name in CORE else ()
    return [
        Case(subject, "bf16", *extent, vector_dtype="same", tiling=tiling)
        for tiling, extent in itertools.product(range(len(TILINGS)), extents)
        if (tiling + core_turn(subject)) % 2
    ]


PART_ROWS = (1, 16, 63, 80, 130, 256)  # M: less than a tile, and than the rows of A that are loaded, and more


def parts(subject: Subject) -> list[Case]:
    """Few tiles: every tiling that is for them with every number of parts of K, among all subjects."""
    if not subject.on_gemm or subject.name not in CORE:
        return []
    cases = []
    for i, (tiling, count) in enumerate(itertools.product(range(len(split.TILINGS)), split.SPLITS)):
        turn, round_ = i % (2 * len(CORE)), i // (2 * len(CORE))
        b = "row" if split.TILINGS[tiling].tile[1] % split.LEAST_ROW else MAJORS[round_ // 2 % 2]
        if turn == core_turn(subject):
            m, n = PART_ROWS[(i + round_) % len(PART_ROWS)], fitted(subject.name, (264, 1000)[round_ % 2])
            dtype, a = DTYPES[(i + round_) % 2], MAJORS[(round_ + (m > 130)) % 2]
            k = (2088, 4096)[round_ // 2 % 2]
            cases.append(Case(subject, dtype, m, n, k, a=a, b=b, parts=(tiling, count)))
    return cases


def llama(subject: Subject) -> list[Case]:
    """The real layer's shapes, where the subject has one."""
    if subject.name not in LLAMA_8B:
        return []
    return [Case(subject, dtype, *LLAMA_8B[subject.name]) for dtype in DTYPES]


def huge(subject: Subject) -> list[Case]:
    """Tensors past 2^31 elements."""
    return [Case(subject, "bf16", 70000, 32768, 64)] if subject.name in ("swiglu", "residual_rms") else []


GROUPS: dict[str, Callable[[Subject], list[Case]]] = {
    "ragged": ragged,
    "library": library,
    "samples": samples,
    "sweep": sweep,
    "empty": empty,
    "near limit": near_limit,
    "tilings": tilings,
    "parts": parts,
    "llama": llama,
    "huge": huge,
}
