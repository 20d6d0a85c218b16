"""How a process starts: what it imports, and the parser's table in place of an analysis of the grammar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lark
import pytest

from codalang import cli
from codalang.parser import reader, table

ROOT = Path(__file__).parents[1]

# What takes long to import, and a start does not need: the device compiler, what torch has for its own compiler,
# a library of graphs, what only tests need.
HEAVY = {"cutlass", "cuda", "tvm_ffi", "torch._dynamo", "torch._inductor", "networkx", "sympy", "hypothesis"}


def imported_by(statements: str) -> set[str]:
    """The modules that a fresh process imports for some statements, beside those of `import torch`."""
    program = f"""
import sys, torch
before = set(sys.modules)
{statements}
print(*sorted(set(sys.modules) - before))
"""
    run = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def within(modules: set[str]) -> set[str]:
    """The packages of `HEAVY` that some modules are of."""
    return {name for name in HEAVY if any(f"{m}.".startswith(f"{name}.") for m in modules)}


def test_a_load_imports_nothing_heavy() -> None:
    modules = imported_by("import codalang; codalang.load('swiglu')")
    assert "codalang.torch.module" in modules
    assert not within(modules)


def test_a_check_on_the_command_line_imports_what_it_needs() -> None:
    program = "import sys; from codalang.cli import main; print(main(['check', 'swiglu']), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "0" and "codalang.parser" in modules
    assert not {"torch", "codalang.autodiff", "codalang.lower", "codalang.cli.kernels"} & set(modules)


def test_every_command_is_in_the_module_that_is_said_to_have_it() -> None:
    for command, module in cli._MODULES.items():
        _, commands = cli._parsers(command)
        assert command in commands and cli._MODULES.keys() >= commands.keys()
        assert {name for name, other in cli._MODULES.items() if other == module} == set(commands)
    _, commands = cli._parsers("")
    assert list(commands) == list(cli._MODULES)


def test_a_kernel_on_disk_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    program = """
import sys, torch
from codalang.cli.specs import forward_spec
from codalang.lower import load
from codalang.parser import parse
from codalang.sources import resolve
spec = forward_spec(parse(resolve("swiglu")).epilogues["swiglu"], "bf16", 4096, 4096, 4096)
assert callable(load.launcher(spec))
print(*sys.modules)
"""
    environment = os.environ | {"CODALANG_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-W", "ignore", "-c", program]
    cold, warm = (
        set(subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.split())
        for _ in range(2)
    )
    assert "cutlass" in cold
    assert "tvm_ffi" in warm and "cutlass" not in warm


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of the test's own."""
    path = tmp_path / "grammar.json"
    path.write_bytes(table.TABLE.read_bytes())
    monkeypatch.setattr(table, "TABLE", path)
    yield path


@pytest.fixture
def analyses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that lark has analysed since."""
    seen: list[str] = []
    initialize = lark.Lark.__init__

    def counted(self: lark.Lark, grammar: str, **options: Any) -> None:
        seen.append(grammar)
        initialize(self, grammar, **options)

    monkeypatch.setattr(lark.Lark, "__init__", counted)
    return seen


def transitions(parser: lark.Lark) -> dict[Any, Any]:
    """The automaton, its states numbered in the order in which a walk from the first one meets them."""
    parse_table = parser.parser.parser._parse_table
    numbers = {parse_table.start_states["start"]: 0}
    found = {}
    for state in (queue := list(numbers)):
        actions = {}
        for symbol, (action, argument) in sorted(parse_table.states[state].items()):
            if isinstance(argument, int) and argument not in numbers:
                numbers[argument] = len(numbers)
                queue.append(argument)
            actions[symbol] = (str(action), numbers[argument] if isinstance(argument, int) else argument)
        found[numbers[state]] = actions
    return found


def test_the_table_is_of_this_grammar_and_this_lark(analyses: list[str]) -> None:
    table.parser()
    assert not analyses, "make the table again, see codalang/parser/table.py"


def test_the_table_is_what_lark_makes_of_the_grammar(copy: Path) -> None:
    kept = table.parser()
    copy.unlink()
    made = table.parser()
    assert transitions(kept) == transitions(made)
    assert [(t.name, t.pattern.to_regexp(), t.priority) for t in kept.terminals] == [
        (t.name, t.pattern.to_regexp(), t.priority) for t in made.terminals
    ]
    assert kept.lexer_conf.ignore == made.lexer_conf.ignore


def test_write_makes_a_table_that_is_used(copy: Path, analyses: list[str]) -> None:
    copy.unlink()
    table.write()
    analyses.clear()
    assert table.parser().terminals and not analyses


@pytest.mark.parametrize("fault", ["missing", "empty", "cut off", "not text", "of another grammar", "of another lark"])
def test_without_a_table_of_its_own_the_grammar_is_analysed(fault: str, copy: Path, analyses: list[str]) -> None:
    data = copy.read_bytes()
    content = json.loads(data)
    grammar, version = content["of"]
    faulty = {
        "empty": b"",
        "cut off": data[: len(data) // 2],
        "not text": b"\xff\xfe" + data,
        "of another grammar": json.dumps(content | {"of": [grammar[::-1], version]}).encode(),
        "of another lark": json.dumps(content | {"of": [grammar, version + ".1"]}).encode(),
    }
    copy.unlink() if fault == "missing" else copy.write_bytes(faulty[fault])
    hooks = {"transformer": reader._ToSyntax(), "postlex": reader.NewlineFilter()}
    parser = table.parser(**hooks)
    assert len(analyses) == 1
    text = (ROOT / "stdlib/swiglu.coda").read_text()
    assert parser.parse(text) == reader.parser().parse(text)
