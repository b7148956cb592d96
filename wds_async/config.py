"""Every setting, frozen, with its unit and default; the only reader of ``os.environ``.

Arguments beat environment beats default. `VARIABLES` is the table that ``wds-async env`` prints and that the
README's list is tested against. A value that does not parse is a `ConfigError` that names its variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import operator
import os
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wds_async.errors import ConfigError
from wds_async.retry import RetryPolicy

__all__ = [
    "DEFAULT_BUDGET_BYTES",
    "MIN_BUDGET_BYTES",
    "VARIABLES",
    "Settings",
    "TransferConfig",
    "Variable",
    "configure_logging",
    "default_budget_bytes",
    "inherit_security",
    "parse_bytes",
    "proxy_for",
    "rank_from_env",
    "rank_from_slurm",
    "security_enforced",
    "settings",
    "transfer_config",
    "unknown_variables",
    "variable",
    "warn_of_unknown_variables",
    "worker_from_env",
]

logger = logging.getLogger("wds_async")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DEFAULT_BUDGET_BYTES = 128 * MIB
MIN_BUDGET_BYTES = 32 * MIB
_HOST_BUDGET_BYTES = 3 * GIB
_SIZE = re.compile(r"(\d{1,18}(?:\.\d*)?(?:e\d{1,2})?) ?([kmgt]?)(?:i?b)?")
_SUFFIXES = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``"128M"``, ``"64MiB"``, ``"1.5g"`` or a number (``"1e12"``); units are powers of 1024. ValueError otherwise."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 128M or 134217728")
    return int(float(found[1]) * _SUFFIXES[found[2]])


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


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("write 1 or 0")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: ``name``, how it parses, its default, and what it does."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str


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
    Variable("WDS_RETRIES", _count, 8, "attempts without a new byte before a transfer fails"),
    Variable("WDS_TIMEOUT", _seconds, 300.0, "seconds without a new byte before a transfer fails"),
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
    Variable("WDS_LOG", str, "", "level of the wds_async logger: debug, info, warning, error"),
    Variable("GOPEN_VERBOSE", _count, 0, "1: log every shard that is opened"),
    Variable("GOPEN_BUFFER", int, -1, "buffer in bytes of the local files that gopen opens; -1: Python's own choice"),
    Variable("WDS_CACHE", str, "", "folder of the shard cache; setting it turns caching on"),
    Variable("WIDS_CACHE", str, "", "folder of random access's shards, read where WDS_CACHE is not set"),
    Variable("WDS_CACHE_SIZE", parse_bytes, None, "bytes that the shard cache may hold; without it, all that comes"),
    Variable("WDS_VERBOSE_CACHE", _flag, False, "1: log every shard that the cache keeps, uses or drops"),
    Variable("RANK", _count, None, "rank of this process, with WORLD_SIZE"),
    Variable("WORLD_SIZE", _count, None, "number of ranks"),
    Variable("SLURM_PROCID", _count, None, "rank of a task that srun started, where nothing else says one"),
    Variable("SLURM_STEP_NUM_TASKS", _count, None, "number of tasks that srun started"),
    Variable("LOCAL_WORLD_SIZE", _count, None, "ranks on this host; shares the host's memory budget"),
    Variable("WORKER", _count, None, "number of this worker, with NUM_WORKERS"),
    Variable("NUM_WORKERS", _count, None, "number of workers"),
    Variable("HTTPS_PROXY", str, "", "proxy for https:// (HTTP_PROXY, NO_PROXY likewise)"),
    Variable("SSL_CERT_FILE", str, "", "certificate authorities that TLS is verified against"),
)

_BY_NAME = {v.name: v for v in VARIABLES}
# Names that WebDataset or later parts of this project read; known, so that no one is warned about them.
_KNOWN_ELSEWHERE = {"WDS_REQUIRE_SERVERS"}


_inherited_security = False
_asked: set[str] = set()
_warned: set[str] = set()


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The raw text of environment variable ``name``, None where it is not set."""
    _asked.add(name)
    return (os.environ if environ is None else environ).get(name)


def _value(name: str, environ: Mapping[str, str] | None = None) -> Any:
    known = _BY_NAME[name]
    text = variable(name, environ)
    if text is None or (text == "" and known.parse is not str):
        return known.default
    try:
        return known.parse(text)
    except ValueError as exn:
        raise ConfigError(f"{name}={text!r} does not parse: {exn} ({name}: {known.meaning})") from exn


