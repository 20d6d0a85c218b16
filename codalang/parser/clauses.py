"""A `state` definition -> its functions with their parameters.

    carry m = -inf, s = 0                     what is carried, and from where it starts
    update { return (...) }                   of the carried values and the inputs, gives carried values
    merge { return (...) }                    of a_<carried> and b_<carried>, gives carried values
    finalize (lse) = (m + log(s))             of the carried values, gives the results that it names
    vjp (x) = (d_lse * exp(x - lse))          of inputs, results and d_<result>s, gives a cotangent per float input

`= (...)` and `{ ... return (...) }` are the same.  Without a vjp a state cannot be differentiated.
"""

from __future__ import annotations

import attrs

from codalang.errors import CodaError, CodaNameError, CodaSyntaxError, CodaTypeError, Loc
from codalang.ir.types import Dtype
from codalang.parser import syntax
from codalang.parser.complaints import shorten, suggestion
from codalang.parser.files import File
from codalang.parser.syntax import Span, Word

_FORMS = {
    "carry": "carry m = -inf, s = 0",
    "update": "update { ... return (m, s) }",
    "merge": "merge { ... return (m, s) }",
    "finalize": "finalize (result) = (m + log(s))",
    "vjp": "vjp (x) = (d_result * x)",
}
_INPUT_DTYPES = ("f32", "i32", "bool")
_CARRIED_DTYPES = ("f32", "i32")


@attrs.frozen
class Part:
    """One function of a state, as an `fn` whose number of results is given."""

    function: syntax.Function
    wanted: int
    because: str  # what the number of results must be that of


@attrs.frozen
class Parts:
    """A state definition, its clauses complete."""

    inputs: tuple[tuple[str, Dtype], ...]
    carried: tuple[tuple[str, Dtype], ...]
    initial: tuple[syntax.Literal, ...]
    results: tuple[Word, ...]
    update: Part
    merge: Part
    finalize: Part
    vjp: Part | None

    @property
    def functions(self) -> tuple[Part, ...]:
        """The functions that there are."""
        return (self.update, self.merge, self.finalize, *([self.vjp] if self.vjp else []))


def parts(definition: syntax.State, file: File) -> Parts:
    """The parts of a state.  Raises CodaSyntaxError, CodaNameError or CodaTypeError for what is wrong with a clause."""
    clauses = _clauses(definition, file)
    carry, update, merge, finalize = (clauses[word] for word in ("carry", "update", "merge", "finalize"))
    assert isinstance(carry, syntax.Carry)
    assert isinstance(finalize, syntax.Clause)
    if not definition.inputs:
        raise CodaTypeError(
            f"state `{shorten(definition.name.text)}` has no input",
            file.locate(definition.name.span),
            hint=f"name what is folded: `state {shorten(definition.name.text)}(x) {{`",
        )
    inputs = tuple((i.name.text, _dtype(i.dtype, _INPUT_DTYPES, file)) for i in definition.inputs)
    carried = tuple((c.name.text, _dtype(c.dtype, _CARRIED_DTYPES, file)) for c in carry.carried)
    input_words = tuple(i.name for i in definition.inputs)
    carried_words = tuple(c.name for c in carry.carried)
    results = finalize.names
    assert results is not None
    _distinct((*input_words, *carried_words), file)
    _distinct((*input_words, *results), file)
    sides = tuple(Word(f"{side}_{w.text}", w.span) for side in "ab" for w in carried_words)
    many = f"{_count(len(carried), 'value')} {'is' if len(carried) == 1 else 'are'} carried"
    named = f"it names {_count(len(results), 'result')}"
    vjp = _vjp(clauses.get("vjp"), inputs, input_words, results, file)
    return Parts(
        inputs,
        carried,
        tuple(_initial(c, dtype, file) for c, (_, dtype) in zip(carry.carried, carried, strict=True)),
        results,
        _part(update, (*carried_words, *input_words), len(carried), many),
        _part(merge, sides, len(carried), many),
        _part(finalize, carried_words, len(results), named),
        vjp,
    )


