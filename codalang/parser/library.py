"""Where the standard library lies: `stdlib/`, inside the package where it is installed, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".coda"


def library_names() -> tuple[str, ...]:
    """The names of the standard library, sorted."""
    folder = _folder()
    return tuple(sorted(p.stem for p in folder.glob(f"*{SUFFIX}"))) if folder else ()


def library_path(name: str) -> Path | None:
    """The file of a name of the standard library, or None where it has no such name."""
    folder = _folder()
    return folder / f"{name}{SUFFIX}" if folder and name in library_names() else None


def _folder() -> Path | None:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "stdlib", package.parent / "stdlib"):
        if folder.is_dir():
            return folder
    return None
