"""Names for what a derivation adds: `d_y`, `d_acc`, `saved_acc`, numbered where the user has taken them; and the names
that a caller chooses among."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from codalang.errors import CodaCallError
from codalang.ir.epilogue import Epilogue
from codalang.ir.names import Namer


class Names:
    """Hands out names that no parameter, output or dimension of the forward has.

    `gradients` and `cotangents` do not depend on which of them are wanted, so that a subset keeps its names.
    """

    def __init__(self, epilogue: Epilogue) -> None:
        used = [*epilogue.dims, *(p.name for p in epilogue.params), *(o.name for o in epilogue.outputs)]
        self._namer = Namer(used)
        self.gradients = {p.name: self.fresh(f"d_{p.name}") for p in epilogue.params}
        self.cotangents = {o.name: self.fresh(f"d_{o.name}") for o in epilogue.outputs}
        self._reserved = {*used, *self.gradients.values(), *self.cotangents.values()}

    def fresh(self, wanted: str) -> str:
        """The wanted name, or that with the first free number behind it."""
        return self._namer.fresh(wanted)

    def cotangent_hint(self, value: str) -> str:
        """What to call the cotangent of a `let`: `d_x`, or `dx` beside a parameter or output `d_x`."""
        return f"d{value}" if f"d_{value}" in self._reserved else f"d_{value}"


def chosen(derived: str, argument: str, names: Collection[str] | None, known: Sequence[str]) -> list[str]:
    """The names that a caller chose, in the order of those that there are; None stands for all.

    `derived` is what the derivation is of.  Raises CodaCallError for a name that it does not have.
    """
    if names is None:
        return list(known)
    if not isinstance(names, Collection) or isinstance(names, str) or not all(name in known for name in names):
        raise CodaCallError(
            f"`{argument}` of `{derived}` must be a collection of names out of {', '.join(known) or 'none'}; "
            f"got {names!r}",
            argument=argument,
        )
    return [name for name in known if name in names]
