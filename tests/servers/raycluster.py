"""A Ray cluster of several raylets on 127.0.0.1: its processes are children of a process of their own, so that a test
may kill any of them, and nothing of theirs stays when the tests die.

``python -m tests.servers.raycluster`` is that process: it prints a line of JSON with the address and the raylets' pids,
and another one after each command that it reads: ``kill PID`` and ``restore``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.process import ServerMissing, stop

__all__ = ["ENVIRONMENT", "RayCluster", "ray_cluster"]

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without it, Ray takes the address of the network card for that of this machine, and listens on all of them.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What drivers and raylets of these clusters need; it has to be there before Ray is imported."""

_ROOT = Path(__file__).resolve().parent.parent.parent
_START_S = 120.0
_CONFIG = {
    "prestart_worker_first_driver": False,  # a worker takes 130 MB and most of a second of the processor
    "memory_monitor_refresh_ms": 0,  # it would kill workers where other tests fill the machine's memory
    "enable_metrics_collection": False,
    # A killed raylet is found dead in two seconds, and a slow one is not taken for dead.
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20000,
    "health_check_failure_threshold": 4,
}


class RayCluster:
    """A running cluster. ``cpus`` of each raylet are a number that Ray counts down; they reserve nothing."""

    def __init__(self, raylets: int = 3, cpus: int = 2, store_bytes: int = 80 << 20) -> None:
        self._command = [sys.executable, "-m", __name__, str(raylets), str(cpus), str(store_bytes)]
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="wr")  # short: the paths of sockets are bounded
        self._output = Path(self._folder, "output")
        environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": self._folder}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment, cwd=_ROOT
            )
        try:
            self._state = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Address of the cluster, for ``ray.init`` and for RAY_ADDRESS."""
        return str(self._state["address"])

    @property
    def raylets(self) -> list[int]:
        """Pids of the raylets. Drivers attach to the first, which goes with the head, and is not for killing."""
        return list(self._state["raylets"])

    def kill_raylet(self, number: int = -1) -> None:
        """End a raylet by SIGKILL, as a machine that fails ends it; its workers end with it."""
        self._ask(f"kill {self.raylets[number]}")

    def restore(self) -> None:
        """Wait until killed raylets are known to be dead, and start others in their place."""
        self._ask("restore")

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        self._state = self._read()

    def close(self) -> None:
        """End the cluster and remove its files."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # the other side ends its loop
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        stop(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        patience = threading.Timer(_START_S, self._process.kill)
        patience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            patience.cancel()
            patience.join()
        if not line:
            raise RuntimeError(f"the Ray cluster did not start:\n{self._said()}")
        return dict(json.loads(line))

    def _said(self) -> str:
        """The ends of what the cluster's processes wrote."""
        logs = [self._output, *sorted(Path(self._folder).glob("ray/session_2*/logs/*.[eo][ru][rt]"))]
        texts = {log.name: log.read_text(errors="replace")[-1500:] for log in logs if log.exists()}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    @contextmanager
    def driver(self, variables: Mapping[str, str] | None = None) -> Iterator[Any]:
        """Make this process a driver of the cluster, with ``variables`` in the environment of its workers. Yield the
        module ``ray``."""
        os.environ.update(ENVIRONMENT)
        import ray

        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}

        def attach() -> None:
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", namespace="tests", **options)
            except BaseException:
                ray.shutdown()  # what is left of a driver ends its process a minute after the cluster
                raise

        try:
            try:
                attach()
            except Exception as exn:
                sys.__stderr__.write(f"Ray: {exn!r}; another cluster is started. The first one said:\n{self._said()}\n")
                self.close()
                self._start()
                attach()
            yield ray
        finally:
            ray.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files[0], files[1]))


@contextmanager
def ray_cluster(raylets: int = 3, **options: Any) -> Iterator[RayCluster]:
    """A cluster for the length of the block. Raise ServerMissing where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ServerMissing("Ray is not installed: pip install 'wds-async[ray]'")
    cluster = RayCluster(raylets, **options)
    try:
        yield cluster
    finally:
        cluster.close()


def _serve(raylets: int, cpus: int, store_bytes: int) -> None:
    """Keep ``raylets`` raylets, the head's among them, until the input ends."""
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {
        "num_cpus": cpus,
        "object_store_memory": store_bytes,
        "node_ip_address": "127.0.0.1",
        "include_log_monitor": False,
    }
    head = {**node, "include_dashboard": False, "no_monitor": True, "_system_config": _CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def raylet(one: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = one.all_processes[PROCESS_TYPE_RAYLET][0].process
        return process

    def tell() -> None:
        state = {"address": cluster.address, "raylets": [raylet(one).pid for one in cluster.list_all_nodes()]}
        sys.stdout.write(f"{json.dumps(state)}\n")
        sys.stdout.flush()

    def restore() -> None:
        for one in [one for one in cluster.worker_nodes if raylet(one).poll() is not None]:
            cluster.remove_node(one, allow_graceful=False)
        while len(cluster.list_all_nodes()) < raylets:
            cluster.add_node(wait=False, **node)
        cluster.wait_for_nodes(60)

    restore()
    tell()
    for command in sys.stdin:
        match command.split():
            case ["kill", pid]:
                process = next(raylet(one) for one in cluster.list_all_nodes() if raylet(one).pid == int(pid))
                process.kill()
                process.wait()
            case _:
                restore()
        tell()
    cluster.shutdown()


if __name__ == "__main__":
    try:
        _serve(*map(int, sys.argv[1:]))
    finally:  # also where the tests were killed
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
