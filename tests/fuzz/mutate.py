"""Inputs made from others at random, where no fuzzer is installed, and for the test run."""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["Mutations"]

_TELLING = (b"\0" * 512, b"\xff" * 8, b"-1", b"99999999999999999999", b"ustar\x0000", b"\r\n", b"{", b"..", b"\x80")


class Mutations:
    """Changed inputs of a corpus (files in ``folder``), the same ones for the same ``seed``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.corpus = [path.read_bytes() for path in sorted(folder.iterdir())]
        self._rng = random.Random(seed)

    def next(self) -> bytes:
        """One of the corpus with one to four changes."""
        data = bytearray(self._rng.choice(self.corpus))
        for _ in range(self._rng.randint(1, 4)):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        rng = self._rng
        at, much = rng.randrange(len(data) + 1), rng.choice((1, 2, 16, 512))
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + much]
            case 2:
                data[at:at] = rng.choice(_TELLING)
            case 3:
                data[at : at + much] = rng.choice(_TELLING)
            case 4:
                other = rng.choice(self.corpus)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                data[at:at] = data[at : at + much]
