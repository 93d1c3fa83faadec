"""Functions of the user that mask a column: `module:function`, from an Arrow array to another of the same length.

A function runs in Spark tasks, so the executors must be able to import it. Its result must depend on nothing but the
values, one by one: the rows of a table come in other pieces when it is copied again, or compared.

An exception of a function may show a value, so its text is not passed on. Only its class and its place are.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from walmere.errors import FunctionFailed


@lru_cache(maxsize=256)
def load(reference: str) -> Callable[[pa.Array], object]:
    """Import a function. Raises FunctionFailed."""
    doing = f"importing the function {reference}"
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        hint = "install the module in the Python of Spark's executors, or put its directory into PYTHONPATH"
        raise FunctionFailed(doing, f"there is no module {error.name}", hint) from None
    except Exception as error:  # the module is the user's
        raise FunctionFailed(doing, f"importing {module} raised {_place(error)}") from None
    if not callable(found):
        raise FunctionFailed(doing, f"{module} has no function {name}", "correct the mask in walmere.toml")
    return found  # type: ignore[no-any-return]


def call(reference: str, values: pa.Array, result: pa.DataType) -> pa.Array:
    """Call a function with a whole column. NULL stays NULL. Raises FunctionFailed."""
    doing = f"masking a column with {reference}"
    try:
        found = load(reference)(values)
    except FunctionFailed:
        raise
    except Exception as error:
        raise FunctionFailed(doing, f"it raised {_place(error)}", "correct the function") from None
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if not isinstance(found, pa.Array):
        raise FunctionFailed(doing, f"it returned {type(found).__name__}", "return a pyarrow.Array")
    if len(found) != len(values):
        wrong = f"it returned {len(found)} values for {len(values)}"
        raise FunctionFailed(doing, wrong, "return one value for each value, in the same order")
    if found.type != result:
        hint = "set the column's type in walmere.toml to that of the result, or cast the result"
        raise FunctionFailed(doing, f"it returned {found.type}, and the column is {result}", hint)
    if values.null_count and found.null_count != len(found):
        found = pc.if_else(values.is_valid(), found, pa.scalar(None, found.type))
    return found


def _place(error: Exception) -> str:
    """The class of an exception and its place in the code, without its text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name}, line {last.lineno} of {last.filename.rpartition('/')[2]}"
