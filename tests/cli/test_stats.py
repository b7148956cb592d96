"""Statistics of shards: the same for one process and for tasks, to the byte."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import wds_async as wds
from tests.cli.conftest import ROOT
from tests.distributed.inline import InlineEngine
from tests.servers import Nginx
from wds_async.cli import main
from wds_async.distributed import jobs
from wds_async.distributed.tasks import AttemptResult
from wds_async.tools import statistics
from wds_async.tools.statistics import ShardStatistics, SizeCounts

SAMPLES, SHARDS = 60, 7
OPTIONS = ("--decode", "--duplicates", "jpg", "--pictures", "9", "--contact-sheet")


@functools.cache
def picture(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (20 + number, 30 + 2 * number, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(stream, ("JPEG", "PNG", "WEBP")[number % 3])
    return stream.getvalue()


def image_of(n: int) -> bytes:
    return picture(n % 25)[: 300 if n in (8, 9, 33) else None]


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards in ``in/`` of the working directory, one compressed, one empty; with images that are cut, duplicates,
    a name that is no UTF-8, other fields, and documents that are none."""
    monkeypatch.chdir(tmp_path)
    names = [f"in/t-{n}.tar{'.gz' if n == 3 else ''}" for n in range(SHARDS)]
    (tmp_path / "in").mkdir()
    sinks = [wds.TarWriter(name, encoder=False, mtime=0) for name in names]
    for n in range(SAMPLES):
        key = "a" if n in (5, 30) else "\udcff" if n == 7 else f"ö/{n:03d}"
        document = b"[1]" if n == 4 else b"{" if n == 50 else json.dumps({f"n{n % 5}": n, "m": 1}).encode()
        sample: dict[str, Any] = {"__key__": key, "jpg": image_of(n), "cls": str(n % 11).encode(), "json": document}
        if n % 13 == 0:
            sample["txt"] = b"x" * n
        sinks[n // 10].write(sample)
    for sink in sinks:
        sink.close()
    return tmp_path


class Backwards(InlineEngine):
    """Runs the tasks in this process, the last one first."""

    capacity = 100

    def outcome(self, timeout_s: float) -> AttemptResult | None:
        self._waiting.rotate(1)
        return super().outcome(timeout_s)


def stats(*arguments: Any, sheet: str = "c.png") -> tuple[str, bytes]:
    """Return the JSON that ``stats`` prints, and the contact sheet that it writes."""
    result: Result = CliRunner().invoke(main, ["stats", "--json", *OPTIONS, sheet, *map(str, arguments)])
    assert result.exit_code == 1, result.output  # images cannot be read
    return result.stdout, Path(sheet).read_bytes()


@pytest.mark.parametrize("caps", [{}, {"_SIZES_KEPT": 5, "_MOST_VALUES": 4, "_MOST_NAMES": 3, "_MOST_NAMED": 2}])
def test_tasks_in_any_order_give_the_bytes_of_one_process(
    shards: Path, monkeypatch: pytest.MonkeyPatch, caps: dict[str, int]
) -> None:
    for name, most in caps.items():
        monkeypatch.setattr(statistics, name, most)
    alone = stats("in/*.tar*")
    for engine in (InlineEngine, Backwards):
        monkeypatch.setattr(jobs, "engine_of", lambda *_, engine=engine, **__: engine())
        assert stats("in/*.tar*", "--workers", 2) == alone
    found = json.loads(alone[0])
    assert (found["shards"], found["samples"], found["fields"]["jpg"]["unreadable"]) == (SHARDS - 1, SAMPLES, 3)
    assert found["duplicates"] == SAMPLES - len({image_of(n) for n in range(SAMPLES)})
    first = found["first_duplicates"][0]
    assert (first["key"], first["same_as"]) == ("ö/025", "ö/000")
    assert first["place"].startswith("in/t-2.tar @")
    assert caps or {"key": "a", "place": "in/t-3.tar.gz @0", "same_as": "a"} in found["first_duplicates"]


def test_processes_and_ranks_give_them_too_and_go_on_from_their_records(
    shards: Path, nginx: Callable[..., Nginx], program: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    server = nginx(shards / "in")  # where nothing can be written
    urls = [server.url(f"t-{n}.tar{'.gz' if n == 3 else ''}") for n in range(SHARDS)]
    alone = stats(*urls)

    def run(*arguments: Any, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        line = ["stats", "--json", *OPTIONS, "d.png", *urls, *arguments]
        ended = program(*line, cwd=shards, env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})})
        return ended.returncode, ended.stdout.decode(), ended.stderr.decode()

    status, printed, errors = run("--workers", 2)
    assert (status, printed, (shards / "d.png").read_bytes()) == (1, *alone), errors
    assert {path.name for path in shards.iterdir()} == {"in", "c.png", "d.png"}  # no job's folder
    (shards / "d.png").unlink()

    kept = ("--engine", "rank", "--workers", 1, "--records", "kept")
    assert run(*kept, environment={"RANK": "1", "WORLD_SIZE": "2"})[:2] == (0, "")
    records = {path: path.stat().st_mtime_ns for path in (shards / "kept/_wds/stats").glob("0*.json")}
    assert len(records) == SHARDS // 2
    assert run(*kept, environment={"RANK": "0", "WORLD_SIZE": "2"})[:2] == (1, alone[0])
    assert (shards / "d.png").read_bytes() == alone[1]
    assert records == {path: path.stat().st_mtime_ns for path in records}
    status, _, errors = run(*kept, "--seed", 1)
    assert status == 2
    assert "work.seed is 0 there and 1 here" in errors


def test_what_tasks_cannot_do_is_refused(shards: Path, call: Callable[..., Result]) -> None:
    assert "-n stops one process" in call("stats", "in/*.tar", "-n", 3, "--workers", 2).output
    assert "--records" in call("stats", "in/*.tar", "--engine", "rank").output


def test_the_choice_of_pictures_depends_on_seed_shard_and_key_alone(shards: Path) -> None:
    chosen = {}
    for name, order, seed in (("a", 1, 0), ("b", -1, 0), ("c", 1, 5)):
        found = ShardStatistics(pictures=9, seed=seed)
        names = sorted(map(str, Path("in").glob("*.tar*")))[::order]
        found.read(wds.WebDataset(names, shardshuffle=False, empty_check=False))
        chosen[name] = [(key, data) for _, key, data, _ in found.pictures.items]
        assert len(set(chosen[name])) == 9
    assert chosen["a"] == chosen["b"] != chosen["c"]


@given(st.lists(st.integers(0, 1 << 40), min_size=1), st.integers(0, 100), st.integers(64, 100))
def test_sizes_are_rounded_by_how_many_differ_and_not_by_their_order(sizes: list[int], cut: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_SIZES_KEPT", most)
        alone, merged, part = SizeCounts(), SizeCounts(), SizeCounts()
        for size in sizes:
            alone.add(size)
        for size in sizes[cut:]:
            part.add(size)
        for size in reversed(sizes[:cut]):
            merged.add(size)
        merged.merge(part.values())
    assert (alone.counts, alone.bits) == (merged.counts, merged.bits)
    for share in (0.01, 0.5, 0.99, 1.0):
        true = sorted(sizes)[math.ceil(share * len(sizes)) - 1]
        excess = max(0, true.bit_length() - alone.bits)
        assert alone.quantile(share) == true >> excess << excess
    assert (alone.bits == 64) == (len(set(sizes)) <= most)
