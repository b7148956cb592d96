"""`create_shards`: the job that writes shards from a folder, a table or a recipe."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wds_async.arguments import check_number, check_size
from wds_async.config import is_secure
from wds_async.distributed.folder import JobFolder, job_url, output_folder, read_objects
from wds_async.distributed.gathering import ShardNames
from wds_async.distributed.jobs import OnProgress
from wds_async.distributed.outputs import bytes_of, check_template
from wds_async.errors import ConfigError, ShardNotFound
from wds_async.redact import redact
from wds_async.storage.listing.expand import expand_listed
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.tools.create.rows import RowStore
from wds_async.tools.create.sources import FolderSource, RecipeSource, RowSource, class_names
from wds_async.tools.create.tables import FORMATS as TABLES
from wds_async.tools.create.tables import TableColumns, TableSource, format_of
from wds_async.tools.create.work import CreateJob, CreateWork, RowPlan
from wds_async.urls import SHARD_SUFFIXES

__all__ = ["FORMATS", "create_shards"]

FORMATS = ("folder", "recipe", *TABLES)
_DEFAULT_SIZE = 10**9
_DEFAULT_COUNT = 10_000
_NUMBER = re.compile(r"\{(\d+)\.\.(\d*)\}|\{shard(:0?\d*d)?\}")
_PART = re.compile(r"\{part(?::0?\d*d)?\}")
_PERCENT = re.compile(r"%(?:0\d+)?d[^/]*$")
_SUFFIX = re.compile(r"\.(?:tar(?:\.\w+)?|tgz)(?:\?.*)?$", re.IGNORECASE)
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
_CLASSES = "classes.json"


@dataclass(frozen=True)
class _ShardTemplate:
    """Names of new shards, as the user wrote them: ``template`` is that for `Shards`."""

    output: str
    template: str
    first: int = 0
    count: int | None = None
    """Number of shards that the name asks for; None for as many as there will be."""
    has_part: bool = False

    @classmethod
    def of(cls, output: str) -> _ShardTemplate:
        """Return the names that ``output`` stands for: a template, one file, or a folder."""
        if not output.strip():
            raise ConfigError("output='': name the shards, a file or a folder")
        if _PERCENT.search(output):
            raise ConfigError(f"output={redact(output)!r}: a shard's number is written {{shard:06d}} or {{000000..}}")
        if output == "-":
            return cls(output, output, count=1)
        if "{" not in output:
            if output.partition("?")[0].lower().endswith(SHARD_SUFFIXES):
                return cls(output, output, count=1)
            folder = "" if output in (".", "./") else f"{output.rstrip('/')}/"
            output = f"{folder}{{shard:06d}}.tar"
        names = ShardNames(_PART.sub("", output))
        if names.has_split:
            raise ConfigError(f"output={redact(output)!r}: there are no splits; wds-async split makes them")
        if (match := _NUMBER.search(output)) is None:
            raise ConfigError(
                f"output={redact(output)!r}: it needs the number of a shard, {{shard:06d}} or {{000000..}}"
            )
        digits = f":0{len(match[1])}d" if match[1] else match[3] or ""
        template = output.replace(match[0], f"{{task{digits}}}")
        return cls(output, template, int(match[1] or 0), names.count, _PART.search(output) is not None)

    @property
    def job(self) -> str:
        """The name of the job, unless it is given one."""
        stem = _SUFFIX.sub("", self.output).rpartition("/")[2].partition("{")[0].strip("-_.")
        return f"create-{_NO_NAME.sub('_', stem)}" if stem else "create"

    def work(self, plan: RowPlan, sizes: _ShardSizes, **how: Any) -> CreateWork:
        """Return the work that writes the shards of ``plan``. ConfigError for names that do not tell them apart."""
        parts = sizes.maxsize if self.has_part and plan.store.counts.unknown else None
        check_template(self.template, len(plan.cuts) - 1, parts=parts is not None)
        return CreateWork(self.template, output_folder(self.template), self.first, parts, **how)


@dataclass(frozen=True)
class _ShardSizes:
    """Size of shards: ``count`` shards, or at most ``maxcount`` samples and ``maxsize`` bytes of fields."""

    maxcount: int | None
    maxsize: int | None

    @classmethod
    def checked(cls, maxcount: int | None, maxsize: float | str | None) -> _ShardSizes:
        """Return these sizes. ConfigError for ones below 1."""
        count = None if maxcount is None else check_size("create_shards", "maxcount", maxcount, at_least=1)
        return cls(count, None if maxsize is None else bytes_of(maxsize))

    def cuts(self, names: _ShardTemplate, order: array[int], sizes: array[int], unknown: int) -> list[int]:
        """Return where each shard begins in ``order``, and the end of the last."""
        total = len(order)
        if names.count is not None:
            if self.maxcount is not None or self.maxsize is not None:
                raise ConfigError(
                    f"output={redact(names.output)!r} names {names.count:,} shards: maxcount and maxsize go with a name"
                    " for any number of them, {000000..}"
                )
            if names.count > total:
                raise ConfigError(f"output={redact(names.output)!r}: {names.count:,} shards for {total:,} samples")
            return [total * number // names.count for number in range(names.count + 1)]
        maxsize, maxcount = self.maxsize, self.maxcount
        if unknown:
            if maxsize is not None and not names.has_part:
                raise ConfigError(
                    f"maxsize={maxsize:,}: nothing tells the sizes of {unknown:,} fields before they are read: give"
                    " maxcount; or add {part:03d} to the output's name, and each task begins another part there"
                )
            maxsize, maxcount = None, _DEFAULT_COUNT if maxcount is None else maxcount
        elif maxsize is None and maxcount is None:
            maxsize = _DEFAULT_SIZE
        return _cuts(order, sizes, maxcount or total, float("inf") if maxsize is None else maxsize)


def _cuts(order: array[int], sizes: array[int], maxcount: int, maxsize: float) -> list[int]:
    cuts, held = [0], 0
    for place, number in enumerate(order):
        if place > cuts[-1] and (place - cuts[-1] >= maxcount or held >= maxsize):
            cuts.append(place)
            held = 0
        held += sizes[number]
    return [*cuts, len(order)]


def create_shards(
    source: str,
    output: str,
    *,
    format: str | None = None,
    imagefolder: bool = False,
    classes: str | Sequence[str] | None = None,
    numbered: bool = False,
    columns: TableColumns | None = None,
    allow_pipe: bool = False,
    skip_errors: bool = False,
    timeout: float | None = None,
    shuffle: int | None = None,
    maxsize: float | str | None = None,
    maxcount: int | None = None,
    index: bool = False,
    job: str | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **engine: Any,
) -> CreateJob:
    """Return the job that writes the samples of ``source`` to new shards.

    ``source``: a folder, a table, a recipe, or ``-`` for a recipe or table on standard input. It is read now; the
        files and URLs that it names are read by `Job.run`. ``format``: one of `FORMATS`; None: by the name.
    ``output``: names of shards, ``"s3://out/train-{000000..}.tar"``; one file; a folder; ``-`` for `CreateJob.write`.
    ``imagefolder``, ``classes``, ``numbered``: of a folder, see `FolderSource`; ``classes`` may be a file. They are
        written to ``classes.json`` beside the shards. ``columns``: of a table.
    ``allow_pipe``: run the commands of a recipe. Never those of a recipe that is fetched.
    ``skip_errors``: leave samples out whose files or URLs cannot be read; ``JOB-errors.jsonl`` names them.
    ``timeout``: seconds without a byte before a URL is given up. None: ``WDS_TIMEOUT``; 30 with ``skip_errors``.
    ``shuffle``: a seed: the samples are permuted.
    ``maxsize``: bytes of fields in a shard, up to a sample more; ``maxcount``: samples. None for both: 1 GB, and
        10,000 samples where sizes are not known before. ``index``: write DALI's index beside each shard.
    ``job``: its name; None: ``create``, with what is before the number in the shards' names (``create-train``).
    ``overwrite``, ``on_progress``, and ``engine``, ``cpus``, ``workers``, ``attempts``: see `map_shards`.

    Raise ConfigError for wrong arguments, and for a source that cannot be read, with the row. Nothing is written before
    `Job.run`. The same source and arguments give the same bytes.
    """
    options, names = StorageOptions(storage_options), _ShardTemplate.of(os.fspath(output))
    seed = None if shuffle is None else check_size("create_shards", "shuffle", shuffle)
    sizes = _ShardSizes.checked(maxcount, maxsize)
    if timeout is not None and check_number("create_shards", "timeout", timeout) <= 0:
        raise ConfigError(f"timeout={timeout!r}: seconds, more than 0")
    rows = _source(os.fspath(source), format, options, columns or TableColumns(), allow_pipe)
    if isinstance(rows, TableSource):
        rows.skip_errors = bool(skip_errors)
    if isinstance(rows, FolderSource):
        rows = _folder(rows, names, imagefolder, classes, numbered)
    elif imagefolder or numbered or classes is not None:
        raise ConfigError(f"{redact(source)}: imagefolder, classes and numbered are for folders")
    plan = _plan(rows, names, sizes, seed, options)
    work = names.work(plan, sizes, index=bool(index), skip_errors=bool(skip_errors), timeout_s=timeout, options=options)
    folder = JobFolder(job_url(work.out, names.job if job is None else job), options)
    asked = {"source": redact(source), "shuffle": seed, "maxsize": sizes.maxsize, "maxcount": sizes.maxcount}
    how: dict[str, Any] = {"overwrite": overwrite, "on_progress": on_progress, **_engine(**engine)}
    return CreateJob.planned(replace(work, allow_pipe=allow_pipe), plan, folder, inputs=asked, **how)


def _engine(
    engine: Any = "local", cpus: float | None = None, workers: int | None = None, attempts: int = 4
) -> dict[str, Any]:
    """Return these arguments as those of `Job`."""
    return {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}


def _folder(
    source: FolderSource,
    names: _ShardTemplate,
    imagefolder: bool,
    classes: str | Sequence[str] | None,
    numbered: bool,
) -> FolderSource:
    """Return the source with these arguments. ConfigError where they exclude each other, and for outputs in it."""
    if classes is not None and not imagefolder:
        raise ConfigError("classes: these are the classes of an image folder; say that it is one (imagefolder)")
    if names.output != "-":
        _check_apart(source.url, output_folder(names.template))
    listed = class_names(classes, source.options) if isinstance(classes, str) else classes
    return replace(source, imagefolder=imagefolder, classes=listed, numbered=numbered)


def _source(
    source: str,
    format: str | None,
    options: StorageOptions,
    columns: TableColumns,
    allow_pipe: bool,
) -> RowSource:
    """Return the source of a name. ConfigError where its format is not known, and for arguments of another one."""
    kind = _format(source, options) if format is None else format
    if kind not in FORMATS:
        raise ConfigError(f"format={kind!r}: one of {', '.join(FORMATS)}")
    if kind not in TABLES and (columns.are_named or columns.key is not None):
        raise ConfigError(f"{redact(source)} is a {kind}: columns (field, file, url, json, key) are those of a table")
    if kind == "folder":
        return FolderSource(f"{source.rstrip('/')}/" if source != "/" else source, options=options)
    if kind == "recipe":
        is_fetched = source != "-" and locate(source, options=options).path is None
        return RecipeSource(source, allow_pipe and not is_fetched and not is_secure(), options)
    if os.path.isdir(source):
        raise ConfigError(f"{source}: this is a folder, not a table; name the tables in it, as in '{source}/*.{kind}'")
    return TableSource([source] if source == "-" else expand_listed(source, options), kind, columns, options=options)


def _format(source: str, options: StorageOptions) -> str:
    if source == "-":
        return "recipe"
    if (table := format_of(source)) is not None:
        return table
    path = locate(source, options=options).path
    if source.endswith("/") or (path is not None and os.path.isdir(path)):
        return "folder"
    if path is None:
        raise ConfigError(f"{redact(source)}: end the name of a folder with '/', or say what this is (format)")
    if not os.path.exists(path):
        raise ConfigError(f"{source}: no such folder, table or recipe; the current directory is {os.getcwd()!r}")
    return "recipe"


def _plan(
    source: RowSource, names: _ShardTemplate, sizes: _ShardSizes, seed: int | None, options: StorageOptions
) -> RowPlan:
    store = RowStore()
    store.take(source.rows(store.counts))
    if not len(store):
        passed = "; ".join(f"{count:,} {reason}" for reason, count in store.counts.passed_over.items())
        raise ConfigError(f"{source.describe()}: it holds no sample{f' ({passed} were passed over)' if passed else ''}")
    if not source.unique:
        store.check_keys()
    order = store.order(seed)
    beside: dict[str, bytes] = {}
    if isinstance(source, FolderSource) and source.classes is not None and names.output != "-":
        url = f"{output_folder(names.template)}{_CLASSES}"
        beside[url] = _classes_file(url, list(source.classes), options)
    return RowPlan(store, order, sizes.cuts(names, order, store.sizes, store.counts.unknown), beside, source.describe())


def _classes_file(url: str, classes: list[str], options: StorageOptions) -> bytes:
    """Return the list of classes for ``url``. ConfigError where another list is there: labels would differ."""
    data = (json.dumps(classes, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "surrogateescape")
    try:
        there = next(read_objects([url], options))
    except ShardNotFound:
        return data
    if there != data:
        raise ConfigError(
            f"{redact(url)} has other classes than this folder, so the same label would mean two things: give"
            f" {_CLASSES} as the names of classes (--classes), or another output folder"
        )
    return data


def _check_apart(source: str, out: str) -> None:
    """Raise ConfigError for outputs below the folder that is read: the next run would read them."""
    if "://" in source or "://" in out:
        inside = out.startswith(source)
    else:
        here = os.path.join(os.path.realpath(source), "")
        inside = os.path.join(os.path.realpath(out or "."), "").startswith(here)
    if inside:
        raise ConfigError(f"{redact(out or '.')}: the shards would lie below the folder that is read, {redact(source)}")
