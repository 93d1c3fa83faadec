"""Items of a job as bytes, without their secrets.

PySpark writes the items of a job to a file of the driver, for a moment, and Spark may keep them on the disk of an
executor. Functions are not written by PySpark, unless they are large. So passwords are left out of the items, and go
with the function. A worker puts them in again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr


@dataclass(slots=True)
class Secrets:
    """The secrets of some items. They are not shown."""

    _values: list[str] = field(default_factory=list, repr=False)

    def seal(self, items: Iterable[Any]) -> list[bytes]:
        """The items without their secrets, which are kept here."""
        return [self._seal(item) for item in items]

    def _seal(self, item: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._values).dump(item)
        return file.getvalue()

    def open(self, sealed: bytes) -> Any:
        """The item with its secrets."""
        return _Unpickler(io.BytesIO(sealed), self._values).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, secrets: list[str]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._secrets = secrets

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, SecretStr):
            return None
        value = obj.get_secret_value()
        if value not in self._secrets:
            self._secrets.append(value)
        return self._secrets.index(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, secrets: list[str]) -> None:
        super().__init__(file)
        self._secrets = secrets

    def persistent_load(self, pid: int) -> SecretStr:
        return SecretStr(self._secrets[pid])
