"""The environment variables, one record each, and the only reader of ``os.environ``.

Parsing, ``wds-async env`` and docs/environment.md come from `VARIABLES`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_async.errors import ConfigError
from wds_async.logs import warn_once
from wds_async.storage.stores import usual_scheme

__all__ = [
    "GIB", "KIB", "MIB", "ON_CORRUPT", "SECRET", "VARIABLES", "VERIFY", "ValueType", "Variable", "names",
    "parse_bytes", "schemes", "shown_bytes", "snapshot", "take_rank", "unknown_variables", "value", "variable",
    "warn_of_unknown_variables",
]  # fmt: skip

logger = logging.getLogger("wds_async")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VERIFY = ("auto", "always", "never")
ENGINES = ("thread", "process", "auto")
ON_CORRUPT = ("raise", "skip_shard", "resync")

_SIZE = re.compile(r"(\d{1,18}(?:\.\d*)?(?:e\d{1,2})?) ?([kmgt]?)(?:i?b)?")
_SUFFIXES = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("", "0", "false", "no", "off"), False)}


def parse_bytes(text: str) -> int:
    """Return the bytes that a text means: ``"128M"``, ``"64MiB"``, ``"1.5g"`` or a number (``"1e12"``); units are
    powers of 1024. ValueError otherwise.
    """
    size = _SIZE.fullmatch(text.strip().lower())
    if size is None:
        raise ValueError(f"{text!r} is not a size; write 128M or 134217728")
    return int(float(size[1]) * _SUFFIXES[size[2]])


def shown_bytes(count: int) -> str:
    """Return ``count`` bytes as `parse_bytes` reads them, in the largest unit that gives a whole number: ``"128M"``."""
    suffix, unit = next((s, u) for s, u in reversed(_SUFFIXES.items()) if u == 1 or (count and count % u == 0))
    return f"{count // unit}{suffix.upper()}"


def schemes(text: str) -> frozenset[str]:
    """Return the schemes of ``"gs:s3"`` or ``"gs,s3"``, aliases replaced by the store's main scheme."""
    names = [name.strip().removesuffix("://").lower() for name in re.split(r":(?!//)|,", text)]
    return frozenset(usual_scheme(name) for name in names if name)


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of value: its name in the documents, its parser (ValueError for a bad value), and how it is shown."""

    name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str


def _number(
    name: str, convert: Callable[[str], Any], accepts: Callable[[Any], bool], expected: str, show: str = "{:g}"
) -> ValueType:
    """Return the type of numbers that ``accepts`` takes; its parser raises ValueError with ``expected`` for others."""

    def parse(text: str) -> Any:
        number = convert(text)
        if not accepts(number):
            raise ValueError(expected)
        return number

    return ValueType(name, parse, show.format)


def _choice(*choices: str) -> ValueType:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"write one of {', '.join(choices)}")
        return text

    return ValueType("choice", parse)


def _parse_flag(text: str) -> bool:
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError("write 1 or 0") from None


def _parse_port(text: str) -> str:
    address, port = text.strip(), text.strip().rpartition(":")[2]
    if not (port.isdecimal() and int(port) <= 65535):
        raise ValueError("write a port (9464), or an address with one (0.0.0.0:9464)")
    return address


def _parse_dollars(text: str) -> float:
    return float(text.strip().removeprefix("$"))


TEXT = ValueType("text", str)
SECRET = ValueType("secret", str)
SIZE = ValueType("size", parse_bytes, shown_bytes)
FLAG = ValueType("0 or 1", _parse_flag, lambda flag: "1" if flag else "0")
INTEGER = ValueType("integer", int)
COUNT = _number("count", int, lambda n: n >= 0, "a count is not negative", "{}")
SECONDS = _number("seconds", float, lambda n: n > 0, "a time is a positive number of seconds")
WAIT = _number("seconds", float, lambda n: n >= 0, "a time is a number of seconds, 0 or more")
FRACTION = _number("fraction", float, lambda n: 0 <= n <= 1, "a share is a number from 0 to 1")
DOLLARS = _number("dollars", _parse_dollars, lambda n: n >= 0, "a cost is a number of US dollars, 0 or more")
PORT = ValueType("port", _parse_port)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, type, default, meaning, and the heading of its group."""

    name: str
    type: ValueType
    default: Any
    meaning: str
    group: str

    @property
    def shown_default(self) -> str:
        """The default as it would be set in the environment, "" where there is none."""
        return "" if self.default is None else self.type.show(self.default)


