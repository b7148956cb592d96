"""The environment: every variable that is read, by name, and the only reader of ``os.environ``.

`VARIABLES` is the table that ``wds-async env`` prints and that the README's list is tested against. A value that does
not parse is a `ConfigError` that names its variable.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wds_async.errors import ConfigError

__all__ = [
    "GIB",
    "GROUPS",
    "KIB",
    "MIB",
    "ON_CORRUPT",
    "SCHEME_ALIASES",
    "VARIABLES",
    "VERIFY",
    "Variable",
    "names",
    "parse_bytes",
    "schemes",
    "shown_bytes",
    "unknown_variables",
    "value",
    "variable",
    "warn_of_unknown_variables",
]

logger = logging.getLogger("wds_async")

SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3", "abfs": "az", "abfss": "az"}
"""Other names of a store's scheme, and the one that rules and ``USE_AIS_FOR`` go by."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SIZE = re.compile(r"(\d{1,18}(?:\.\d*)?(?:e\d{1,2})?) ?([kmgt]?)(?:i?b)?")
_SUFFIXES = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``"128M"``, ``"64MiB"``, ``"1.5g"`` or a number (``"1e12"``); units are powers of 1024. ValueError otherwise."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 128M or 134217728")
    return int(float(found[1]) * _SUFFIXES[found[2]])


def shown_bytes(count: int) -> str:
    """``count`` bytes as `parse_bytes` reads them, in the largest unit that gives a whole number: ``"128M"``."""
    for suffix, unit in reversed(_SUFFIXES.items()):
        if count and count % unit == 0:
            return f"{count // unit}{suffix.upper()}"
    return str(count)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("a count is not negative")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("a time is a positive number of seconds")
    return value