def _clauses(definition: syntax.State, file: File) -> dict[str, syntax.Carry | syntax.Clause]:
    """The clauses by their words, each once and in the form that it must have."""
    clauses: dict[str, syntax.Carry | syntax.Clause] = {}
    for clause in definition.clauses:
        word = clause.word
        loc = file.locate(word.span)
        if word.text not in _FORMS:
            hint = suggestion(word.text, _FORMS) or f"a state has {', '.join(_FORMS)}"
            raise CodaSyntaxError(f"unknown clause `{shorten(word.text)}` of a state", loc, hint=hint)
        if word.text in clauses:
            first = file.locate(clauses[word.text].word.span)
            raise CodaSyntaxError(f"a second `{word.text}`", loc, notes=((first, "the first one"),))
        named = None if isinstance(clause, syntax.Carry) else clause.names is not None
        if named is not {"carry": None, "finalize": True, "vjp": True}.get(word.text, False):
            raise CodaSyntaxError(f"`{word.text}` has another form", loc, hint=f"write `{_FORMS[word.text]}`")
        clauses[word.text] = clause
    for word_text, form in _FORMS.items():
        if word_text not in clauses and word_text != "vjp":
            raise CodaSyntaxError(
                f"state `{shorten(definition.name.text)}` has no `{word_text}`",
                file.locate(definition.name.span),
                hint=f"write `{form}`",
            )
    return clauses


def _part(clause: syntax.Carry | syntax.Clause, params: tuple[Word, ...], wanted: int, because: str) -> Part:
    assert isinstance(clause, syntax.Clause)
    return Part(syntax.Function(clause.word, params, clause.statements, clause.end), wanted, because)


def _vjp(
    clause: syntax.Carry | syntax.Clause | None,
    inputs: tuple[tuple[str, Dtype], ...],
    input_words: tuple[Word, ...],
    results: tuple[Word, ...],
    file: File,
) -> Part | None:
    if clause is None:
        return None
    assert isinstance(clause, syntax.Clause)
    assert clause.names is not None
    floats = [name for name, dtype in inputs if dtype is Dtype.F32]
    if [n.text for n in clause.names] != floats:
        first, last = clause.names[0].span, clause.names[-1].span
        raise CodaTypeError(
            f"`vjp` gives a cotangent of each float input: ({', '.join(map(shorten, floats)) or 'there is none'})",
            file.locate(first.to(last)),
            hint=f"write `vjp ({', '.join(map(shorten, floats))}) = (...)`" if floats else "leave `vjp` out",
        )
    cotangents = tuple(Word(f"d_{r.text}", r.span) for r in results)
    because = f"there {'is' if len(floats) == 1 else 'are'} {_count(len(floats), 'float input')}"
    return _part(clause, (*input_words, *results, *cotangents), len(floats), because)


def _distinct(words: tuple[Word, ...], file: File) -> None:
    seen: dict[str, Span] = {}
    for word in words:
        if word.text in seen:
            raise CodaNameError(
                f"`{shorten(word.text)}` is defined twice",
                file.locate(word.span),
                notes=((file.locate(seen[word.text]), "first defined here"),),
            )
        seen[word.text] = word.span


def _dtype(word: Word | None, known: tuple[str, ...], file: File) -> Dtype:
    if word is None:
        return Dtype.F32
    if word.text in known:
        return Dtype(word.text)
    raise CodaTypeError(
        f"this cannot be `{shorten(word.text)}`",
        file.locate(word.span),
        hint=f"there are {', '.join(known)}; what declares none is f32",
    )


def _initial(carried: syntax.Carried, dtype: Dtype, file: File) -> syntax.Literal:
    value = carried.initial
    loc = file.locate(value.span)
    if not isinstance(value, syntax.Literal) or isinstance(value.value, bool):
        raise CodaTypeError(
            f"`{shorten(carried.name.text)}` must start from a number", loc, hint="`-inf` is the identity of max"
        )
    if dtype is Dtype.I32 and not (value.whole and -(2**31) <= value.value < 2**31):
        raise _no_index(carried, loc)
    return value


def _no_index(carried: syntax.Carried, loc: Loc) -> CodaError:
    return CodaTypeError(
        f"`{shorten(carried.name.text)}` is an i32 and must start from an integer of 32 bits",
        loc,
        hint="the largest is 2147483647",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
