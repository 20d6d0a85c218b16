"""Configurations that `codalang tune` found best, kept on disk; calls prefer them to the heuristic's.

One entry per GPU, kernel (its spec, configuration left open) and extents.  Entries lie beside the compiled objects and
are as private, atomic and versioned as they are (see `cache`): a change in the lowering finds none of the old ones.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from codalang.lower import cache, split
from codalang.lower.spec import Config, KernelSpec

_SUFFIX = ".json"


@functools.cache
def store() -> cache.Cache:
    """The folder of this process."""
    return cache.Cache(kind="tuned")


_preferred = True


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Meanwhile the heuristic decides alone, for calls of a signature that is new to this process."""
    global _preferred
    before, _preferred = _preferred, False
    try:
        yield
    finally:
        _preferred = before


def choose(spec: KernelSpec, m: int, n: int, k: int, device: torch.device) -> Config:
    """The configuration for an accumulator of m rows and n columns over k: what was tuned for the device, else the
    heuristic's.

    Raises CodaUnsupportedError where the epilogue's slabs fit in no tiling.
    """
    found = lookup(spec, m, n, k, gpu_of(device)) if _preferred and device.type == "cuda" else None
    return found or split.choose(spec, m, n, k)


def lookup(spec: KernelSpec, m: int, n: int, k: int, gpu: str) -> Config | None:
    """What was remembered, if anything."""
    if not (store().root / store().kind).is_dir():  # nobody tunes by default: then this is all that it costs
        return None
    data = store().find(_key(spec, m, n, k, gpu), _SUFFIX)
    return _config(json.loads(data)["config"]) if data else None


def remember(spec: KernelSpec, m: int, n: int, k: int, gpu: str, config: Config, **facts: Any) -> bool:
    """Keep a configuration, with facts for people who look into the file.  False, with a warning, where it cannot be
    kept.  Calls whose signature this process has seen go on as they are."""
    entry = {"gpu": gpu, "epilogue": spec.epilogue.name, "extents": [m, n, k], "config": attrs.asdict(config), **facts}
    return store().replace(_key(spec, m, n, k, gpu), _SUFFIX, (json.dumps(entry, indent=1) + "\n").encode())


def _key(spec: KernelSpec, m: int, n: int, k: int, gpu: str) -> str:
    return cache.key(spec=repr(attrs.evolve(spec, config=None)), extents=f"{m} {n} {k}", gpu=gpu)


def _config(fields: dict[str, Any]) -> Config:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Config(**values)


@functools.cache
def gpu_of(device: torch.device) -> str:
    """The model of a GPU."""
    return torch.cuda.get_device_name(device)