def _seconds_or_none(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError("a time is a number of seconds, 0 or more")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("a share is a number from 0 to 1")
    return value


def _dollars(text: str) -> float:
    value = float(text.strip().removeprefix("$"))
    if not value >= 0:
        raise ValueError("a cost is a number of US dollars, 0 or more")
    return value


def _listening(text: str) -> str:
    address, port = text.strip(), text.strip().rpartition(":")[2]
    if not (port.isdecimal() and int(port) <= 65535):
        raise ValueError("write a port (9464), or an address with one (0.0.0.0:9464)")
    return address


VERIFY = ("auto", "always", "never")
ON_CORRUPT = ("raise", "skip_shard", "resync")


def _choice(known: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"write one of {', '.join(known)}")
        return text

    return parse


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("write 1 or 0")


def schemes(text: str) -> frozenset[str]:
    """What ``"gs:s3"`` (or ``"gs,s3"``) names, each by the name that its aliases follow."""
    names = [name.strip().removesuffix("://").lower() for name in re.split(r":(?!//)|,", text)]
    return frozenset(SCHEME_ALIASES.get(name, name) for name in names if name)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: ``name``, how it parses, its default, and what it does."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    secret: bool = False
    """Whether its value is shown to nobody."""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "WDS_BUDGET",
        parse_bytes,
        None,
        "bytes of shard data held in memory, per process (128M unless memory is short)",
    ),
    Variable("WDS_PART_SIZE", parse_bytes, 2 * MIB, "bytes of one range request; a power of two of at least 64K"),
    Variable("WDS_CONNECTIONS", _count, 64, "most HTTP connections of one process"),
    Variable("WDS_DIRECT", _flag, True, "0: read HTTP through aiohttp instead of the zero-copy client"),
    Variable(
        "WDS_RETRIES",
        _count,
        None,
        "attempts without a new byte before a transfer fails; unset: as many as WDS_TIMEOUT allows",
    ),
    Variable("WDS_TIMEOUT", _seconds, 300.0, "seconds without a new byte before a transfer fails"),
    Variable(
        "WDS_REFUSAL_TIMEOUT",
        _seconds_or_none,
        30.0,
        "seconds for which a 403 or 404 is asked again in a bucket that was read before; 0: not at all",
    ),
    Variable(
        "WDS_VERIFY",
        _choice(VERIFY),
        "auto",
        "auto: compare CRC-32C where it comes by itself; always: all checksums; never",
    ),
    Variable("WDS_LEDGER", str, "", "file that what handlers let pass is appended to, a JSON object a line"),
    Variable("WDS_MAX_BAD_FRACTION", _fraction, None, "share of bad samples (or bytes) that stops the run, as 0.01"),
    Variable(
        "WDS_ON_CORRUPT",
        _choice(ON_CORRUPT),
        "raise",
        "raise, skip_shard or resync: what follows damage inside a tar",
    ),
    Variable("WDS_REWRITE", str, "", "regex=replacement;… applied to the start of every URL before it is opened"),
    Variable("GOPEN_REWRITE", str, "", "WebDataset's older name, read where WDS_REWRITE is not set"),
    Variable("WDS_NATIVE_PIPES", _flag, False, "1: read pipe:curl, pipe:cat and the like natively"),
    Variable("WDS_SECURE", _flag, False, "1: refuse pickles, pipe:, local files and rewriting"),
    Variable("WDS_ALLOW_PICKLE", _flag, False, "1: decode pickled fields of any class (runs code from the data)"),
    Variable("WDS_PYTORCH_WEIGHTS_ONLY", _flag, True, "0: .pth fields may hold any class (runs code from the data)"),
    Variable("WDS_SEED", int, None, "seed of shard shuffling where no argument gives one"),
    Variable("WDS_EPOCH", int, None, "epoch number where no argument gives one"),
    Variable("WDS_SHOW_SEED", _flag, False, "1: log the seed of ResampledShards"),
    Variable("WDS_HANDOVER", _flag, True, "0: batches of WebLoader's workers go through torch's queue"),
    Variable("WDS_PROGRESS", _flag, False, "1: show a progress bar and a summary line for every epoch"),
    Variable("WDS_DOCTOR", _flag, False, "1: look at what reading threads do now and then, so that doctor() knows"),
    Variable(
        "WDS_METRICS_PORT",
        _listening,
        None,
        "port (of 127.0.0.1; or 0.0.0.0:9464) where a training job shows /metrics; 0: a free one",
    ),
    Variable("WDS_COST_LIMIT", _dollars, None, "US dollars of requests and traffic at which a run stops"),
    Variable("WDS_PRICES", str, "", "YAML file of prices in place of the built-in table"),
    Variable("WDS_REGION", str, "", "region that this machine is in, as its provider calls it; for prices"),
    Variable("WDS_SERVE_CONFIG", str, "", "YAML file of `wds-async serve`, where --config names none"),
    Variable(
        "WDS_LOG",
        str,
        "",
        "level of the wds_async logger: debug, info, warning, error; with debug, errors have whole tracebacks",
    ),
    Variable("GOPEN_VERBOSE", _count, 0, "1: log every shard that is opened"),
    Variable("GOPEN_BUFFER", int, -1, "buffer in bytes of the local files that gopen opens; -1: Python's own choice"),
    Variable("WDS_CACHE", str, "", "folder of the shard cache; setting it turns caching on"),
    Variable("WIDS_CACHE", str, "", "folder of random access's shards, read where WDS_CACHE is not set"),
    Variable("WDS_CACHE_SIZE", parse_bytes, None, "bytes that the shard cache may hold; without it, all that comes"),
    Variable("WDS_CACHE_CHECK", _flag, False, "1: ask once an epoch whether a cached shard has changed in its store"),
    Variable("WDS_VERBOSE_CACHE", _flag, False, "1: log every shard that the cache keeps, uses or drops"),
    Variable("RANK", _count, None, "rank of this process, with WORLD_SIZE"),
    Variable("WORLD_SIZE", _count, None, "number of ranks"),
    Variable("SLURM_PROCID", _count, None, "rank of a task that srun started, where nothing else says one"),
    Variable("SLURM_STEP_NUM_TASKS", _count, None, "number of tasks that srun started"),
    Variable("LOCAL_WORLD_SIZE", _count, None, "ranks on this host; shares the host's memory budget"),
    Variable("WORKER", _count, None, "number of this worker, with NUM_WORKERS"),
    Variable("NUM_WORKERS", _count, None, "number of workers"),
    Variable(
        "AIS_ENDPOINT",
        str,
        "",
        "AIStore's proxy or a service, http://host:51080 or unix:/path; ais:// is read there, and USE_AIS_FOR",
    ),
    Variable("USE_AIS_FOR", str, "", "gs:s3:az: schemes that are read through AIS_ENDPOINT, URLs unchanged"),
    Variable("WDS_AIS_FALLBACK", _flag, False, "1: where AIStore cannot be reached, read the bucket itself"),
    Variable("AIS_AUTHN_TOKEN", str, "", "AIStore's token, sent to its proxy only", secret=True),
    Variable("AIS_AUTHN_TOKEN_FILE", str, "", "JSON file with it; ais/cli/auth.token in ~/.config without it"),
    Variable("AIS_SKIP_VERIFY_CRT", _flag, False, "1: do not verify AIStore's TLS certificates"),
    Variable("AIS_CLIENT_CA", str, "", "PEM file of the authority that signed AIStore's certificates"),
    Variable("AIS_CRT", str, "", "PEM file of our certificate for AIStore; AIS_CRT_KEY has its key"),
    Variable("AIS_CRT_KEY", str, "", "PEM file of the key of AIS_CRT"),
    Variable("AWS_ENDPOINT_URL_S3", str, "", "S3 of another kind (MinIO, Ceph, R2); AWS_* mean what they mean to AWS"),
    Variable("GOOGLE_APPLICATION_CREDENTIALS", str, "", "key or workload identity file for gs://"),
    Variable("STORAGE_EMULATOR_HOST", str, "", "an emulator of Google Cloud Storage, http://host:port"),
    Variable(
        "AZURE_STORAGE_CONNECTION_STRING",
        str,
        "",
        "Azure: account, key and endpoint in one",
        secret=True,
    ),
    Variable("AZURE_STORAGE_ACCOUNT_NAME", str, "", "account of az:// URLs (AZURE_STORAGE_ACCOUNT likewise)"),
    Variable("AZURE_STORAGE_ACCOUNT_KEY", str, "", "its key (AZURE_STORAGE_KEY likewise)", secret=True),
    Variable("AZURE_STORAGE_SAS_TOKEN", str, "", "or a shared access signature", secret=True),
    Variable("AZURE_STORAGE_CLIENT_ID", str, "", "or a service principal, with the next two"),
    Variable("AZURE_STORAGE_CLIENT_SECRET", str, "", "its secret", secret=True),
    Variable("AZURE_STORAGE_TENANT_ID", str, "", "its tenant"),
    Variable("AZURE_STORAGE_ANON", _flag, False, "1: read az:// anonymously, without looking for a managed identity"),
    Variable("HF_TOKEN", str, "", "token of the Hugging Face hub, sent to the hub only", secret=True),
    Variable("HF_TOKEN_PATH", str, "", "file of the hub's login; $HF_HOME/token without it"),
    Variable("HF_ENDPOINT", str, "", "another hub than https://huggingface.co"),
    Variable("NETRC", str, "", "file of names and passwords by host, for http(s); ~/.netrc without it"),
    Variable("HTTPS_PROXY", str, "", "proxy for https:// (HTTP_PROXY, NO_PROXY likewise)"),
    Variable("SSL_CERT_FILE", str, "", "certificate authorities that TLS is verified against"),
)

