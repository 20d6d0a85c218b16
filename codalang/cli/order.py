"""The words of a command line, positional arguments first.

argparse takes what follows `--dims T=8` for another size, and looks for an optional NAME only right behind the file.
With the file and the name in front, `run --dims T=8 FILE NAME` and `grad FILE --forward NAME` mean what they say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_SEVERAL = ("+", "*")


def positionals_first(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The arguments of a parser, those without an option in front; what `--` ends stays behind it."""
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    positional: list[str] = []
    options: list[str] = []
    index = 0
    while index < len(words) and words[index] != "--":
        word = words[index]
        index += 1
        if word == "-" or not word.startswith("-"):
            positional.append(word)
            continue
        options.append(word)
        index += (taken := _values(_action(known, word), words[index:]))
        options += words[index - taken : index]
    return positional + options + list(words[index:])


def _action(known: dict[str, argparse.Action], word: str) -> argparse.Action | None:
    """The option that a word names, maybe abbreviated; None where its value is in the word, too, or there is none."""
    if word in known:
        return known[word]
    if "=" in word or not word.startswith("--"):
        return None
    found = {id(action): action for flag, action in known.items() if flag.startswith(word)}
    return next(iter(found.values())) if len(found) == 1 else None


def _values(action: argparse.Action | None, words: Sequence[str]) -> int:
    """How many of the words that follow are an option's values."""
    if action is None or action.nargs == 0 or not words:
        return 0
    if action.nargs not in _SEVERAL:
        return 1
    count = 0
    for word in words:
        # Sizes have a `=`, what follows them has none; a first word without is told to be no size.
        if word.startswith("-") or (count and action.metavar == "NAME=SIZE" and "=" not in word):
            break
        count += 1
    return count
