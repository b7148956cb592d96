"""deploy/offline: the work is divided as the Job says, and what is written does not depend on chance."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

import wds_async as wds
from tests.deploy.tools import DEPLOY, ROOT, script
from tests.servers import make_tar

SHARDS, SAMPLES, RANKS = 5, 3, 3


def picture(side: int) -> bytes:
    """A JPEG of ``side`` x ``side`` pixels."""
    out = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list of shards, with a comment and braces, as deploy/offline/shards.txt is one."""
    large = picture(400)
    for shard in range(SHARDS):
        members = [(f"{shard}{i}.{ext}", data) for i in range(SAMPLES) for ext, data in (("jpg", large), ("cls", b"1"))]
        (tmp_path / f"in-{shard}.tar").write_bytes(make_tar(members))
    shards = tmp_path / "shards.txt"
    shards.write_text(f"# all of them\n\n{tmp_path}/in-{{0..3}}.tar\n{tmp_path}/in-4.tar\n", encoding="utf-8")
    return shards


def work(shards: Path, out: Path, rank: int, ranks: int) -> str:
    """What one pod says."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::UserWarning", DEPLOY / "offline" / "rewrite.py", shards, out],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": str(ranks)},
        capture_output=True, text=True, check=False, cwd=shards.parent,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_shard_is_worked_on_by_one_rank(listed: Path) -> None:
    out = listed.parent / "out"
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: work(listed, out, rank, RANKS), range(RANKS)))
    assert said == ["rank 0: 6 samples\n", "rank 1: 6 samples\n", "rank 2: 3 samples\n"]
    written = sorted(listed.parent.glob("out-*.tar"))
    assert [path.name for path in written] == [f"out-{rank:05d}-000000.tar" for rank in range(RANKS)]
    samples = list(wds.WebDataset([str(path) for path in written], shardshuffle=False).decode("pil"))
    assert sorted(sample["__key__"] for sample in samples) == [f"{s}{i}" for s in range(SHARDS) for i in range(SAMPLES)]
    assert {(sample["jpg"].size, sample["cls"]) for sample in samples} == {((256, 256), 1)}
    before = written[2].read_bytes()
    work(listed, out, 2, RANKS)
    assert written[2].read_bytes() == before, "a rank that is started again must write the same"


def test_a_rank_without_shards_is_no_fault(listed: Path) -> None:
    assert work(listed, listed.parent / "none", SHARDS, SHARDS + 1) == f"rank {SHARDS}: 0 samples\n"
    assert not list(listed.parent.glob("none-*"))


def test_the_list_in_the_repository_is_read() -> None:
    (line,) = script(DEPLOY / "offline" / "rewrite.py").shards_of(str(DEPLOY / "offline" / "shards.txt"))
    assert line.startswith("s3://")
