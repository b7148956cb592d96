"""Tasks of a job: inputs with their identity, the work to do, and the record of what came of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from wds_async.errors import ConfigError
from wds_async.redact import redact

__all__ = [
    "STREAM",
    "AttemptResult",
    "Input",
    "Output",
    "Record",
    "Task",
    "Work",
    "identity",
    "record_bytes",
    "record_of",
]


STREAM = "stream "
"""Beginning of the version of a stream."""


@dataclass(frozen=True, slots=True)
class Input:
    """A shard that a task reads, and its identity when the job was planned."""

    url: str
    size: int | None = None
    """Bytes; None where no listing tells."""
    version: str = ""
    """ETag, generation, or size and date of a file; "" where its store gives none; `STREAM` and a random number for
    standard input and FIFOs, which may give other data to the next run."""

    @property
    def is_stream(self) -> bool:
        """True for standard input and FIFOs: what was read of them cannot be read again."""
        return self.version.startswith(STREAM)


class Work(Protocol):
    """Protocol: what the tasks of a job do. It is pickled, so it names its function as ``module:function``."""

    def describe(self) -> dict[str, Any]:
        """Return as JSON everything that the result depends on besides the task: it is part of the task's identity."""
        ...

    def run(self, task: Task) -> Record:
        """Read the inputs, write the outputs whole, and return the record. The same task gives the same bytes and the
        same record, wherever it runs. Does not commit."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a job: its number, from 0, and what it reads."""

    number: int
    inputs: tuple[Input, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON: what its work needs beside the inputs (the section that a reducer reads)."""

    def identity(self, work: Mapping[str, Any] | str) -> str:
        """Return the task's id: a hash of its number, its inputs, its parameters and the described work, or of what
        `identity` gives for that. Secrets in URLs do not count: a URL that is signed anew means the same shard."""
        described = work if isinstance(work, str) else identity(dict(work))
        inputs = [[redact(one.url), one.size, one.version] for one in self.inputs]
        return identity(self.number, inputs, dict(self.parameters), described)


def identity(*parts: Any) -> str:
    """Return 32 hexadecimal digits of the SHA-256 of ``parts``, written as canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a task wrote. ``url`` is relative to the folder of the job's outputs where it lies below it."""

    url: str
    bytes: int
    crc32c: str
    """CRC-32C of the file as stored, eight hexadecimal digits."""
    samples: int | None = None
    """None for a file that holds no samples, such as an index."""


@dataclass(frozen=True, slots=True)
class Record:
    """Manifest of one finished task: its outputs are there and whole. It holds nothing that differs between
    two runs of the task, no times and no hosts."""

    task: int
    id: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    samples_in: int = 0
    samples_out: int = 0
    dropped: int = 0
    """Samples for which the function gave none."""
    bytes_in: int = 0
    bytes_out: int = 0
    skipped: tuple[Mapping[str, Any], ...] = ()
    """Entries of the ledger: what was passed over, and why."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the work itself."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Result of one attempt at a task. Either ``record`` or ``error`` is there."""

    task: int
    record: Record | None = None
    error: str = ""
    """Message of the error, which names shard and sample; without secrets."""
    permanent: bool = False
    """True if another attempt cannot help."""
    lost: bool = False
    """True for an attempt that ended with its process, so that nothing is known of it."""
    first: bool = True
    """False where another runner had committed the same task before."""
    seconds: float = 0.0
    traffic: Mapping[str, Any] = field(default_factory=dict)
    """Traffic by origin: `Traffic.as_dict`."""
    place: str = ""
    """Host and process, for people."""


def record_bytes(record: Record) -> bytes:
    """Return ``record`` as JSON; the same record gives the same bytes. Secrets in URLs are left out."""
    values = asdict(record)
    for one in (*values["inputs"], *values["outputs"]):
        one["url"] = redact(one["url"])
    return (json.dumps(values, sort_keys=True, indent=1) + "\n").encode("ascii")


def record_of(data: bytes, name: str = "the record") -> Record:
    """Return the record in what `record_bytes` gave. ConfigError, with ``name``, for what is none."""
    try:
        values = json.loads(data)
        values["inputs"] = tuple(Input(**one) for one in values["inputs"])
        values["outputs"] = tuple(Output(**one) for one in values["outputs"])
        values["skipped"] = tuple(values["skipped"])
        return Record(**values)
    except (ValueError, KeyError, TypeError) as exn:
        raise ConfigError(f"{redact(name)}: no record of a task ({type(exn).__name__}: {exn})") from exn
