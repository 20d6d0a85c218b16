"""Everything in this folder needs a Hopper GPU: marked `gpu`, and skipped with a word where there is none."""

import pytest
import torch


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, and skip where it must be."""
    skip = pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not _hopper():
                item.add_marker(skip)
