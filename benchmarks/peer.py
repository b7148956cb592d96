"""What a peer is, and the job that it does in a process of its own. Only the standard library: a peer's environment
need have nothing else."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "Peer", "Run", "Task", "load_peer", "peer_names", "spin"]


def spin(turns: int) -> int:
    """Pure Python that holds the GIL: about 30 ns a turn."""
    x = 1
    for _ in range(turns):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


@dataclass
class Job:
    """One reading by one peer.

    ``urls`` are the shards, or what the peer's own writer made of them. ``folder`` is an empty folder for caches; with
    ``cache`` the peer keeps the shards there. ``workers`` is the number of DataLoader workers (0: none), ``batch`` the
    samples of a batch, ``size`` the side of pictures in pixels. ``spin`` is how often the consumer computes for each
    sample (see `spin`). With ``first`` the peer stops at its first sample or batch. ``warm`` reads once before the
    clock starts. ``options`` are the peer's.
    """

    peer: str
    task: str
    urls: list[str]
    samples: int = 0
    folder: str = ""
    workers: int = 0
    batch: int = 64
    size: int = 224
    spin: int = 0
    first: bool = False
    warm: bool = False
    cache: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    first_s: float | None = None

    def count(self, samples: Iterable[Any]) -> int:
        """Take all samples and return their number."""
        iterator = iter(samples)
        count = 0
        for _ in iterator:
            self._note_first()
            count = 1
            if self.spin:
                spin(self.spin)
            break
        if self.first:
            return count
        if not self.spin:
            for _ in iterator:
                count += 1
            return count
        for _ in iterator:
            count += 1
            spin(self.spin)
        return count

    def count_batches(self, batches: Iterable[Any], field: Any = 0) -> int:
        """Take all batches and return the number of samples: the length of each batch's ``field``."""
        count = 0
        for batch in batches:
            if not count:
                self._note_first()
            count += len(batch[field])
            if self.spin:
                spin(self.spin * len(batch[field]))
            if self.first:
                break
        return count

    def count_images(self, batches: Iterable[Any], field: Any = 0) -> int:
        """The same for batches of pictures, which must be float32, CHW, of ``size``."""

        def checked() -> Iterable[Any]:
            for number, batch in enumerate(batches):
                images = batch[field]
                if number == 0:
                    wanted, kind = (3, self.size, self.size), str(images.dtype)
                    if tuple(images.shape[1:]) != wanted or not kind.endswith("float32"):
                        raise ValueError(f"pictures of {tuple(images.shape)} and {kind}, not of {wanted} and float32")
                yield batch

        return self.count_batches(checked(), field)

    def _note_first(self) -> None:
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.began


Run = Callable[[], int]
"""Read everything and return the number of samples (a floor, which makes no samples, returns 0)."""

Task = Callable[[Job], Run]
"""Import and construct, before the clock starts."""


@dataclass(frozen=True)
class Peer:
    """A library that reads, by its own documented best practice.

    ``tasks`` are what it can do: ``samples`` (each sample, undecoded), ``loader`` (batches of undecoded samples from
    DataLoader workers), ``images`` (decoded, a random part resized to ``Job.size``, batches of float32 CHW).
    ``requirements`` are pip's. Where the main environment lacks one, ``--install`` makes an environment of the peer's
    own with them and with ``without_dependencies`` (installed by ``--no-deps``). ``programs`` must be on the path.
    ``schemes`` are those of the URLs that it reads, ``file`` for paths. ``make`` writes the peer's own ``format``: the
    job's ``urls`` are then paths of shards; it writes into ``folder`` and returns names in there, which become the
    ``urls`` of reading. ``cannot`` has reasons, by the task or scheme that is missing, or under ``install``.
    ``environment`` are variables for its process. A ``floor`` moves the bytes and makes no samples. A peer that is very
    slow reads the first ``part`` of the shards only.
    """

    what: str
    tasks: Mapping[str, Task]
    requirements: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ("http", "https")
    format: str = "tar"
    make: Callable[[Job], list[str]] | None = None
    programs: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    floor: bool = False
    part: float = 1.0

    @property
    def reads(self) -> bool:
        """Whether it reads anything at all, or is there for one scenario only."""
        return bool(self.tasks.keys() & {"samples", "loader", "images"})

    def refusal(self, task: str, scheme: str) -> str | None:
        """Return why it cannot do ``task`` over ``scheme``, or None where it can."""
        if task not in self.tasks:
            return self.cannot.get(task, f"does not do {task!r}")
        if scheme not in self.schemes:
            return self.cannot.get(scheme, f"does not read {scheme}://")
        return None


def peer_names() -> list[str]:
    """Return the names of all peers: the modules of `benchmarks.peers`."""
    folder = Path(__file__).parent / "peers"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def load_peer(name: str) -> Peer:
    """Return the peer ``name``."""
    peer: Peer = importlib.import_module(f"benchmarks.peers.{name}").PEER
    return peer
