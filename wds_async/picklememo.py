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

_PUT = re.compile(rb"p(\d{5,})")
# LONG_BINPUT with its index, BYTEARRAY8 with its length.
_BINARY = (re.compile(rb"r(?=(.{4}))", re.DOTALL), re.compile(rb"\x96(?=(.{8}))", re.DOTALL))


def check_memo(data: bytes) -> None:
    """Raise `pickle.UnpicklingError` where ``data`` puts something at an index beyond its own length, or has a
    bytearray that is longer: Python makes room for all of it before it looks for the bytes.

    What looks like such an instruction may be part of a text or an array, so the instructions are read one by one, but
    only where something looks like one. What cannot be read so is refused: Python's unpickler may read on in another
    way where frames lie within frames, and come to such an instruction.
    """
    size = len(data)
    numbers = (int.from_bytes(found[1], "little") for sign in _BINARY for found in sign.finditer(data))
    if not (any(number > size for number in numbers) or any(int(found[1]) > size for found in _PUT.finditer(data))):
        return
    frame_end = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > size:
                raise pickle.UnpicklingError(
                    f"byte {position} of this pickle of {size} bytes puts something at {argument}: it is damaged"
                )
            if opcode.name == "FRAME":
                if (position or 0) < frame_end:
                    raise ValueError(f"a frame within a frame at byte {position}")
                frame_end = (position or 0) + 9 + (argument or 0)
    except ValueError as exn:
        raise pickle.UnpicklingError(f"this pickle of {size} bytes is damaged: {exn}") from exn


def of_content(kind: Callable[..., Any]) -> Callable[..., Any]:
    """``kind`` (bytes, bytearray), which is made of its content and not, as it could be, of a number of bytes."""

    def made(*given: Any) -> Any:
        if given and isinstance(given[0], int):
            raise UnsafeContent(f"this pickle asks for {given[0]} bytes without saying which")
        return kind(*given)

    return made
