"""How property tests run: a fresh seed each time, printed so that a failure can be had again; and the command line.

pytest                                 profile `ci`: 100 examples per property
pytest --hypothesis-profile=deep       2000 examples per property
CODALANG_SEED=123 pytest               the same examples as the run that printed this seed
"""

from __future__ import annotations

import io
import os
import secrets
import sys
from collections.abc import Callable

import hypothesis
import pytest

# One thread per worker: pytest-xdist runs as many workers as there are cores.
import torch
from hypothesis import HealthCheck, settings

SEED = "CODALANG_SEED"

torch.set_num_threads(1)
settings.register_profile(
    "ci", max_examples=100, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", settings.get_profile("ci"), max_examples=2000)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist inherit the environment, hence the seed.
    seed = os.environ.setdefault(SEED, str(secrets.randbelow(2**32)))
    if config.getoption("--hypothesis-seed", None) is None:
        hypothesis.core.global_force_seed = int(seed)


def pytest_report_header() -> str:
    return f"{SEED}={os.environ[SEED]}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit code, what it wrote, what it wrote to stderr)."""
    from codalang.cli import main

    def call(*arguments: object, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            data = stdin if isinstance(stdin, bytes) else stdin.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call
