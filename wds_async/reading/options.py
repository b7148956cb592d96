"""Options of reading shards, checked where a stage is made and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wds_async import config
from wds_async.environment import ON_CORRUPT
from wds_async.errors import ConfigError

__all__ = ["MAX_FIELD_BYTES", "field_limit", "on_corrupt_policy", "transfer_fields"]

MAX_FIELD_BYTES = 2 << 30
"""The largest member that is taken, unless ``max_field_bytes`` is given."""


def on_corrupt_policy(on_corrupt: str | None) -> str:
    """Return ``on_corrupt``, or what ``WDS_ON_CORRUPT`` sets. ConfigError for a policy that there is not."""
    chosen = config.settings().on_corrupt if on_corrupt is None else on_corrupt
    if chosen not in ON_CORRUPT:
        raise ConfigError(f"on_corrupt={chosen!r}: one of {', '.join(ON_CORRUPT)} (WDS_ON_CORRUPT)")
    return chosen


def field_limit(max_field_bytes: int) -> int:
    """Return ``max_field_bytes``. ConfigError below 1."""
    if max_field_bytes < 1:
        raise ConfigError(f"max_field_bytes={max_field_bytes}: at least 1")
    return max_field_bytes


def transfer_fields(transfer: Mapping[str, Any] | None, verify: str | None) -> dict[str, Any]:
    """Return the fields of ``transfer``, with ``verify`` among them. ConfigError where they contradict each other."""
    fields = dict(transfer or {})
    if verify is not None and fields.setdefault("verify", verify) != verify:
        raise ConfigError(f"verify={verify!r}, and transfer={{'verify': {fields['verify']!r}}}: give one of them")
    return fields