GROUPS = {
    "WDS_BUDGET": "Transfer",
    "WDS_LEDGER": "Damaged shards",
    "WDS_REWRITE": "URLs and safety",
    "WDS_SEED": "Order",
    "WDS_HANDOVER": "Watching, cost and logs",
    "WDS_CACHE": "Shard cache",
    "RANK": "Ranks and workers",
    "AIS_ENDPOINT": "AIStore and the service",
    "AWS_ENDPOINT_URL_S3": "Stores and the network",
}
"""Headings for people, by the first variable under each."""

_BY_NAME = {v.name: v for v in VARIABLES}
# Names that WebDataset or later parts of this project read; known, so that no one is warned about them.
_KNOWN_ELSEWHERE = {"WDS_REQUIRE_SERVERS", "WDS_AZURITE"}

_NEAR = 0.82  # difflib's ratio of the names without WDS_: CONECTIONS, BUGDET; not BATCH_SIZE, CACHE_DIR

_asked: set[str] = set()
_warned: set[str] = set()


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The raw text of environment variable ``name``, None where it is not set."""
    _asked.add(name)
    return (os.environ if environ is None else environ).get(name)


def names(prefix: str) -> list[str]:
    """The variables that are set and begin with ``prefix``, sorted."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def value(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Environment variable ``name`` of `VARIABLES`, parsed, or its default. ConfigError where it does not parse."""
    known = _BY_NAME[name]
    text = variable(name, environ)
    if text is None or (text == "" and known.parse is not str):
        return known.default
    try:
        return known.parse(text)
    except ValueError as exn:
        shown = "***" if known.secret else repr(text)
        raise ConfigError(f"{name}={shown} does not parse: {exn} ({name}: {known.meaning})") from exn


def unknown_variables(used: frozenset[str] = frozenset()) -> list[tuple[str, str | None]]:
    """``WDS_*`` names in the environment that mean nothing, each with the nearest known name.

    ``used`` are names that shard specifications refer to (``${X}`` reads ``WDS_X``), beside those that were read
    in this process.
    """
    known = set(_BY_NAME) | _KNOWN_ELSEWHERE | _asked | used
    strangers = sorted(n for n in os.environ if n.startswith("WDS_") and n not in known)
    ours = [name.removeprefix("WDS_") for name in _BY_NAME if name.startswith("WDS_")]
    near = {name: difflib.get_close_matches(name.removeprefix("WDS_"), ours, 1, _NEAR) for name in strangers}
    return [(name, "WDS_" + matches[0] if matches else None) for name, matches in near.items()]


def warn_of_unknown_variables() -> None:
    """Log each ``WDS_*`` name that looks like a misspelt setting, once a process: it has no effect, silently.

    Other names that mean nothing here are the program's own or another tool's (webpack's ``WDS_SOCKET_PORT``).
    """
    for name, nearest in unknown_variables():
        if nearest and name not in _warned:
            _warned.add(name)
            logger.warning(
                "%s is set but means nothing; did you mean %s? (`wds-async env` lists what does)", name, nearest
            )
