"""What docs/language.md and docs/authoring.md say is so: every block of theirs is run.

| block                    | is                                                                                       |
|--------------------------|------------------------------------------------------------------------------------------|
| ```coda                  | a file: parsed, laid out, run tile by tile as whole, its gradients held against autograd  |
| ```coda derived          | the derived backward of the last program, or epilogue, of the block before               |
| ```coda wrong            | a file with a mistake; the ```text block that follows is the error                       |
| ```python                | run, in one namespace per page; a ```text block that follows is what it prints           |
| ```python wrong          | raises an error of codalang; the ```text block that follows is the error                 |

`UPDATE_GOLDEN=1 pytest tests/test_docs.py` writes the derived and the ```text blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from oracles import autograd, derived
from torch import Tensor

from codalang.autodiff import derive
from codalang.cli import main
from codalang.cli.text import derived_program, print_programs
from codalang.errors import CodaError
from codalang.ir import reference
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue
from codalang.ir.ops import OPS, REDUCTIONS
from codalang.ir.printer import print_epilogue
from codalang.ir.types import PARAM_DTYPES, Dtype, Kind
from codalang.ir.verify import verify
from codalang.parser import format_source, parse

ROOT = Path(__file__).parents[1]
LANGUAGE, AUTHORING = (ROOT / "docs" / f"{name}.md" for name in ("language", "authoring"))
PAGES = (LANGUAGE, AUTHORING)
# A whole number of heads of 128 columns, and of tiles; an odd number of rows.
EXTENTS = (6, 256, 3)
TILE = (4, 128)
TOLERANCE = 1e-9

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A fenced block: its page, its words after the fence, its text, and where in the page the text stands."""

    page: Path
    info: str
    text: str
    start: int
    end: int

    @property
    def name(self) -> str:
        """What the block is called in a report: page, line, and first definition."""
        line = self.page.read_text()[: self.start].count("\n")
        return f"{self.page.stem}-{line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [Block(page, m[1], m[2], m.start(2), m.end(2)) for m in _FENCE.finditer(text)]


ALL = [block for page in PAGES for block in blocks(page)]


def of(info: str) -> list[Block]:
    """The blocks of both pages that have this info."""
    return [block for block in ALL if block.info == info]


def after(block: Block, info: str) -> Block | None:
    """The next block, where it has this info."""
    following = ALL[ALL.index(block) + 1 :]
    return following[0] if following and following[0].info == info and following[0].page == block.page else None


def each(info: str) -> pytest.MarkDecorator:
    """A test for each block of an info."""
    return pytest.mark.parametrize("block", of(info), ids=lambda block: block.name)


def compare(block: Block | None, text: str) -> None:
    """The block must hold the text; with UPDATE_GOLDEN, it is made to."""
    assert block is not None, "a block with what comes out must follow"
    text = text if text.endswith("\n") or not text else text + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        page = block.page.read_text()
        # blocks before this one may have been rewritten, so it is found again by its number
        now = blocks(block.page)[blocks_of(block.page).index(block)]
        block.page.write_text(page[: now.start] + text + page[now.end :])
    else:
        assert block.text == text


