"""What a row of the table of differences is, and who may order one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CACHE",
    "ERRORS",
    "FAULT",
    "FAULTS",
    "HOUSE",
    "MEDIA",
    "OPENCLIP",
    "OPENERS",
    "RANDOM",
    "SECURITY",
    "SPECS",
    "SPLITTING",
    "SURFACE",
    "TORCH",
    "WRITERS",
    "Difference",
]

FAULT = "a fault of webdataset"
SPLITTING = "design: shards are shuffled before they are split, anew each epoch and the same on every rank"
RANDOM = "design, house rules: the module-level random is used at one place only"
TORCH = "design, floor plan: torch is imported late, IterableDataset.register where it is there"
ERRORS = "design, Errors: one tree, typed and with a message"
FAULTS = "design, Faults: a truncated shard never joins its last sample to the next shard's first"
SECURITY = "design, Security"
SURFACE = "the documented surface: what an argument says it does"
CACHE = "the drop-in's page on caching"
HOUSE = "design, house rules: nothing sleeps, and only the command line prints"
MEDIA = "the drop-in's page on decoders: whichever library is there"
OPENERS = "the drop-in's page on the surface: openers of the user over our own clients"
SPECS = "the drop-in's page on specifications"
WRITERS = "the drop-in's page on writers"
OPENCLIP = "design: loaders in OpenCLIP's way, on webdataset's submodules, run"


@dataclass(frozen=True)
class Difference:
    """One deliberate difference; ``test`` is ``path::function`` below ``tests/``, ``order`` who orders it."""

    subject: str
    webdataset: str
    ours: str
    reason: str
    test: str
    order: str = FAULT
