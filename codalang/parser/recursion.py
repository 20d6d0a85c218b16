"""An `fn` and a program are inlined where they are called, so they cannot call themselves, not even through others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codalang.errors import CodaError, CodaNameError
from codalang.parser import syntax
from codalang.parser.complaints import shorten
from codalang.parser.files import File


def check_recursion(file: File, kind: type[syntax.Function] | type[syntax.Program]) -> None:
    """Raise CodaNameError where an `fn`, or a program, of a file calls itself.  Depth first, iterative.

    Files do not import each other in circles, so a circle of calls stays in one file.
    """
    functions = {d.name.text: d for d in file.definitions if isinstance(d, kind)}
    finished: set[str] = set()
    for root in functions:
        path: dict[str, syntax.Call | None] = {}
        stack: list[tuple[str, syntax.Call | None, Iterator[syntax.Call]]] = []

        def enter(name: str, call: syntax.Call | None, path: dict = path, stack: list = stack) -> None:
            path[name] = call
            stack.append((name, call, calls_of(functions[name], functions)))

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
                raise _cycle(file, call, path, kind)
            elif call.function.text not in finished:
                enter(call.function.text, call)


def _cycle(
    file: File,
    last: syntax.Call,
    path: Mapping[str, syntax.Call | None],
    kind: type[syntax.Function] | type[syntax.Program],
) -> CodaError:
    what, others = ("an `fn`", "functions") if kind is syntax.Function else ("a program", "programs")
    names = list(path)
    cycle = names[names.index(last.function.text) + 1 :]
    calls = [path[name] for name in cycle][:4]
    notes = tuple((file.locate(c.span), f"which calls `{shorten(c.function.text)}`") for c in calls if c is not None)
    return CodaNameError(
        f"`{shorten(last.function.text)}` calls itself" + (f" through other {others}" if cycle else ""),
        file.locate(last.span),
        notes=notes,
        hint=f"{what} is inlined where it is called, so it cannot be recursive",
    )


def calls_of(
    function: syntax.Function | syntax.Program, functions: Mapping[str, syntax.Function | syntax.Program]
) -> Iterator[syntax.Call]:
    """The calls of some functions, or of some programs, that one makes."""
    for statement in function.statements:
        for expression in syntax.expressions(statement):
            for part in syntax.walk(expression):
                if isinstance(part, syntax.Call) and part.function.text in functions:
                    yield part
