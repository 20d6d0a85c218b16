"""The names of dtypes, and those that people are used to from elsewhere."""

from __future__ import annotations

from codalang.errors import CodaTypeError
from codalang.ir.types import PARAM_DTYPES, STORAGE_DTYPES
from codalang.parser.complaints import shorten
from codalang.parser.files import File
from codalang.parser.syntax import Word

_DTYPE_NAMES = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "int": "i32",
    "int32": "i32",
    "long": "i64",
    "int64": "i64",
    "mask": "bool",
    "boolean": "bool",
}


def storage_dtype(word: Word | None, file: File, known: tuple[str, ...] = STORAGE_DTYPES) -> str | None:
    """An annotated dtype, None where there is none.  Raises CodaTypeError where it is none of those that are known."""
    if word is None or word.text in known:
        return word.text if word else None
    near = _DTYPE_NAMES.get(word.text, word.text)
    if near in PARAM_DTYPES and near not in known:
        raise CodaTypeError(
            f"this cannot be stored as `{shorten(word.text)}`",
            file.locate(word.span),
            hint=f"there are {', '.join(known)}",
        )
    raise CodaTypeError(
        f"unknown dtype `{shorten(word.text)}`",
        file.locate(word.span),
        hint=f"did you mean `{near}`?" if near in known else f"there are {', '.join(known)}",
    )
