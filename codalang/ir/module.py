"""What one source file defines and imports: its epilogues, states and programs by name, `fn`s already inlined."""

from __future__ import annotations

import attrs

from codalang.errors import Source
from codalang.ir.epilogue import Epilogue
from codalang.ir.program import Apply, Program
from codalang.ir.states import StateDef


@attrs.frozen
class Module:
    """The epilogues, states and programs of a source file, in textual order after those that it imports.

    `imported` are the other files that it is made of, as they were read.
    """

    source: Source
    epilogues: dict[str, Epilogue]
    states: dict[str, StateDef] = attrs.field(factory=dict)
    imported: tuple[Source, ...] = ()
    programs: dict[str, Program] = attrs.field(factory=dict)

    def precise(self) -> Module:
        """The same with every epilogue a `precise` one."""
        programs = {
            name: attrs.evolve(
                program,
                statements=tuple(
                    attrs.evolve(s, epilogue=attrs.evolve(s.epilogue, precise=True)) if isinstance(s, Apply) else s
                    for s in program.statements
                ),
            )
            for name, program in self.programs.items()
        }
        epilogues = {name: attrs.evolve(epilogue, precise=True) for name, epilogue in self.epilogues.items()}
        return attrs.evolve(self, epilogues=epilogues, programs=programs)
