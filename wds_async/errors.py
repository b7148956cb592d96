"""The exception tree.

::

    WdsError
    ├── ConfigError (ValueError)            a setting or argument that does not parse
    │   └── JobChanged                      the folder of a distributed job holds another job
    ├── UrlError (ValueError)               a URL, pattern or rewrite rule that cannot be understood
    ├── MissingExtra (ImportError)          a package of an extra is not installed, or broken
    ├── StorageError (OSError)              the store's side
    │   ├── ShardNotFound (FileNotFoundError)
    │   ├── AccessDenied (PermissionError)
    │   ├── ObjectChanged                   replaced while it was being read, or since its version was saved
    │   ├── ChecksumMismatch                the bytes do not match the checksum
    │   ├── TransferError (ConnectionError) broken, refused, wrong answer, after all attempts
    │   │   └── FetchTimeout (TimeoutError) no progress within the time allowed
    │   └── PipeError                       a command failed
    ├── ShardFormatError (ValueError)       the bytes arrived but are not a good shard
    │   ├── NotATar (tarfile.ReadError)     no tar header at the start
    │   ├── CorruptShard (tarfile.ReadError)    a bad header or damaged compression further on
    │   ├── TruncatedShard (tarfile.ReadError)  the shard ends inside a member
    │   ├── FieldTooLarge                   one field above ``max_field_bytes``
    │   ├── DuplicateField                  a sample has the same field twice
    │   └── MissingField                    a sample lacks a field that ``expect`` names
    ├── ShardCutError (ValueError)          a shard cannot be cut into spans by its bytes alone
    ├── DecodingError                       a field could not be decoded
    ├── JobFailed (RuntimeError)            tasks of a distributed job failed, or do not end
    ├── CostLimitReached (RuntimeError)     the run would cost more than ``WDS_COST_LIMIT``
    ├── TooMuchLost (RuntimeError)          handlers skipped too much, or no shard gives a sample any more
    ├── StateError (ValueError)             a state that cannot be saved, or not be gone on from
    ├── UnsafeContent (ValueError)          refused by the security rules
    └── ReaderClosed (RuntimeError)         a reader used after ``close`` or in another process

Each class mixes in the builtin that a caller would expect. Every one pickles and can be built from one
string, because torch's DataLoader re-raises worker exceptions that way.
"""

from __future__ import annotations

import tarfile
from typing import Self

__all__ = [
    "AccessDenied", "ChecksumMismatch", "ConfigError", "CorruptShard", "CostLimitReached", "DecodingError",
    "DuplicateField", "FetchTimeout", "FieldTooLarge", "JobChanged", "JobFailed", "MissingExtra", "MissingField",
    "NotATar", "ObjectChanged", "PipeError", "ReaderClosed", "ShardCutError", "ShardFormatError", "ShardNotFound",
    "StateError", "StorageError", "TooMuchLost", "TransferError", "TruncatedShard", "UnsafeContent", "UrlError",
    "WdsError",
]  # fmt: skip


class WdsError(Exception):
    """Base of every error that wds_async raises on purpose. ``str(error)`` gives the URL (secrets
    redacted), the byte, the attempts and the next step.

    ``shard`` (its URL, redacted), ``offset`` (where in it, in bytes) and, of a tar, ``last_member`` and ``last_header``
    (the name in the last header that was read before the error, and where its member begins) are for programs and the
    ledger; None where they are not known, and in an error built from a string."""

    shard: str | None = None
    offset: int | None = None
    last_member: str | None = None
    last_header: int | None = None

    def at(self, shard: str, offset: int | None) -> Self:
        """Set ``shard`` and ``offset`` and return this error."""
        self.shard, self.offset = shard, offset
        return self


class ConfigError(WdsError, ValueError):
    """A setting (environment variable or argument) does not parse or is out of range."""


class JobChanged(ConfigError):
    """The folder of a distributed job holds another job: other inputs, another function or version, other options. The
    message says what differs."""


class UrlError(WdsError, ValueError):
    """A URL, pattern or rewrite rule cannot be understood, or nothing matches it."""


class MissingExtra(WdsError, ImportError):
    """A package that an extra brings is not installed: the message holds the ``pip install`` command. Or one that is
    installed cannot be imported: the message says why."""


class StorageError(WdsError, OSError):
    """The store could not give the bytes."""


class ShardNotFound(StorageError, FileNotFoundError):
    """There is no object or file of this name."""


class AccessDenied(StorageError, PermissionError):
    """The store refused these credentials, or the file system these permissions."""


class ObjectChanged(StorageError):
    """The object was replaced while it was being read, or since a state named its version; the message names both
    identities."""


class ChecksumMismatch(StorageError):
    """The bytes of an object do not match its checksum; the message names both, and the samples already delivered."""


class TransferError(StorageError, ConnectionError):
    """The transfer failed after every attempt that the policy allows, or cannot be retried."""


class FetchTimeout(TransferError, TimeoutError):
    """No byte arrived within the time allowed, in every attempt."""


class PipeError(StorageError):
    """A ``pipe:`` command ended with a failure status."""


class ShardFormatError(WdsError, ValueError):
    """The bytes arrived as the store holds them, but they are not a good shard."""


class NotATar(ShardFormatError, tarfile.ReadError):
    """The shard does not begin with a tar header (an HTML page, an empty file, another format)."""


class CorruptShard(ShardFormatError, tarfile.ReadError):
    """A header or a compressed stream inside the shard is damaged."""


class TruncatedShard(ShardFormatError, tarfile.ReadError):
    """The shard ends inside a header or a member's data."""


class FieldTooLarge(ShardFormatError):
    """A field is larger than ``max_field_bytes``; found before its data is read."""


class DuplicateField(ShardFormatError):
    """Two adjacent members give the same sample the same field."""


class MissingField(ShardFormatError):
    """A sample lacks a field that ``expect`` names: its shard was cut between two members, or written so.

    ``key`` and ``field`` (those that are missing, by comma) are None in one built from a string.
    """

    key: str | None = None
    field: str | None = None


class ShardCutError(WdsError, ValueError):
    """A shard cannot be cut into spans by its bytes alone (``split="bytes"``): two readers would not agree on the first
    sample behind the cut. No handler can catch this, since samples would be lost or come twice."""


class DecodingError(WdsError):
    """A field could not be decoded; the message names shard, key and field, the cause is chained.

    ``url``, ``key``, ``field`` and ``k`` (WebDataset's name of ``field``) are None in one built from a string.
    """

    url: str | None = None
    key: str | None = None
    field: str | None = None
    k: str | None = None


class JobFailed(WdsError, RuntimeError):
    """Tasks of a distributed job failed in every attempt, or others that were waited for made no progress. The message
    names them with their shards.

    ``failures`` are pairs of a task's number and its last error; empty in one built from a string.
    """

    failures: tuple[tuple[int, str], ...] = ()


class CostLimitReached(WdsError, RuntimeError):
    """Requests and traffic have cost as much as ``WDS_COST_LIMIT`` allows; no handler can catch this."""


class TooMuchLost(WdsError, RuntimeError):
    """Handlers skipped more of the data than ``max_bad_fraction`` allows, or so many shards in a row gave no sample
    that going on would only look like a hang. No handler can catch this."""


class StateError(WdsError, ValueError):
    """The state of a pipeline cannot be saved, or was saved by another pipeline, or its shards have changed since."""


class UnsafeContent(WdsError, ValueError):
    """The security rules forbid this (a pickle, a pipe, a local file in secure mode)."""


class ReaderClosed(WdsError, RuntimeError):
    """A reader was used after it was closed, or in a process that inherited it by ``fork``."""
