"""What a few bytes of a pickle could ask gigabytes for: the table of what it has put aside, and bytes by their number.

``PUT 1000000000`` takes ten bytes of a pickle, and makes Python's unpickler clear a table of sixteen gigabytes. No
pickle that was written by ``pickle`` numbers more things than it has bytes.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

from wds_async.errors import UnsafeContent

__all__ = ["check_memo", "of_content"]

_LONG_BINPUT = re.compile(rb"r(?=(.{4}))", re.DOTALL)
_PUT = re.compile(rb"p(\d{5,})")


def check_memo(data: bytes) -> None:
    """Raise `pickle.UnpicklingError` where ``data`` puts something at an index beyond its own length.

    What looks like such an instruction may be part of a text or an array, so the instructions are read one by one, but
    only where something looks like one.
    """
    size = len(data)
    if not (
        any(int.from_bytes(found[1], "little") > size for found in _LONG_BINPUT.finditer(data))
        or any(int(found[1]) > size for found in _PUT.finditer(data))
    ):
        return
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > size:
                raise pickle.UnpicklingError(
                    f"byte {position} of this pickle of {size} bytes puts something at {argument}: it is damaged"
                )
    except ValueError:  # it ends, or makes no sense, further on: the unpickler itself says so when it comes there
        return


def of_content(kind: Callable[..., Any]) -> Callable[..., Any]:
    """``kind`` (bytes, bytearray), which is made of its content and not, as it could be, of a number of bytes."""

    def made(*given: Any) -> Any:
        if given and isinstance(given[0], int):
            raise UnsafeContent(f"this pickle asks for {given[0]} bytes without saying which")
        return kind(*given)

    return made