def _group(heading: str, *records: tuple[str, ValueType, Any, str]) -> Iterator[Variable]:
    return (Variable(*record, heading) for record in records)


VARIABLES: tuple[Variable, ...] = (
    *_group(
        "Transfer",
        ("WDS_BUDGET", SIZE, None, "shard data held in memory by one process; 128M unless memory is short"),
        ("WDS_PART_SIZE", SIZE, 2 * MIB, "size of one range request; a power of two of at least 64K"),
        ("WDS_CONNECTIONS", COUNT, 64, "maximum HTTP connections of one process"),
        ("WDS_DIRECT", FLAG, True, "0: read HTTP through aiohttp instead of the zero-copy client"),
        (
            "WDS_ENGINE",
            _choice(*ENGINES),
            "thread",
            "thread, process: where shards are received; auto: by a process once the thread is slow and a core idle",
        ),
        ("WDS_RETRIES", COUNT, None, "attempts without a new byte before a transfer fails; unset: until WDS_TIMEOUT"),
        ("WDS_TIMEOUT", SECONDS, 300.0, "seconds without a new byte before a transfer fails"),
        ("WDS_REFUSAL_TIMEOUT", WAIT, 30.0, "how long a 403 or 404 is retried in a bucket read before; 0: not at all"),
        (
            "WDS_VERIFY",
            _choice(*VERIFY),
            "auto",
            "auto: CRC-32C if a response contains it; always: all checksums; never",
        ),
    ),
    *_group(
        "Damaged shards",
        ("WDS_LEDGER", TEXT, "", "file to which skipped samples and shards are appended, one JSON object per line"),
        (
            "WDS_MAX_BAD_FRACTION",
            FRACTION,
            None,
            "share of bad samples (or bytes) at which the run stops, such as 0.01",
        ),
        (
            "WDS_ON_CORRUPT",
            _choice(*ON_CORRUPT),
            "raise",
            "what to do about damage in a tar: raise, skip_shard or resync",
        ),
    ),
    *_group(
        "URLs and safety",
        ("WDS_REWRITE", TEXT, "", "regex=replacement;… applied to the start of every URL before it is opened"),
        ("GOPEN_REWRITE", TEXT, "", "WebDataset's older name, used if WDS_REWRITE is not set"),
        ("WDS_NATIVE_PIPES", FLAG, False, "1: read pipe:curl, pipe:cat and the like natively"),
        ("WDS_SECURE", FLAG, False, "1: refuse pickles, pipe:, local files and rewriting"),
        ("WDS_ALLOW_PICKLE", FLAG, False, "1: decode pickled fields of any class (runs code from the data)"),
        ("WDS_PYTORCH_WEIGHTS_ONLY", FLAG, True, "0: .pth fields may hold any class (runs code from the data)"),
    ),
    *_group(
        "Order",
        ("WDS_SEED", INTEGER, None, "seed of shard shuffling, unless an argument gives one"),
        ("WDS_EPOCH", INTEGER, None, "number of the first epoch, unless an argument gives one"),
        ("WDS_SHOW_SEED", FLAG, False, "1: log the seed of ResampledShards"),
    ),
    *_group(
        "Watching, cost and logs",
        ("WDS_HANDOVER", FLAG, True, "0: batches of WebLoader's workers go through torch's queue"),
        ("WDS_PROFILE", FLAG, False, "1: each stage's items are ranges of torch.profiler, and of NVTX on a GPU"),
        ("WDS_PROGRESS", FLAG, False, "1: show a progress bar and a summary line for every epoch"),
        ("WDS_METRICS_PORT", PORT, None, "port (of 127.0.0.1, or 0.0.0.0:9464) of a job's /metrics; 0: a free one"),
        ("WDS_COST_LIMIT", DOLLARS, None, "US dollars of requests and traffic at which a run stops"),
        ("WDS_PRICES", TEXT, "", "YAML file of prices in place of the built-in table"),
        ("WDS_REGION", TEXT, "", "region of this machine, as its provider calls it; for prices"),
        ("WDS_SERVE_CONFIG", TEXT, "", "YAML file of `wds-async serve`, unless --config names one"),
        ("WDS_LOG", TEXT, "", "level of the wds_async logger: debug (with whole tracebacks), info, warning, error"),
        ("GOPEN_VERBOSE", COUNT, 0, "1: log every shard that is opened"),
        ("GOPEN_BUFFER", INTEGER, -1, "buffer in bytes of the local files that gopen opens; -1: Python's default"),
    ),
    *_group(
        "Shard cache",
        ("WDS_CACHE", TEXT, "", "folder of the shard cache; setting it turns caching on"),
        ("WIDS_CACHE", TEXT, "", "folder of random access's shards, used if WDS_CACHE is not set"),
        ("WDS_CACHE_SIZE", SIZE, None, "maximum bytes in the shard cache; unset: no limit"),
        ("WDS_CACHE_CHECK", FLAG, False, "1: check once per epoch whether a cached shard has changed in its store"),
        (
            "WDS_LEARN_INDEX",
            FLAG,
            False,
            "1: write an index of every shard that is read whole into the cache folder",
        ),
        ("WDS_VERBOSE_CACHE", FLAG, False, "1: log every shard that the cache keeps, uses or drops"),
    ),
    *_group(
        "Ranks and workers",
        ("WDS_RANK", COUNT, None, "rank for data, with WDS_WORLD_SIZE, where several processes read the same data"),
        ("WDS_WORLD_SIZE", COUNT, None, "number of ranks for data; they go before RANK and WORLD_SIZE"),
        ("RANK", COUNT, None, "rank of this process, with WORLD_SIZE"),
        ("WORLD_SIZE", COUNT, None, "number of ranks"),
        ("JOB_COMPLETION_INDEX", COUNT, None, "rank of a pod of an Indexed Job, with WORLD_SIZE, for distributed jobs"),
        ("SLURM_PROCID", COUNT, None, "rank of a task that srun started, used if RANK is not set"),
        ("SLURM_STEP_NUM_TASKS", COUNT, None, "number of tasks that srun started"),
        ("LOCAL_WORLD_SIZE", COUNT, None, "ranks on this host; they share its memory budget"),
        ("WORKER", COUNT, None, "number of this worker, with NUM_WORKERS"),
        ("NUM_WORKERS", COUNT, None, "number of workers"),
    ),
    *_group(
        "AIStore and the service",
        ("AIS_ENDPOINT", TEXT, "", "AIStore or a service, http://host:51080 or unix:/path; see USE_AIS_FOR"),
        (
            "USE_AIS_FOR",
            TEXT,
            "",
            "gs:s3:az: schemes that AIS_ENDPOINT reads besides ais://, URLs unchanged",
        ),
        (
            "WDS_PEERS",
            TEXT,
            "",
            "members of a cluster of services (`peers`): host:port, dns:name:port or files, with commas",
        ),
        (
            "WDS_PEER_ADDRESS",
            TEXT,
            "",
            "this service's own address among them (`peer_address`); unset: found by itself",
        ),
        (
            "WDS_PEER_NAME",
            TEXT,
            "",
            "a name of it that stays when its address changes, such as its node's (`peer_name`)",
        ),
        ("WDS_AIS_FALLBACK", FLAG, False, "1: read the bucket itself when AIStore cannot be reached"),
        (
            "WDS_AIS_GET_BATCH",
            FLAG,
            False,
            "1: random access reads many samples by one request of AIStore 5.0 (GetBatch)",
        ),
        ("AIS_AUTHN_TOKEN", SECRET, "", "AIStore's token, sent to its proxy only"),
        ("AIS_AUTHN_TOKEN_FILE", TEXT, "", "JSON file with the token; unset: ais/cli/auth.token in ~/.config"),
        ("AIS_SKIP_VERIFY_CRT", FLAG, False, "1: do not verify AIStore's TLS certificates"),
        ("AIS_CLIENT_CA", TEXT, "", "PEM file of the authority that signed AIStore's certificates"),
        ("AIS_CRT", TEXT, "", "PEM file of our certificate for AIStore; AIS_CRT_KEY has its key"),
        ("AIS_CRT_KEY", TEXT, "", "PEM file of the key of AIS_CRT"),
    ),
    *_group(
        "Stores and the network",
        (
            "AWS_ENDPOINT_URL_S3",
            TEXT,
            "",
            "endpoint of another S3 (MinIO, Ceph, R2); other AWS_* variables are AWS's own",
        ),
        ("GOOGLE_APPLICATION_CREDENTIALS", TEXT, "", "key or workload identity file for gs://"),
        ("STORAGE_EMULATOR_HOST", TEXT, "", "an emulator of Google Cloud Storage, http://host:port"),
        ("AZURE_STORAGE_CONNECTION_STRING", SECRET, "", "Azure: account, key and endpoint in one"),
        ("AZURE_STORAGE_ACCOUNT_NAME", TEXT, "", "account of az:// URLs (AZURE_STORAGE_ACCOUNT likewise)"),
        ("AZURE_STORAGE_ACCOUNT_KEY", SECRET, "", "key of the account (AZURE_STORAGE_KEY likewise)"),
        ("AZURE_STORAGE_SAS_TOKEN", SECRET, "", "or a shared access signature"),
        ("AZURE_STORAGE_CLIENT_ID", TEXT, "", "or a service principal, with the next two"),
        ("AZURE_STORAGE_CLIENT_SECRET", SECRET, "", "secret of the service principal"),
        ("AZURE_STORAGE_TENANT_ID", TEXT, "", "tenant of the service principal"),
        ("AZURE_STORAGE_ANON", FLAG, False, "1: read az:// anonymously, without looking for a managed identity"),
        ("HF_TOKEN", SECRET, "", "token of the Hugging Face hub, sent to the hub only"),
        ("HF_TOKEN_PATH", TEXT, "", "file of the hub's login; unset: $HF_HOME/token"),
        ("HF_ENDPOINT", TEXT, "", "address of a hub other than https://huggingface.co"),
        ("NETRC", TEXT, "", "file of names and passwords by host, for http(s); unset: ~/.netrc"),
        ("HTTPS_PROXY", TEXT, "", "proxy for https:// (HTTP_PROXY, NO_PROXY likewise)"),
        ("SSL_CERT_FILE", TEXT, "", "certificate authorities that TLS is verified against"),
    ),
)

