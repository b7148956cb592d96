"""Every setting, frozen, with its unit and default. Arguments beat environment (`environment`) beats default.

Also the retry policy: when and how often to try again, as pure values without a clock."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import random
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wds_async import packages
from wds_async.environment import GIB, KIB, MIB, VERIFY, parse_bytes, schemes, value, variable
from wds_async.errors import ConfigError

__all__ = [
    "DEFAULT_BUDGET_BYTES", "HEDGE_START_BYTES", "MIN_BUDGET_BYTES", "RetryPolicy", "Settings", "TransferConfig",
    "configure_logging", "default_budget_bytes", "inherit_security", "is_secure", "place_from_env", "proxy_for",
    "proxy_variable", "rewriting", "security_enforced", "settings", "transfer_config",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Rules for retrying a part: how often, and for how long.

    Attempts are counted without progress: one that brought a new byte starts the count again, so a long download over
    a bad line ends only when nothing moves any more.
    """

    max_attempts: int | None = None
    """Attempts without progress before the error is raised; 1 means never try again. None: as many as ``timeout_s``
    allows, so that an outage is waited for whatever the number of attempts in it."""
    max_contradictions: int = 8
    """The same, for answers that contradict the request: those of a broken server, which time does not heal."""
    timeout_s: float = 300.0
    """Seconds without progress, over all attempts, before the error is raised."""
    first_contact_s: float = 10.0
    """The same, for an origin that has never answered: a typo must not look like a hang."""
    refusal_timeout_s: float = 30.0
    """Seconds for which a 403 or 404 is retried, where the store has answered the same identity for the same bucket
    before in this process: permissions, new credentials and listings take a while to reach every server of a store.
    0: a refusal ends the read at once."""
    base_s: float = 0.02
    """Upper bound of the first wait: most faults are over at once, and all that is read behind this part waits."""
    cap_s: float = 20.0
    """Upper bound of every wait, and of what ``Retry-After`` can ask for."""

    @property
    def brief_attempts(self) -> int:
        """Attempts of one brief request: a page of a listing, a file to be written."""
        return self.max_contradictions if self.max_attempts is None else self.max_attempts

    def delay_s(self, attempt: int, rng: random.Random, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after failed attempt number ``attempt`` (the first is 1)."""
        bound = min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 30))
        return max(rng.uniform(0.0, bound), min(retry_after_s or 0.0, self.cap_s))

    def allowed_s(self, *, origin_known: bool) -> float:
        """Return the seconds without progress before the error is raised."""
        return self.timeout_s if origin_known else min(self.first_contact_s, self.timeout_s)

    def exhausted(self, attempt: int, *, contradicted: bool = False) -> bool:
        """Return whether ``attempt`` failures in a row are too many, however little time they took."""
        most = self.max_attempts
        if contradicted:
            most = self.max_contradictions if most is None else min(most, self.max_contradictions)
        return most is not None and attempt >= most

    def gives_up(self, attempt: int, idle_s: float, *, origin_known: bool, contradicted: bool = False) -> bool:
        """Return whether to stop after ``attempt`` failures in a row and ``idle_s`` seconds without a byte."""
        return idle_s >= self.allowed_s(origin_known=origin_known) or self.exhausted(attempt, contradicted=contradicted)


logger = logging.getLogger("wds_async")

DEFAULT_BUDGET_BYTES = 128 * MIB
MIN_BUDGET_BYTES = 32 * MIB
HEDGE_START_BYTES = 16 * MIB
_HOST_BUDGET_BYTES = 3 * GIB

_inherited_security = False


def configure_logging() -> None:
    """Give the ``wds_async`` logger the level of ``WDS_LOG`` and, where the program logs nowhere yet, standard error.

    Without ``WDS_LOG`` logging is left to the program. ConfigError for a level that does not exist.
    """
    level = value("WDS_LOG").upper()
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
    """The environment's settings of everything but the transfer (see `TransferConfig`)."""

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
    ledger: str
    max_bad_fraction: float | None
    on_corrupt: str
    gopen_buffer: int
    metrics_port: str | None
    cost_limit: float | None
    prices: str
    region: str
    cache: str
    cache_size: int | None
    cache_check: bool
    verbose_cache: bool
    rewrite: str
    ais_endpoint: str
    use_ais_for: frozenset[str]
    ais_fallback: bool


_SETTINGS = [f.name for f in dataclasses.fields(Settings)]
_OTHER_VARIABLES = {
    "weights_only": "WDS_PYTORCH_WEIGHTS_ONLY",
    "verbose": "GOPEN_VERBOSE",
    "gopen_buffer": "GOPEN_BUFFER",
    "ais_endpoint": "AIS_ENDPOINT",
    "use_ais_for": "USE_AIS_FOR",
}
"""Variables of the settings that are not called ``WDS_`` and the field's name."""


def settings() -> Settings:
    """Return the environment as it is now; read again at each call, so that tests and notebooks can change it."""
    values = {name: value(_OTHER_VARIABLES.get(name) or f"WDS_{name.upper()}") for name in _SETTINGS}
    values["secure"], values["rewrite"] = is_secure(), rewriting()
    values["use_ais_for"] = schemes(values["use_ais_for"])
    return Settings(**values)


def is_secure() -> bool:
    """Return whether secure mode is on: ``WDS_SECURE=1``, or the program enforces it."""
    return bool(value("WDS_SECURE")) or security_enforced()


def rewriting() -> str:
    """Return the rules of ``WDS_REWRITE``, or else of ``GOPEN_REWRITE``, as they are written there."""
    return str(value("WDS_REWRITE") or value("GOPEN_REWRITE"))


def security_enforced() -> bool:
    """Return whether ``wds.utils.enforce_security`` is set, which means the same as ``WDS_SECURE=1``: by this program,
    or by its parent, from which a spawned worker gets it (`inherit_security`).
    """
    utils = packages.loaded("wds_async.utils")
    return _inherited_security or bool(getattr(utils, "__dict__", {}).get("enforce_security", False))


def inherit_security(enforced: bool) -> None:
    """Enforce in a spawned worker what its parent's program has set. It is never taken back."""
    global _inherited_security
    _inherited_security = _inherited_security or enforced


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of the engine. Two readers with different values share one loop and one budget."""

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
    """Number of processes that read on this host at the same time, and share its rate."""
    open_streams: int = 4
    """Pipes and streamed answers that are open ahead of the reader, each a process or a connection."""
    direct: bool = True
    """False reads HTTP through aiohttp."""
    connect_timeout_s: float = 5.0
    """DNS, TCP and TLS together, for one attempt. Half of what an origin has that never answered: it is tried twice."""
    stall_timeout_s: float = 30.0
    """Seconds without a byte before an attempt is given up and made again."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    hedge_share: float = 0.03
    """Bytes that may come twice, of all that are read, because a part was much slower than its peers and was
    hedged. 0: none."""
    hedge_start_bytes: int = HEDGE_START_BYTES
    """Bytes that each origin may bring twice beside that, to begin with."""
    verify: str = "auto"
    """Whose checksums are compared: "auto" (CRC-32C where an answer brings it), "always" (all that the store has,
    by a request if need be; a shard's samples come once it was found good) or "never"."""
    switch_interval_s: float = 5e-5
    """GIL switch interval while a reader is open, unless the program chose one of its own. With
    CPython's 5 ms a consumer in pure Python starves the loop thread (see ``benchmarks/scenarios/busy.py``)."""

    def taking_refusals(self) -> TransferConfig:
        """Return the same with a 403 or 404 that ends a read at once, for a client or person that waits."""
        return dataclasses.replace(self, retry=dataclasses.replace(self.retry, refusal_timeout_s=0.0))

    def __post_init__(self) -> None:
        if self.part_bytes < 64 * KIB or self.part_bytes & (self.part_bytes - 1):
            raise ConfigError(f"part size {self.part_bytes}: must be a power of two of at least 65536 (WDS_PART_SIZE)")
        if self.budget_bytes < 4 * self.part_bytes:
            raise ConfigError(
                f"budget of {self.budget_bytes} bytes holds fewer than four parts of {self.part_bytes} bytes: "
                "raise the budget (WDS_BUDGET, budget_bytes) or lower the part size (WDS_PART_SIZE, part_bytes)"
            )
        if self.verify not in VERIFY:
            raise ConfigError(f"verify={self.verify!r}: one of {', '.join(VERIFY)} (WDS_VERIFY)")
        if not 0 <= self.hedge_share <= 1:
            raise ConfigError(f"hedge_share={self.hedge_share!r}: a share of the bytes, from 0 to 1")
        if self.connections < 1:
            raise ConfigError("connections: at least 1 (WDS_CONNECTIONS)")


def transfer_config(workers: int = 1, **overrides: Any) -> TransferConfig:
    """Return the engine's settings from the environment, for one of ``workers`` processes of this rank.

    ``overrides`` are fields of `TransferConfig` and win; sizes may be written as ``"64M"``. ConfigError for a name
    that does not exist or a value of the wrong type or range.
    """
    processes = workers * (value("LOCAL_WORLD_SIZE") or 1)
    budget, attempts, timeout_s = value("WDS_BUDGET"), value("WDS_RETRIES"), value("WDS_TIMEOUT")
    values: dict[str, Any] = {
        "budget_bytes": default_budget_bytes(processes) if budget is None else budget,
        "processes": processes,
        "part_bytes": value("WDS_PART_SIZE"),
        "connections": value("WDS_CONNECTIONS"),
        "direct": value("WDS_DIRECT"),
        "retry": RetryPolicy(
            max_attempts=None if attempts is None else max(1, attempts),
            timeout_s=timeout_s,
            refusal_timeout_s=value("WDS_REFUSAL_TIMEOUT"),
        ),
        "connect_timeout_s": min(5.0, timeout_s),
        "stall_timeout_s": min(30.0, timeout_s),
        "verify": value("WDS_VERIFY"),
    }
    return TransferConfig(**values | {name: _converted(name, argument) for name, argument in overrides.items()})


def _converted(name: str, argument: Any) -> Any:
    """Return an argument converted to the field's type."""
    types = {f.name: str(f.type) for f in dataclasses.fields(TransferConfig)}
    if name not in types:
        raise ConfigError(f"transfer has no {name!r}; its names are {', '.join(sorted(types))}")
    try:
        if name.endswith("_bytes") and isinstance(argument, str):
            return parse_bytes(argument)
        if types[name] == "int":
            return operator.index(argument)
        return float(argument) if types[name] == "float" else argument
    except (TypeError, ValueError) as exn:
        raise ConfigError(f"transfer: {name}={argument!r}: {exn}") from exn


def default_budget_bytes(processes: int = 1) -> int:
    """Return 128 MiB, or less if ``processes`` of them would exceed an eighth of the memory or 3 GiB a host; at least
    32 MiB."""
    host = min(memory_bytes() // 8, _HOST_BUDGET_BYTES)
    return max(MIN_BUDGET_BYTES, min(DEFAULT_BUDGET_BYTES, host // max(1, processes)))


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its cgroup's limit if that is lower."""
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


def place_from_env(index: str, count: str) -> tuple[int, int] | None:
    """Return the values of two variables, as ``RANK`` of ``WORLD_SIZE``; None unless both are set. ConfigError unless
    the first is below the second."""
    i, n = value(index), value(count)
    if i is None or n is None:
        return None
    if i >= n:
        raise ConfigError(f"{index}={i} with {count}={n}: the first must be below the second")
    return i, n


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for ``url``, None for a direct connection."""
    parts = urllib.parse.urlsplit(url)
    if sys.platform == "linux" and not any(map(variable, _proxy_variables(parts.scheme))):
        return None  # asked for every shard: the look at all variables below takes long
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 (it loads http.client)

    return None if proxy_bypass(parts.netloc.rpartition("@")[2]) else getproxies().get(parts.scheme)


def proxy_variable(url: str) -> str:
    """Return the environment variable that names the proxy for ``url`` (`proxy_for`), or words for another source."""
    return next(filter(variable, _proxy_variables(urllib.parse.urlsplit(url).scheme)), "the system's proxy settings")


def _proxy_variables(scheme: str) -> tuple[str, str]:
    return f"{scheme}_proxy", f"{scheme}_proxy".upper()