def shown(error: CodaError) -> str:
    """An error's text, with the standard library's files named from the root of the repository."""
    return str(error).replace(f"{ROOT}{os.sep}", "")


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page as they were when the tests began."""
    return [block for block in ALL if block.page == page]


# ---------------------------------------------------------------- programs


def inputs_for(epilogue: Epilogue) -> dict[str, Tensor]:
    """Random inputs in float64; indices point into the columns."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    for param in epilogue.params:
        rows = EXTENTS[2] if param.type.kind is Kind.ROWS else EXTENTS[0]
        shape = [rows] if param.type.kind.has_rows else []
        shape += [int(param.type.width * EXTENTS[1])] if param.type.width is not None else []
        if param.type.dtype is Dtype.I32:
            inputs[param.name] = torch.randint(0, EXTENTS[1], shape, generator=generator)
        elif param.type.dtype is Dtype.BOOL:
            inputs[param.name] = torch.rand(shape, generator=generator) < 0.5
        else:  # positive: statistics and scales are
            inputs[param.name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25
    return inputs


def assert_close(got: Tensor, want: Tensor, name: str) -> None:
    """Equal by relative 2-norm; integers exactly."""
    assert got.shape == want.shape, name
    if want.is_floating_point():
        assert bool(want.isfinite().all()), name
        assert (got - want).norm() <= TOLERANCE * want.norm(), name
    else:
        assert torch.equal(got, want), name


def epilogues(block: Block) -> Iterator[Epilogue]:
    """The epilogues of a block, verified."""
    for epilogue in parse(block.text).epilogues.values():
        verify(epilogue)
        yield epilogue


@each("coda")
def test_a_program_is_right_and_laid_out(block: Block) -> None:
    assert list(epilogues(block))
    assert format_source(block.text) == block.text


@each("coda")
def test_a_program_runs_tile_by_tile_as_whole(block: Block) -> None:
    for epilogue in epilogues(block):
        inputs = inputs_for(epilogue)
        whole = reference.run(epilogue, inputs, extents=EXTENTS)
        tiled = reference.run_tiled(epilogue, inputs, tile=TILE, extents=EXTENTS)
        for name, value in whole.items():
            assert_close(tiled[name], value, name)


@each("coda")
def test_a_program_has_the_gradients_of_autograd(block: Block) -> None:
    for epilogue in epilogues(block):
        inputs = inputs_for(epilogue)
        outputs = reference.run(epilogue, inputs, extents=EXTENTS)
        generator = torch.Generator().manual_seed(1)
        cotangents = {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in outputs.items()
            if value.is_floating_point()
        }
        wrt = [name for name, value in inputs.items() if value.is_floating_point()]
        got = derived(derive(epilogue, wrt=wrt), inputs, cotangents, EXTENTS)
        want = autograd(epilogue, inputs, cotangents, EXTENTS)
        for name in wrt:
            assert_close(got[name], want[name], name)


@each("coda")
def test_a_program_s_calls_are_as_its_reference(
    block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results and gradients of each `program`, in float64: `codalang run`."""
    path = tmp_path / "block.coda"
    path.write_text(block.text)
    for name in parse(block.text).programs:
        assert main(["run", str(path), name, "--backward", "--dtype", "f64", "--device", "cpu"]) == 0, (
            capsys.readouterr()
        )


@each("coda derived")
def test_a_derived_backward_is_what_is_derived(block: Block) -> None:
    before = ALL[ALL.index(block) - 1]
    assert before.info == "coda"
    *_, epilogue = epilogues(before)
    programs = list(parse(before.text).programs.values())
    if programs:
        compare(block, print_programs([derived_program(programs[-1]).backward]))
    else:
        compare(block, print_epilogue(derive(epilogue).backward))


# ---------------------------------------------------------------- mistakes


@each("coda wrong")
def test_a_mistake_in_a_program_is_answered_as_shown(block: Block) -> None:
    with pytest.raises(CodaError) as caught:
        parse(block.text)
    compare(after(block, "text"), shown(caught.value))


# ---------------------------------------------------------------- Python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, as a reader would type it."""
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    torch.manual_seed(0)
    for block in blocks_of(page):
        if block.info == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(_compiled(block), namespace)
            if after(block, "text") or printed.getvalue():
                compare(after(block, "text"), printed.getvalue())
        elif block.info == "python wrong":
            with pytest.raises(CodaError) as caught:
                exec(_compiled(block), namespace)
            compare(after(block, "text"), shown(caught.value))


def _compiled(block: Block) -> object:
    """The code, whose source can be looked up as that of a file: the builder shows the user's line."""
    import linecache

    name = "example.py"  # where a block stands on its page is not for the page to say
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
    return compile(block.text, name, "exec")


# ---------------------------------------------------------------- completeness


def test_there_is_no_other_kind_of_block() -> None:
    known = {"coda", "coda derived", "coda wrong", "python", "python wrong", "text"}
    assert {block.info for block in ALL} <= known
    for block in of("text"):
        assert ALL[ALL.index(block) - 1].info in ("coda wrong", "python", "python wrong")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_op_is_in_an_example(page: Path) -> None:
    """The reference has an example of each op; both pages name all functions, reductions, dtypes and states."""
    used = [node.op for block in of("coda") if block.page == page for e in epilogues(block) for node in e.nodes]
    if page == LANGUAGE:
        assert set(OPS) - set(used) == set()
    words = set(re.findall(r"\w+", page.read_text()))
    functions = {name for name, info in OPS.items() if info.infix is None} - {"even", "odd"}
    states = set(BUILTIN_STATES) - ({"argmax2"} if page == AUTHORING else set())
    assert (functions | set(REDUCTIONS) | set(PARAM_DTYPES) | states) - words == set()
