"""A worker ends with its parent; what it looks like in a loader is in ``tests/isolated/test_processes.py``."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from wds_async import orphans


def test_no_other_process_is_watched() -> None:
    orphans.end_with_parent(pytest.fail)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wds-async-orphan")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_of_the_programs_own_is_not_ended() -> None:
    child = multiprocessing.get_context("fork").Process(target=orphans.end_with_parent, args=(pytest.fail,))
    child.start()
    child.join(50)
    assert child.exitcode == 0


@pytest.mark.parametrize("descriptor", [True, False])
def test_the_end_of_a_process_is_seen(descriptor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a descriptor of it where the system has that, else by multiprocessing's own way."""
    if not descriptor:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("no pidfd")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent: Any = SimpleNamespace(pid=process.pid, join=process.wait)
    thread = threading.Thread(target=orphans._wait_for, args=(parent,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    process.communicate(b"\n")
    thread.join(50)
    assert not thread.is_alive()
    orphans._wait_for(parent)  # of one that has gone: at once
