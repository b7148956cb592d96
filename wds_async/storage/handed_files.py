"""Files that another process has opened for this one: read as local files, whatever has become of their names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from wds_async.storage.base import LocalFile

__all__ = ["Descriptor", "HandedFile"]


class Descriptor:
    """An open file, closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


@dataclass(frozen=True, slots=True)
class HandedFile(LocalFile):
    """A file that is open already; ``version`` is that of the object, as the answers to ranges have it."""

    descriptor: Descriptor = field(compare=False, repr=False)
    fields: Mapping[str, str] = field(compare=False, repr=False)
    """Of the head that came with it, in lower case."""
    lose: Callable[[], None] = field(compare=False, repr=False)
    """Report that it is short, cannot be read, or is wrong: its maker is to look at it."""
