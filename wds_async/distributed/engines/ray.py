"""Engine of Ray: an attempt is a Ray task. Ray finds a place for it; whether there is another attempt is for the job to
decide, so Ray repeats none."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

from wds_async.arguments import check_number
from wds_async.distributed.engines.base import RunAttempt
from wds_async.distributed.engines.local import pickled
from wds_async.distributed.engines.remote import reach, run_pickled, short_error
from wds_async.distributed.tasks import AttemptResult, Task
from wds_async.environment import parse_bytes, variable
from wds_async.errors import ConfigError
from wds_async.packages import optional
from wds_async.redact import redact

__all__ = ["RayEngine"]

_MORE = 16
"""Tasks that wait beyond twice those that fit: Ray's autoscaler starts machines for what waits."""
_LOOK_EVERY_S = 5.0
_CANCEL_WITHIN_S = 6.0
_INTERRUPT_WITHIN_S = 3.0


class RayEngine:
    """A Ray cluster. Each task asks for ``cpus``, ``gpus``, ``memory`` (bytes, or text such as "2G") and ``resources``
    (Ray's own by their names), and Ray spreads tasks over the machines.

    ``address``: of the cluster, where this program has not called ``ray.init`` itself (default: RAY_ADDRESS, a cluster
    of this machine, or a new one on it). ``runtime_env``: Ray's description of what workers need, such as
    ``{"working_dir": ".", "pip": ["wds-async[ray]"]}``; Ray takes folders of this machine only in ``ray.init``, so a
    program that has called that itself must give them there. ``autoscaling``: the cluster starts machines for tasks
    that wait, so tasks need not fit one that it has now. ConfigError for requests that are negative, or for nothing.
    """

    name = "ray"

    def __init__(
        self,
        cpus: float = 1,
        gpus: float = 0,
        memory: int | str = 0,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        autoscaling: bool = False,
    ) -> None:
        self._request = _request(cpus, gpus, memory, resources or {})
        self._address, self._runtime_env = address, dict(runtime_env or {})
        self._autoscaling = autoscaling
        self._ray: Any = optional("ray", "engine='ray'", "ray")
        self._results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._pending: dict[int, Any] = {}
        self._is_connected_here = False
        self._attempt: Any = None
        self._slots, self._slots_at = 0, 0.0

    def start(self, attempt: RunAttempt) -> None:
        """Connect, and send ``attempt`` once. ConfigError for one that does not pickle, a cluster that cannot be
        reached, and tasks that fit no machine of a cluster that is not ``autoscaling``."""
        data = pickled(attempt)
        self._attempt = self.connect().put(data)
        self._remote = self._ray.remote(run_pickled).options(
            max_retries=0, scheduling_strategy="SPREAD", name="wds_async task", **self.options()
        )

    def connect(self) -> Any:
        """Connect this program where it is not yet, and return the module ``ray``. ConfigError where that cannot be
        done, and where a request fits no machine of a cluster that is not ``autoscaling``."""
        self._connect()
        self._slots = self._count_slots()
        return self._ray

    def options(self) -> dict[str, Any]:
        """Return Ray's options for what a task, or an actor, asks for."""
        options: dict[str, Any] = {"num_cpus": self._request.get("CPU", 0), "num_gpus": self._request.get("GPU", 0)}
        if "memory" in self._request:
            options["memory"] = int(self._request["memory"])
        others = {name: much for name, much in self._request.items() if name not in ("CPU", "GPU", "memory")}
        if others:
            options["resources"] = others
        if self._runtime_env and not self._is_connected_here:
            options["runtime_env"] = self._runtime_env
        return options

    @property
    def capacity(self) -> int:
        """Twice the tasks that fit the cluster as it is now, and some more."""
        if time.monotonic() - self._slots_at > _LOOK_EVERY_S:
            self._slots = self._count_slots()
        return 2 * self._slots + _MORE

    def submit(self, task: Task) -> None:
        """Give ``task`` to Ray."""
        number = task.number
        reference = self._remote.remote(self._attempt, task)
        self._pending[number] = reference
        # A callback and not `ray.wait`, which goes through all that wait each time.
        reference.future().add_done_callback(lambda future: self._results.put((number, future)))

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        """Return the next outcome. What Ray says of a worker, a machine or an object that is gone is a lost attempt."""
        try:
            number, future = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._pending.pop(number, None)
        try:
            result: AttemptResult = future.result()
        except Exception as exn:
            return self._failed(number, exn)
        return result

    def close(self) -> None:
        """End the tasks that run or wait, and the connection where this engine has made it."""
        pending, self._pending = self._pending, {}
        if not self._ray.is_initialized():
            return
        self._cancel(list(pending.values()))
        if self._is_connected_here:
            self._is_connected_here = False
            self._ray.shutdown()

    def _cancel(self, references: list[Any]) -> None:
        """Interrupt tasks, which discard what they were writing then, and end by force those that go on. More than
        once: Ray forgets it of one that is just on its way to a worker."""
        began = time.monotonic()
        while references and (waited := time.monotonic() - began) < _CANCEL_WITHIN_S:
            for reference in references:
                self._ray.cancel(reference, force=waited > _INTERRUPT_WITHIN_S)
            _, references = self._ray.wait(references, num_returns=len(references), timeout=0.5)

    def _failed(self, number: int, exn: Exception) -> AttemptResult:
        errors = self._ray.exceptions
        text = short_error(exn)
        if isinstance(exn, errors.RayTaskError):
            return AttemptResult(number, error=f"the task could not begin on its worker: {text}")
        if isinstance(exn, errors.RuntimeEnvSetupError):
            return AttemptResult(number, error=f"Ray could not set up the task's runtime_env: {text}", permanent=True)
        return AttemptResult(number, error=f"Ray lost the task: {text}", lost=True)

    def _connect(self) -> None:
        ray = self._ray
        if ray.is_initialized():
            self._check_connection()
            self._check_runtime_env()
            return
        address = self._address or variable("RAY_ADDRESS")
        if address is not None:
            reach(address, "engine='ray'", "that of its head, such as head:6379, or ray://head:10001 from outside")
        try:
            ray.init(address=address, runtime_env=self._runtime_env or None, logging_level="WARNING")
        except Exception as exn:
            place = f"at {redact(address)}" if address else "on this machine"
            raise ConfigError(
                f"engine='ray': no connection to a cluster {place}: {short_error(exn)}. Python and Ray have to be of"
                " the same versions as there. Where the cluster asks for a token, set RAY_AUTH_MODE=token here, and"
                " RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            ) from exn
        self._is_connected_here = True

    def _check_connection(self) -> None:
        """Raise ConfigError where this program is connected to another cluster than it asks for."""
        asked = self._address
        if asked is None or asked in ("auto", "local") or "://" in asked:
            return
        there = self._ray.get_runtime_context().gcs_address
        if there != asked:
            raise ConfigError(
                f"engine='ray': address={redact(asked)!r}, and this program is connected to the cluster at {there}"
                " already. Leave address away, or call ray.shutdown() first"
            )

    def _check_runtime_env(self) -> None:
        """Raise ConfigError for one that tasks cannot have, where this engine has not made the connection."""
        if self._runtime_env and not self._is_connected_here:
            try:
                self._ray.remote(run_pickled).options(runtime_env=self._runtime_env)
            except (TypeError, ValueError) as exn:
                raise ConfigError(f"engine='ray': {short_error(exn)}") from exn

    def _count_slots(self) -> int:
        """Return how many tasks fit the cluster's machines at once. ConfigError where none fits and none will come."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        slots = sum(
            min(int(machine.get(name, 0) / much) for name, much in self._request.items()) for machine in machines
        )
        first, self._slots_at = self._slots_at == 0.0, time.monotonic()
        if first and not slots and not self._autoscaling:
            shown = ", ".join(sorted({_shown({n: m.get(n, 0) for n in self._request}) for m in machines}))
            raise ConfigError(
                f"engine='ray': a task asks for {_shown(self._request)}, and no machine of the cluster has as much"
                f" (they have {shown}). Ask for less; or say autoscaling=True if the cluster starts machines when"
                " tasks wait"
            )
        return slots


def _request(cpus: float, gpus: float, memory: int | str, resources: Mapping[str, float]) -> dict[str, float]:
    """Return what a task asks for, by Ray's names; what is 0 is left out."""
    stage = "engine='ray'"
    try:
        amount = parse_bytes(memory) if isinstance(memory, str) else check_number(stage, "memory", memory)
    except ValueError as exn:
        raise ConfigError(f"{stage}: memory={memory!r}: {exn}") from exn
    request = {"CPU": check_number(stage, "cpus", cpus), "GPU": check_number(stage, "gpus", gpus), "memory": amount}
    request |= {name: check_number(stage, f"resources[{name!r}]", much) for name, much in resources.items()}
    if bad := {name: much for name, much in request.items() if not 0 <= much < float("inf")}:
        raise ConfigError(f"{stage}: a task cannot ask for {_shown(bad)}")
    request = {name: much for name, much in request.items() if much}
    if not request:
        raise ConfigError(f"{stage}: a task must ask for something, or Ray runs all at once; give cpus")
    return request


def _shown(request: Mapping[str, float]) -> str:
    return " and ".join(f"{name} {much:g}" for name, much in request.items())
