"""Jobs made again from what their folders say: to run what failed, and to write the list of what is finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wds_async.distributed.folder import JobFolder
from wds_async.distributed.indexing import IndexJob, IndexWork
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.mapping import MapWork
from wds_async.distributed.plan import Plan, hash_of_ids, ids_of
from wds_async.distributed.resharding import PLAN, SCATTER, ReshardJob, reshard_of
from wds_async.distributed.tasks import Input
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.tools.convert.job import ConvertJob, ConvertWork
from wds_async.tools.copying import CopyJob, CopyWork
from wds_async.tools.create.work import CreateJob, CreateWork

__all__ = ["reopened", "resharded"]

_KINDS: dict[str, tuple[Any, type[Job]]] = {
    "map": (MapWork, Job),
    "index": (IndexWork, IndexJob),
    "create": (CreateWork, CreateJob),
    "copy": (CopyWork, CopyJob),
    "convert": (ConvertWork, ConvertJob),
}


def reopened(
    url: str,
    *,
    engine: Any = "local",
    attempts: int = 4,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Job | ReshardJob:
    """Return the job whose folder is ``url``: that of `map_shards`, `index`, or any phase of `reshard`. ``how``:
    options of the engine.

    ConfigError for a job of another kind, and where the folder alone does not tell what the job is: then it is started
    again as it was at first, which does what is missing.
    """
    options = StorageOptions(storage_options)
    folder = JobFolder(url, options)
    if (whole := resharded(folder)) is not None:
        return reshard_of(whole, engine=engine, options=how, attempts=attempts, on_progress=on_progress)
    document = folder.document()
    described = document.get("work", {})
    if (kind := described.get("kind")) not in _KINDS:
        raise ConfigError(
            f"{redact(folder.url)}: a job of kind {kind!r} is started again in the way it was started at first; it does"
            " what is missing"
        )
    work_type, job_type = _KINDS[kind]
    work = work_type.of(described, options)
    plan = _plan(folder, folder.inputs(), document, work.describe())
    return job_type(
        work,
        plan,
        folder,
        engine=engine,
        options=how,
        inputs=document.get("inputs"),
        attempts=attempts,
        on_progress=on_progress,
    )


def resharded(folder: JobFolder) -> JobFolder | None:
    """Return the folder of the job of `reshard` that ``folder`` is, or is a phase of; None for other jobs."""
    url = folder.url.removesuffix(SCATTER).removesuffix(PLAN)
    first = JobFolder(f"{url}{SCATTER}", folder.options)
    if not first.contents().begun or first.document()["work"].get("kind") != "scatter":
        return None
    return JobFolder(url, folder.options)


def _plan(folder: JobFolder, inputs: list[Input], document: Mapping[str, Any], described: dict[str, Any]) -> Plan:
    """Return the plan whose tasks have the ids that the folder knows."""
    tasks = int(document["tasks"])
    count = -(-len(inputs) // tasks) if tasks else 0
    while count and -(-len(inputs) // count) == tasks:
        plan = Plan(inputs, count)
        if hash_of_ids(ids_of(plan, described)) == document["ids"]:
            return plan
        count += 1
    raise ConfigError(
        f"{redact(folder.url)}: the tasks cannot be made again from the job's folder, as where the URLs of its inputs"
        " have secrets, which are not kept; start the job again in the way it was started at first"
    )
