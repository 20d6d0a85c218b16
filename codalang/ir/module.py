"""What one source file defines: its epilogues by name, `fn`s already inlined."""

from __future__ import annotations

import attrs

from codalang.errors import Source
from codalang.ir.epilogue import Epilogue


@attrs.frozen
class Module:
    """The epilogues of a source file, in textual order."""

    source: Source
    epilogues: dict[str, Epilogue]
