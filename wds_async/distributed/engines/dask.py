"""Engine of Dask: an attempt is a future of a `distributed.Client`."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Mapping
from typing import Any

from wds_async.arguments import check_number, check_size
from wds_async.distributed.engines.apart import end_processes, run_apart
from wds_async.distributed.engines.base import RunAttempt
from wds_async.distributed.engines.local import cpus_here, pickled
from wds_async.distributed.engines.remote import reach, short_error
from wds_async.distributed.tasks import AttemptResult, Task
from wds_async.errors import ConfigError
from wds_async.packages import optional
from wds_async.redact import redact

__all__ = ["DaskEngine"]

_MORE = 16
"""Tasks that wait beyond twice those that fit, so that an adaptive cluster grows."""
_LOOK_EVERY_S = 5.0
_REACH_WITHIN_S = 10.0
_END_WITHIN_S = 5.0


class DaskEngine:
    """A Dask cluster. Each thread of a worker runs one task at a time, in a process of its own beside the worker: see
    `apart`. Its memory is not what Dask's limits for workers count.

    ``address``: of the scheduler (default: the client that this program has made, the address in Dask's own
    configuration, DASK_SCHEDULER_ADDRESS, or a cluster in this process for ``workers`` tasks at once). ``resources``:
    of a task, by the names that workers were started with. ``cpus``: of one task; Dask counts no CPUs, so this is only
    what a new cluster's default number of workers follows from. ConfigError for numbers that are none or below 1.

    Where a worker is lost, Dask itself runs its tasks again, up to the ``allowed-failures`` of its configuration; that
    does no harm, as a task is committed once.
    """

    name = "dask"

    def __init__(
        self,
        cpus: float = 1,
        workers: int | None = None,
        address: str | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        if check_number("engine='dask'", "cpus", cpus) <= 0:
            raise ConfigError(f"engine='dask': cpus={cpus!r}: CPUs of one task, more than 0")
        self._cpus = cpus
        self._resources = {name: check_number("engine='dask'", name, much) for name, much in (resources or {}).items()}
        self._workers = None if workers is None else check_size("engine='dask'", "workers", workers, at_least=1)
        if address is not None and workers is not None:
            raise ConfigError(
                "engine='dask': workers is the size of a new cluster, and address that of one that is there"
            )
        self._address = address
        self._dask: Any = optional("distributed", "engine='dask'", "dask")
        self._client: Any = None
        self._own: list[Any] = []
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: dict[str, tuple[int, Any]] = {}
        self._places, self._looked_at = 0, 0.0

    def start(self, attempt: RunAttempt) -> None:
        """Connect. ConfigError for an ``attempt`` that does not pickle, a scheduler that cannot be reached, and tasks
        that ask for resources that no worker has."""
        self._attempt = pickled(attempt)
        self._run = f"wds-async-{uuid.uuid4().hex[:8]}"
        self._client = self._connect()
        self._look()
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        if workers and self._resources and not any(self._fits(one["resources"]) for one in workers.values()):
            raise ConfigError(
                f"engine='dask': a task asks for {self._resources}, and none of {len(workers)} workers has as much."
                " Start workers with --resources"
            )

    @property
    def capacity(self) -> int:
        """Twice the threads of the workers that are there, and some more."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._look()
        return 2 * self._places + _MORE

    def submit(self, task: Task) -> None:
        """Give ``task`` to the scheduler."""
        key = f"{self._run}-{task.number}-{uuid.uuid4().hex[:8]}"
        future = self._client.submit(
            run_apart, self._attempt, task, key, key=key, pure=False, retries=0, resources=self._resources or None
        )
        self._pending[key] = (task.number, future)
        future.add_done_callback(lambda done: self._results.put(done.key))

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        """Return the next outcome. A task whose worker is lost again and again is a lost attempt."""
        try:
            key = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        number, future = self._pending.pop(key)
        try:
            result: AttemptResult = future.result()
        except self._dask.scheduler.KilledWorker as exn:
            return AttemptResult(number, error=f"Dask lost the task: {short_error(exn)}", lost=True)
        except Exception as exn:
            if future.status in ("cancelled", "lost"):
                return AttemptResult(number, error=f"Dask lost the task: {short_error(exn)}", lost=True)
            return AttemptResult(number, error=f"the task could not begin on its worker: {short_error(exn)}")
        return result

    def close(self) -> None:
        """Cancel the tasks that run or wait, and end the client and the cluster that this engine has made."""
        pending, self._pending = self._pending, {}
        own, self._own = self._own, []
        client, self._client = self._client, None
        if client is not None and pending:
            client.cancel([future for _, future in pending.values()], force=True)
        if own:
            end_processes(_END_WITHIN_S)
        for one in own:
            one.close()

    def _look(self) -> None:
        self._places, self._looked_at = sum(self._client.nthreads().values()), time.monotonic()

    def _fits(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= much for name, much in self._resources.items())

    def _connect(self) -> Any:
        dask = self._dask
        address = self._address
        if address is None and self._workers is None:
            try:
                return dask.get_client(timeout=_REACH_WITHIN_S)
            except ValueError:  # there is none
                address = optional("dask", "engine='dask'", "dask").config.get("scheduler-address", None)
        if address is None:
            workers = self._workers or max(1, int(cpus_here() / self._cpus))
            cluster = dask.LocalCluster(
                n_workers=1, threads_per_worker=workers, processes=False, dashboard_address="127.0.0.1:0"
            )
            self._own.append(cluster)
            address = cluster.scheduler_address
        kind = "that of its scheduler, such as tcp://scheduler:8786"
        if not self._own:
            reach(address, "engine='dask'", kind)
        try:
            client = dask.Client(address, timeout=_REACH_WITHIN_S, set_as_default=False)
        except (OSError, ValueError) as exn:
            self.close()
            raise ConfigError(
                f"engine='dask': no cluster answers at {redact(address)}: {short_error(exn)}. The address is {kind}"
            ) from exn
        self._own.insert(0, client)
        return client