def unknown_variables(used: frozenset[str] = frozenset()) -> list[tuple[str, str | None]]:
    """``WDS_*`` names in the environment that mean nothing, each with the nearest known name.

    ``used`` are names that shard specifications refer to (``${X}`` reads ``WDS_X``), beside those that were read
    in this process.
    """
    known = set(_BY_NAME) | _KNOWN_ELSEWHERE | _asked | used
    strangers = sorted(n for n in os.environ if n.startswith("WDS_") and n not in known)
    return [(n, next(iter(difflib.get_close_matches(n, known, 1)), None)) for n in strangers]


def warn_of_unknown_variables() -> None:
    """Log each ``WDS_*`` name that means nothing, once a process: a misspelt setting has no effect, silently."""
    for name, nearest in unknown_variables():
        if name not in _warned:
            _warned.add(name)
            hint = f"; did you mean {nearest}?" if nearest else ""
            logger.warning("%s is set but means nothing%s (`wds-async env` lists what does)", name, hint)


def configure_logging() -> None:
    """Give the ``wds_async`` logger the level of ``WDS_LOG`` and, where the program logs nowhere yet, standard error.

    Without ``WDS_LOG`` logging is left to the program. ConfigError for a level that does not exist.
    """
    level = settings().log.upper()
    if not level:
        return
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"WDS_LOG={level.lower()!r} is not a level; write debug, info, warning or error")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says about everything but the transfer (see `TransferConfig`)."""

    seed: int | None
    epoch: int | None
    show_seed: bool
    secure: bool
    allow_pickle: bool
    weights_only: bool
    native_pipes: bool
    handover: bool
    progress: bool
    log: str
    verbose: int
    gopen_buffer: int
    cache: str
    cache_size: int | None
    verbose_cache: bool
    rewrite: str


def security_enforced() -> bool:
    """Whether the program has set ``wds.utils.enforce_security``, which says the same as ``WDS_SECURE=1``; or its
    parent has, which a spawned worker is told by `inherit_security`."""
    return _inherited_security or bool(vars(sys.modules.get("wds_async.utils", sys)).get("enforce_security", False))


def inherit_security(enforced: bool) -> None:
    """Tell a spawned worker what its parent's program has set. It is never taken back."""
    global _inherited_security
    _inherited_security = _inherited_security or enforced


