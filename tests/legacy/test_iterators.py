"""Older functions that have no equal today; `map_stream` is tested beside its name in `test_names`."""

from __future__ import annotations

import pickle

import pytest

from wds_async.legacy.datasets import transformer, worker_urls


def test_transformer() -> None:
    f = transformer([str, None])
    assert f((1, 2, 3)) == ["1", 2, 3]
    assert pickle.loads(pickle.dumps(f))((1, 2)) == ["1", 2]


def test_worker_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_urls(["a", "b", "c"]) == ["a", "b", "c"]
    monkeypatch.setenv("NUM_WORKERS", "2")
    monkeypatch.setenv("WORKER", "1")
    assert worker_urls(["a", "b", "c"]) == ["b"]
