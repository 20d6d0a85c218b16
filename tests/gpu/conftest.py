"""Everything in this folder needs a Hopper GPU: marked `gpu`, and skipped with a word where there is none."""

from collections.abc import Callable

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


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of all selected tests in parallel; a test that finds its kernel takes milliseconds.

    Test modules say what they need in a function `kernels_needed(items)`.
    """
    if not _hopper():
        return
    import gpu_compile

    modules: dict[object, list[pytest.Item]] = {}
    for item in request.session.items:
        modules.setdefault(item.getparent(pytest.Module).obj, []).append(item)
    needed: dict[object, None] = {}
    for module, items in modules.items():
        ask: Callable[[list[pytest.Item]], list] | None = getattr(module, "kernels_needed", None)
        needed.update(dict.fromkeys(ask(items) if ask else []))
    gpu_compile.compile_all(needed)
