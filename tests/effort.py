"""How many examples a property takes that is too slow for the usual number: the profiles are in tests/conftest.py."""

from __future__ import annotations

from hypothesis import settings

_USUAL = settings.get_profile("ci").max_examples


def examples(count: int) -> settings:
    """`count` of them every day, and in a deep run as many as every property."""
    deep = settings.default.max_examples
    return settings(max_examples=count if deep <= _USUAL else deep)
