"""What is promised for each store and fault: one table, from which the tests and ``docs/reliability.md`` are made."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "COLUMNS",
    "FAULTS",
    "MODES",
    "VERIFIED",
    "VERIFIED_MODES",
    "Column",
    "Expected",
    "Fault",
    "expected",
    "verified",
]

HEALED, ERROR, LATE, UNSEEN = "healed", "error", "late", "unseen"

MODES = ("once", "every_third", "always")
VERIFIED_MODES = ("once", "first_reading", "always")
"""A shard of three parts would be hit at each reading by every third request: here each is hit at its first."""


@dataclass(frozen=True, slots=True)
class Column:
    """A way to read: ``name`` in ids, ``words`` for people. ``direct``: by the engine's own requests."""

    name: str
    words: str
    direct: bool = True
    checksum: str = ""
    """What ``verify="always"`` compares; "" where the way gives none."""
    auto: bool = False
    """Whether the same is compared by default, because it is a CRC-32C that comes with the answer."""


_BESIDE, _AMAZON = "a `.sha256` file beside the shard", "`x-amz-checksum-*`, or the MD5 that a simple ETag is"
_AZURE, _AIS = "the blob's MD5", "the object's checksum"

COLUMNS = {
    column.name: column
    for column in (
        Column("http", "HTTP", checksum=_BESIDE),
        Column("https", "HTTPS", checksum=_BESIDE),
        Column("s3", "S3", checksum=_AMAZON),
        Column("gs", "Google", checksum="CRC-32C", auto=True),
        Column("az", "Azure", checksum=_AZURE),
        Column("ais", "AIStore", checksum=_AIS),
        Column("aiohttp", "HTTP by aiohttp", direct=False, checksum=_BESIDE),
        Column("s3fs", "S3 by s3fs", direct=False, checksum=_AMAZON),
        Column("gcsfs", "Google by gcsfs", direct=False, checksum="CRC-32C", auto=True),
        Column("az_aiohttp", "Azure by aiohttp", direct=False, checksum=_AZURE),
        Column("ais_aiohttp", "AIStore by aiohttp", direct=False, checksum=_AIS),
    )
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A row: ``name`` in ids, ``words`` for people; ``always`` is how a fault that never ends does end."""

    name: str
    words: str
    always: str = "TransferError"
    slow: bool = False
    """It costs time for each request that it hits: fewer and smaller shards will do."""


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("reset_before_head", "connection reset before the answer"),
        Fault("reset_mid_body", "connection reset in the body", always=HEALED),
        Fault("fin_mid_body", "connection closed in the body", always=HEALED),
        Fault("stall", "no more bytes in the body", always=HEALED, slow=True),
        Fault("trickle", "a slow trickle of bytes", always="FetchTimeout", slow=True),
        Fault("length_above", "Content-Length too large"),
        Fault("length_below", "Content-Length too small"),
        Fault("no_length_cut", "no length, cut between two members", always="TruncatedShard"),
        Fault("corrupt_byte", "a flipped byte in a field", always=UNSEEN),
        Fault("corrupt_header", "a flipped byte in a tar header", always="CorruptShard"),
        Fault("shifted_range", "206 of another range"),
        Fault("ignored_range", "200 and the whole object", always=HEALED),
        Fault("too_many", "429"),
        Fault("unavailable", "503 with Retry-After"),
        Fault("storm", "a storm of 500"),
        Fault("no_response", "no answer", always="FetchTimeout", slow=True),
        Fault("bad_chunk", "a bad chunk size", always="FetchTimeout", slow=True),
        Fault("dropped_keep_alive", "kept connection closed silently", always=HEALED),
        Fault("changed_object", "the object is replaced", always="ObjectChanged"),
        Fault("refused", "connection refused for a while"),
        Fault("forbidden", "403, where the bucket was read before", always="AccessDenied"),
        Fault("missing", "404, where the bucket was read before", always="ShardNotFound"),
        Fault("expiring_signature", "the signature or token expires", always="AccessDenied"),
    )
}

_IN_EVERY_MODE = {"corrupt_byte", "corrupt_header", "changed_object"}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a cell ends in: ``kind`` is "healed" (all samples, byte for byte), "error" (of class ``error``; what came
    before it is right), "late" (the same error, behind the samples that it is about), or "unseen" (all samples, in
    which only the damaged bytes are wrong)."""

    kind: str
    error: str = ""


# What another client reads is taken whole or not at all: a body that breaks each time at the same byte is no progress.
_WHOLE_OR_NOTHING = {
    "reset_mid_body": "TransferError",
    "fin_mid_body": "TransferError",
    "stall": "FetchTimeout",
}
_WITHOUT_RANGES = ("ignored_range", "no_length_cut")
_EXCEPTIONS: dict[tuple[str, str, str], Expected] = {
    **{
        (c.name, f, "always"): Expected(ERROR, e)
        for c in COLUMNS.values()
        for f, e in _WHOLE_OR_NOTHING.items()
        if not c.direct
    },
    # Its clients wait for as long as anything comes.
    **{(c.name, "trickle", "always"): Expected(HEALED) for c in COLUMNS.values() if not c.direct},
    # The stores' own clients give ranges or nothing; a web server that ignores them is read in order.
    **{(c, f, "always"): Expected(ERROR, "TransferError") for c in ("s3fs", "gcsfs") for f in _WITHOUT_RANGES},
    ("gs", "no_length_cut", "always"): Expected(ERROR, "ChecksumMismatch"),  # it comes first
}


def expected(column: str, fault: str, mode: str) -> Expected:
    """What is promised by default, ``verify="auto"``."""
    if (exception := _EXCEPTIONS.get((column, fault, mode))) is not None:
        return exception
    rule = FAULTS[fault].always
    if fault == "corrupt_byte":
        return Expected(LATE, "ChecksumMismatch") if COLUMNS[column].auto else Expected(UNSEEN)
    if mode != "always" and fault not in _IN_EVERY_MODE:
        return Expected(HEALED)
    return Expected(HEALED) if rule == HEALED else Expected(ERROR, rule)


VERIFIED = tuple(column.name for column in COLUMNS.values() if column.checksum)
"""The columns that ``verify="always"`` has a checksum in."""


def verified(fault: str, mode: str) -> Expected:
    """What ``verify="always"`` makes of damage (``corrupt_byte``, ``corrupt_header``) in those columns."""
    assert fault in ("corrupt_byte", "corrupt_header")
    return Expected(ERROR, "ChecksumMismatch") if mode == "always" else Expected(HEALED)
