"""An `fn` is inlined where it is called, so it cannot call itself, not even through others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codalang.errors import CodaError, CodaNameError
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.files import File


def check_recursion(file: File) -> None:
    """Raise CodaNameError where an `fn` of a file calls itself.  Depth first, iterative.

    Files do not import each other in circles, so a circle of calls stays in one file.
    """
    functions = {d.name.text: d for d in file.definitions if isinstance(d, syntax.Function)}
    finished: set[str] = set()
    for root in functions:
        path: dict[str, syntax.Call | None] = {}
        stack: list[tuple[str, syntax.Call | None, Iterator[syntax.Call]]] = []

        def enter(name: str, call: syntax.Call | None, path: dict = path, stack: list = stack) -> None:
            path[name] = call
            stack.append((name, call, _calls(functions[name], functions)))

        if root not in finished:
            enter(root, None)
        while stack:
            name, _, calls = stack[-1]
            call = next(calls, None)
            if call is None:
                finished.add(name)
                del path[name]
                stack.pop()
            elif call.function.text in path:
                raise _cycle(file, call, path)
            elif call.function.text not in finished:
                enter(call.function.text, call)


def _cycle(file: File, last: syntax.Call, path: Mapping[str, syntax.Call | None]) -> CodaError:
    names = list(path)
    cycle = names[names.index(last.function.text) + 1 :]
    calls = [path[name] for name in cycle][:4]
    notes = tuple((file.locate(c.span), f"which calls `{shorten(c.function.text)}`") for c in calls if c is not None)
    return CodaNameError(
        f"`{shorten(last.function.text)}` calls itself" + (" through other functions" if cycle else ""),
        file.locate(last.span),
        notes=notes,
        hint="an `fn` is inlined where it is called, so it cannot be recursive",
    )


def _calls(function: syntax.Function, functions: Mapping[str, syntax.Function]) -> Iterator[syntax.Call]:
    for statement in function.statements:
        for expression in syntax.expressions(statement):
            for part in syntax.walk(expression):
                if isinstance(part, syntax.Call) and part.function.text in functions:
                    yield part
