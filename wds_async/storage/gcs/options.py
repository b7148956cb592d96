"""gcsfs's options, by name: it takes any, and says nothing of those that it does not know."""

from __future__ import annotations

import difflib
import urllib.parse
from collections.abc import Mapping
from typing import Any

from wds_async.errors import ConfigError
from wds_async.redact import redact

__all__ = ["check_options"]

_KNOWN = frozenset({
    "access", "asynchronous", "batch_size", "block_size", "cache_timeout", "cache_type", "check_connection",
    "consistency", "default_location", "endpoint_url", "experimental_zonal_hns_support", "listings_expiry_time",
    "loop", "max_paths", "project", "requester_pays", "requests_timeout", "secure_serialize", "session_kwargs",
    "skip_instance_cache", "timeout", "token", "use_listings_cache", "version_aware",
})  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """ConfigError, without any value, for an option that means nothing, and for an ``endpoint_url`` that is no URL."""
    unknown = sorted(str(name) for name in options if name not in _KNOWN)
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KNOWN, 1)
        meant = f"did you mean {near[0]}?" if near else "they are gcsfs's: token, project, endpoint_url, …"
        raise ConfigError(f"storage_options for gs: {', '.join(unknown)} means nothing here; {meant}")
    endpoint = options.get("endpoint_url")
    if endpoint:
        parts = urllib.parse.urlsplit(str(endpoint))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"storage_options for gs: endpoint_url={redact(str(endpoint))!r}: write https://host")