def settings() -> Settings:
    """The environment as it is now; read again at each call, so that tests and notebooks can change it."""
    return Settings(
        seed=_value("WDS_SEED"),
        epoch=_value("WDS_EPOCH"),
        show_seed=_value("WDS_SHOW_SEED"),
        secure=_value("WDS_SECURE") or security_enforced(),
        allow_pickle=_value("WDS_ALLOW_PICKLE"),
        weights_only=_value("WDS_PYTORCH_WEIGHTS_ONLY"),
        native_pipes=_value("WDS_NATIVE_PIPES"),
        handover=_value("WDS_HANDOVER"),
        progress=_value("WDS_PROGRESS"),
        log=_value("WDS_LOG"),
        verbose=_value("GOPEN_VERBOSE"),
        gopen_buffer=_value("GOPEN_BUFFER"),
        cache=_value("WDS_CACHE"),
        cache_size=_value("WDS_CACHE_SIZE"),
        verbose_cache=_value("WDS_VERBOSE_CACHE"),
        rewrite=_value("WDS_REWRITE") or _value("GOPEN_REWRITE"),
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How the engine moves bytes. Two readers with different values share one loop and one budget."""

    budget_bytes: int = DEFAULT_BUDGET_BYTES
    """Slab memory of the process. More lets more parts be in flight: throughput from a store is about
    ``budget / (latency + part / rate of one connection)``."""
    part_bytes: int = 2 * MIB
    """Size of one range request and of one slab; a power of two. Smaller costs requests and CPU, larger
    leaves fewer parts in flight under the same budget."""
    first_part_bytes: int = 128 * KIB
    """The first part of an epoch; the following ones double, so that the first sample comes soon."""
    connections: int = 64
    """Most HTTP connections of the process."""
    processes: int = 1
    """That read on this host at the same time, and share its pace among them."""
    open_streams: int = 4
    """Pipes and streamed answers that are open ahead of the reader, each a process or a connection."""
    direct: bool = True
    """False reads HTTP through aiohttp."""
    connect_timeout_s: float = 5.0
    """DNS, TCP and TLS together, for one attempt. Half of what an origin has that never answered: it is tried twice."""
    stall_timeout_s: float = 30.0
    """Seconds without a byte before an attempt is given up and made again."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    switch_interval_s: float = 5e-5
    """GIL switch interval while a reader is open, unless the program chose one of its own. With
    CPython's 5 ms a consumer in pure Python starves the loop thread (see ``benchmarks/busy.py``)."""

    def __post_init__(self) -> None:
        if self.part_bytes < 64 * KIB or self.part_bytes & (self.part_bytes - 1):
            raise ConfigError(f"part size {self.part_bytes}: must be a power of two of at least 65536 (WDS_PART_SIZE)")
        if self.budget_bytes < 4 * self.part_bytes:
            raise ConfigError(
                f"budget of {self.budget_bytes} bytes holds fewer than four parts of {self.part_bytes} bytes: "
                "raise the budget (WDS_BUDGET, budget_bytes) or lower the part size (WDS_PART_SIZE, part_bytes)"
            )
        if self.connections < 1:
            raise ConfigError("connections: at least 1 (WDS_CONNECTIONS)")


def transfer_config(workers: int = 1, **overrides: Any) -> TransferConfig:
    """The transfer's settings from the environment, for one of ``workers`` processes of this rank.

    ``overrides`` are fields of `TransferConfig` and win; sizes may be written as ``"64M"``. ConfigError for a name
    that does not exist or a value of the wrong type or range.
    """
    processes = workers * (_value("LOCAL_WORLD_SIZE") or 1)
    budget = _value("WDS_BUDGET")
    if budget is None:
        budget = default_budget_bytes(processes)
    retry = RetryPolicy(max_attempts=max(1, _value("WDS_RETRIES")), timeout_s=_value("WDS_TIMEOUT"))
    values: dict[str, Any] = {
        "budget_bytes": budget,
        "processes": processes,
        "part_bytes": _value("WDS_PART_SIZE"),
        "connections": _value("WDS_CONNECTIONS"),
        "direct": _value("WDS_DIRECT"),
        "retry": retry,
        "stall_timeout_s": min(30.0, retry.timeout_s),
    }
    return TransferConfig(**{**values, **{name: _override(name, value) for name, value in overrides.items()}})


def _override(name: str, value: Any) -> Any:
    """An argument as the field's type."""
    types = {known.name: str(known.type) for known in dataclasses.fields(TransferConfig)}
    if name not in types:
        raise ConfigError(f"transfer has no {name!r}; its names are {', '.join(sorted(types))}")
    try:
        if name.endswith("_bytes") and isinstance(value, str):
            return parse_bytes(value)
        if types[name] == "int":
            return operator.index(value)
        if types[name] == "float":
            return float(value)
    except (TypeError, ValueError) as exn:
        raise ConfigError(f"transfer: {name}={value!r}: {exn}") from exn
    return value


def default_budget_bytes(processes: int = 1) -> int:
    """128 MiB, less where ``processes`` of them would pass an eighth of the memory or 3 GiB a host;
    never under 32 MiB."""
    host = min(memory_bytes() // 8, _HOST_BUDGET_BYTES)
    return max(MIN_BUDGET_BYTES, min(DEFAULT_BUDGET_BYTES, host // max(1, processes)))


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its cgroup's limit where that is lower."""
    limits = [64 * GIB]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _pair(index: str, count: str) -> tuple[int, int] | None:
    i, n = _value(index), _value(count)
    if i is None or n is None:
        return None
    if n < 1 or i >= n:
        raise ConfigError(f"{index}={i} with {count}={n}: the first must be below the second")
    return i, n


def rank_from_env() -> tuple[int, int] | None:
    """``(RANK, WORLD_SIZE)`` where both are set."""
    return _pair("RANK", "WORLD_SIZE")


def rank_from_slurm() -> tuple[int, int] | None:
    """``(SLURM_PROCID, SLURM_STEP_NUM_TASKS)`` of a task that ``srun`` started.

    ``SLURM_NTASKS`` will not do: a batch script that starts one program by itself sees the number of the whole
    job there, with ``SLURM_PROCID=0``, and would leave out all shards but the first rank's.
    """
    return _pair("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def worker_from_env() -> tuple[int, int] | None:
    """``(WORKER, NUM_WORKERS)`` where both are set."""
    return _pair("WORKER", "NUM_WORKERS")


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for ``url``, None for a direct connection."""
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return urllib.request.getproxies().get(parts.scheme)
