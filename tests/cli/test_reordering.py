"""``wds-async sort``, ``shuffle``, ``split``, ``join`` and ``cat -o``, beside GNU sort and tar."""

from __future__ import annotations

import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.distributed import jobs
from wds_async.errors import ConfigError
from wds_async.tools.changes import split_randomly, weights_of

Call = Callable[..., Result]
SAMPLES = 60


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards in the working directory; tasks run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    names = [f"{random.Random(n).randrange(10**6):06d}-ö{n}" for n in range(SAMPLES)]
    with wds.ShardWriter(f"{tmp_path}/in/t-%03d.tar", maxcount=20, verbose=0, mtime=0) as sink:
        for n, key in enumerate(names):
            sink.write({"__key__": key, "txt": f"text {n}", "cls": n % 7, "json": {"n": n, "half": n // 2}})
    return tmp_path


def keys(*names: str) -> list[str]:
    return [sample["__key__"] for sample in wds.WebDataset(list(names), shardshuffle=False, empty_check=False)]


def listed(*names: str) -> list[str]:
    """Return the members of tars as GNU tar lists them."""
    result = subprocess.run(["tar", "tf", *names], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    return result.stdout.decode().splitlines()


def test_sort_agrees_with_gnu_sort(call: Call) -> None:
    before = keys("in/t-{000..002}.tar")
    assert call("sort", "in/*.tar", "sorted.tar").exit_code == 0
    gnu = subprocess.run(
        ["sort"], input="\n".join(before), capture_output=True, text=True, check=True, env={"LC_ALL": "C"}
    )
    assert keys("sorted.tar") == gnu.stdout.splitlines()
    assert call("sort", "in/*.tar", "back/", "--reverse", "--maxcount", 25).exit_code == 0
    assert keys("back/000000.tar", "back/000001.tar", "back/000002.tar") == gnu.stdout.splitlines()[::-1]


@pytest.mark.parametrize(
    ("by", "key"),
    [("json.half", lambda n: n // 2), ("(cls, -json.n)", lambda n: (n % 7, -n)), ("txt", lambda n: f"text {n}")],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_sort_by_an_expression_is_stable(call: Call, by: str, key: Callable[[int], object], reverse: bool) -> None:
    before = keys("in/t-{000..002}.tar")
    assert call("sort", "in/*.tar", "s.tar", "--by", by, *(["--reverse"] if reverse else [])).exit_code == 0
    expected = sorted(range(SAMPLES), key=key, reverse=reverse)  # type: ignore[arg-type]
    assert keys("s.tar") == [before[n] for n in expected]


def test_cat_puts_shards_together_and_split_takes_them_apart(call: Call, here: Path) -> None:
    members = [name for n in range(3) for name in listed(f"in/t-{n:03d}.tar")]
    assert call("cat", "in/*.tar", "-o", "all.tar").exit_code == 0
    assert listed("all.tar") == members
    assert call("split", "all.tar", "parts/{000..}.tar", "--maxcount", 20).exit_code == 0
    for n in range(3):
        assert listed(f"parts/{n:03d}.tar") == listed(f"in/t-{n:03d}.tar")
    assert call("cat", "in/*.tar", "-o", "all.tar", "--json").exit_code == 2
    assert call("split", "all.tar", "one.tar", "--maxcount", 20).exit_code == 2


def test_split_by_an_expression_or_by_weights(call: Call, here: Path) -> None:
    assert call("split", "in/*.tar", "by/", "--by", '"odd" if json.n % 2 else None').exit_code == 0
    assert keys("by/odd-000000.tar") == keys("in/t-{000..002}.tar")[1::2]
    assert call("split", "in/*.tar", "w/", "--weights", "train=0.8,val=0.2").exit_code == 0
    train, val = keys("w/train-000000.tar"), keys("w/val-000000.tar")
    assert sorted(train + val) == sorted(keys("in/t-{000..002}.tar"))
    assert 0 < len(val) < 25
    assert call("split", "in/t-001.tar", "w1/", "--weights", "train=0.8,val=0.2").exit_code == 0
    assert set(keys("w1/val-000000.tar")) <= set(val)
    for wrong in ("train", "a=0.9,b=0.2", "a=-1", "=1", "a=x"):
        assert call("split", "in/*.tar", "x/", "--weights", wrong).exit_code == 2
    assert call("split", "in/*.tar", "x/", "--weights", "a=1", "--by", "cls").exit_code == 2
    assert not (here / "x").exists()


def test_shares_are_kept_and_what_is_beyond_their_sum_is_dropped() -> None:
    names = [split_randomly({"__key__": f"{n}"}, {"a": 0.5, "b": 0.25}, seed=3) for n in range(8000)]
    shares = {name: names.count(name) / 8000 for name in ("a", "b", None)}
    assert shares == pytest.approx({"a": 0.5, "b": 0.25, None: 0.25}, abs=0.02)
    assert weights_of("a=0.5,b=0.5") == {"a": 0.5, "b": 0.5}
    with pytest.raises(ConfigError, match="sum is at most 1"):
        weights_of("a=0.6,b=0.5")


def test_shuffle_is_one_permutation_for_one_seed(call: Call, here: Path) -> None:
    for out, seed in (("a", 7), ("b", 7), ("c", 8)):
        assert call("shuffle", "in/*.tar", f"{out}/", "--seed", seed, "--shards", 3).exit_code == 0
    files = {out: [(here / out / f"{n:06d}.tar").read_bytes() for n in range(3)] for out in "abc"}
    assert files["a"] == files["b"] != files["c"]
    mixed, before = keys(*(f"a/{n:06d}.tar" for n in range(3))), keys("in/t-{000..002}.tar")
    assert sorted(mixed) == sorted(before)
    assert mixed != before


def test_join_brings_the_fields_of_one_key_together(call: Call) -> None:
    assert call("select", "in/*.tar", "txt/", "txt").exit_code == 0
    assert call("filter", "in/*.tar", "some.tar", "json.n < 30").exit_code == 0
    assert call("select", "some.tar", "cls/", "cls").exit_code == 0
    assert call("join", "txt/*.tar", "cls/*.tar", "inner.tar").exit_code == 0
    assert call("join", "txt/*.tar", "cls/*.tar", "left.tar", "--how", "left").exit_code == 0
    inner = list(wds.WebDataset("inner.tar", shardshuffle=False))
    assert len(inner) == 30
    assert all(int(one["txt"].split()[1]) % 7 == int(one["cls"]) for one in inner)
    assert len(keys("left.tar")) == SAMPLES
    assert call("filter", "in/*.tar", "rest.tar", "json.n >= 20").exit_code == 0
    assert call("select", "rest.tar", "json/", "json").exit_code == 0
    assert call("join", "cls/*.tar", "json/*.tar", "outer/", "--how", "outer", "--maxcount", 25).exit_code == 0
    outer = list(wds.WebDataset([f"outer/{n:06d}.tar" for n in range(3)], shardshuffle=False))
    assert [one["__key__"] for one in outer] == sorted(keys("in/t-{000..002}.tar"), key=str.encode)
    assert Counter(("cls" in one, "json" in one) for one in outer) == {
        (True, False): 20, (True, True): 10, (False, True): 30,
    }  # fmt: skip
    assert not Path("outer/000003.tar").exists()
    result = call("join", "txt/*.tar", "in/*.tar", "both.tar", "--attempts", 1)
    assert result.exit_code == 1
    assert re.search("txt", result.output)