_BY_NAME = {v.name: v for v in VARIABLES}
_OF_THE_TESTS = {"WDS_REQUIRE_SERVERS", "WDS_AZURITE"}

_NEAR = 0.82  # difflib's ratio of the names without WDS_: CONECTIONS, BUGDET; not BATCH_SIZE, CACHE_DIR

_read: set[str] = set()


def variable(name: str) -> str | None:
    """Return the raw text of environment variable ``name``, None if it is not set."""
    _read.add(name)
    return os.environ.get(name)


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def take_rank(rank: int, world_size: int) -> None:
    """Make this process and those that it starts rank ``rank`` of ``world_size``, whatever its parent was."""
    os.environ["WDS_RANK"], os.environ["WDS_WORLD_SIZE"] = str(rank), str(world_size)


def names(prefix: str) -> list[str]:
    """Return the variables that are set and begin with ``prefix``, sorted."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def value(name: str) -> Any:
    """Return environment variable ``name`` of `VARIABLES`, parsed, or its default. ConfigError if it does not parse."""
    record = _BY_NAME[name]
    text = variable(name)
    if text is None or (text == "" and record.type.parse is not str):
        return record.default
    try:
        return record.type.parse(text)
    except ValueError as exn:
        raise ConfigError(f"{name}={text!r} does not parse: {exn} ({name}: {record.meaning})") from exn


def unknown_variables(used: frozenset[str] = frozenset()) -> list[tuple[str, str | None]]:
    """Return the ``WDS_*`` names in the environment that have no meaning, each with the nearest known name.

    Names that this process has read have one, and so do those in ``used``, which shard specifications refer to
    (``${X}`` reads ``WDS_X``).
    """
    known = {*_BY_NAME, *_OF_THE_TESTS, *_read, *used}
    ours = [name.removeprefix("WDS_") for name in _BY_NAME if name.startswith("WDS_")]
    unknown = []
    for name in names("WDS_"):
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix("WDS_"), ours, 1, _NEAR)
            unknown.append((name, "WDS_" + near[0] if near else None))
    return unknown


def warn_of_unknown_variables() -> None:
    """Log each ``WDS_*`` name that looks like a misspelt setting, once a process.

    Other unknown names belong to the program or another tool (webpack's ``WDS_SOCKET_PORT``) and are not logged.
    """
    for name, nearest in unknown_variables():
        if nearest:
            message = "%s is set but has no meaning; did you mean %s? (`wds-async env` lists all variables)"
            warn_once(logger, ("environment", name), message, name, nearest)
