"""``wds-async stats``, ``diff``, ``verify`` and ``copy``, beside Pillow, sha256sum and cmp."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from click.testing import Result

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.servers import Nginx
from wds_async.distributed import jobs
from wds_async.errors import ConfigError
from wds_async.tools.sums import read_sums, sums_text

Call = Callable[..., Result]
SAMPLES = 24


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (20 + number, 30 + 2 * number, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(stream, "JPEG" if number % 2 else "PNG")
    return stream.getvalue()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards in the working directory: one image is cut, and one is there twice. Tasks run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    with wds.ShardWriter(f"{tmp_path}/in/t-%03d.tar", maxcount=10, verbose=0, mtime=0) as sink:
        for n in range(SAMPLES):
            data = picture(5) if n == 17 else picture(n)[: 300 if n == 8 else None]
            sink.write({"__key__": f"ö/{n:03d}", "jpg": data, "cls": n % 3, "json": {"n": n}})
    return tmp_path


def test_stats_agree_with_pillow_and_find_what_is_wrong(call: Call, here: Path) -> None:
    result = call("stats", "in/*.tar", "--json", "--decode", "--duplicates", "jpg", "--contact-sheet", "c.png")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["shards"], found["samples"]) == (3, SAMPLES)
    images = found["fields"]["jpg"]
    good = [5 if n == 17 else n for n in range(SAMPLES) if n != 8]
    sizes = [PIL.Image.open(io.BytesIO(picture(n))).size for n in good]
    assert images["sizes"] == {f"{wide}x{high}": sizes.count((wide, high)) for wide, high in sizes}
    assert images["unreadable"] == 1
    assert images["first"][0]["key"] == "ö/008"
    assert [one["key"] for one in found["first_duplicates"]] == ["ö/017"]
    assert found["fields"]["cls"]["values"] == {"0": 8, "1": 8, "2": 8}
    assert found["fields"]["json"]["values"] == {"n": SAMPLES}
    assert images["most"] == max(len(picture(n)) for n in good)
    sheet = PIL.Image.open(here / "c.png")
    assert sheet.width > 8 * 128
    colours = [colour for _, colour in sheet.convert("RGB").getcolors(1 << 20)]
    assert (0xCF, 0x22, 0x2E) in colours  # the frame of the image that cannot be read


def test_stats_are_a_table_for_people(call: Call) -> None:
    result = call("stats", "in/*.tar", "-n", 7)
    assert result.exit_code == 0
    for text in ("cls: 3 classes: 0 3, 1 2, 2 2", "jpg: PNG RGB 4, JPEG RGB 3; 7 sizes", "1 shard, 7 samples"):
        assert text in result.output
    assert call("stats", "in/nothing-*.tar").exit_code == 2


def test_a_diff_names_every_difference_and_no_other(call: Call, here: Path) -> None:
    assert call("shuffle", "in/*.tar", "same/", "--seed", 1).exit_code == 0
    assert call("diff", "in/*.tar", "same/*.tar").exit_code == 0
    assert call("diff", "in/*.tar", "same/*.tar", "--ordered", "-q").exit_code == 1
    samples = [dict(one) for one in wds.WebDataset("in/t-{000..002}.tar", shardshuffle=False)]
    samples[3]["cls"] = b"7"
    samples[4]["jpg"] = samples[4]["jpg"][:-1] + b"x"
    del samples[5]["json"]
    samples[6]["txt"] = b"new"
    samples[7]["__key__"] = "other"
    with wds.TarWriter(here / "b.tar", encoder=False) as sink:
        for sample in samples:
            sink.write({name: value for name, value in sample.items() if name == "__key__" or name[0] != "_"})
    lines = [json.loads(line) for line in call("diff", "in/*.tar", "b.tar", "--json").stdout.splitlines()]
    assert [(one["kind"], one["key"], one["field"]) for one in lines[:-1]] == [
        ("field", "ö/003", "cls"),
        ("field", "ö/004", "jpg"),
        ("only in A", "ö/005", "json"),
        ("only in B", "ö/006", "txt"),
        ("only in B", "other", ""),
        ("only in A", "ö/007", ""),
    ]
    assert (lines[0]["a"], lines[0]["b"]) == ("0", "7")
    assert lines[-1]["differences"] == 6
    assert call("diff", "in/*.tar", "b.tar", "--fields", "cls", "-n", 1).exit_code == 1
    assert "ö/003" in call("diff", "in/*.tar", "b.tar", "--fields", "cls", "-n", 1).output


def test_verify_writes_and_reads_what_sha256sum_does(call: Call, here: Path) -> None:
    (here / "in/odd\\na\nme.tar").write_bytes((here / "in/t-000.tar").read_bytes())
    names = ["in/t-{000..002}.tar", "in/odd\\na\nme.tar"]
    assert call("verify", *names, "--write").exit_code == 0
    assert subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=here / "in", check=False).returncode == 0
    theirs = subprocess.run(["sha256sum", *sorted(p.name for p in (here / "in").glob("*.tar"))], cwd=here / "in",
                            capture_output=True, check=True).stdout  # fmt: skip
    assert sorted(theirs.splitlines()) == sorted((here / "in/SHA256SUMS").read_bytes().splitlines())
    assert call("verify", *names).exit_code == 0
    with (here / "in/t-001.tar").open("r+b") as file:
        file.seek(700)
        file.write(b"!")
    result = call("verify", *names)
    assert result.exit_code == 1
    assert "wrong  in/t-001.tar" in result.output
    assert "t-000" not in result.output
    assert call("verify", "in/t-000.tar", "--sums", "missing").exit_code == 1


@pytest.mark.parametrize("text", ["abc  x.tar\n", f"{'0' * 63}g  x\n", f"{'0' * 64}  x\n{'1' * 64}  x\n"])
def test_what_is_no_line_of_sha256sum_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SUMS: line"):
        read_sums(text, "SUMS")
    assert read_sums(sums_text({"a\nb": "0" * 64}), "x") == {"a\nb": "0" * 64}


def test_copy_gives_the_same_bytes_from_another_store(call: Call, here: Path, nginx: Callable[..., Nginx]) -> None:
    server = nginx(here / "in")
    urls = [server.url(f"t-{n:03d}.tar") for n in range(3)]
    result = call("copy", *urls, "out/", "--sums")
    assert result.exit_code == 0, result.output
    for n in range(3):
        assert (here / f"out/t-{n:03d}.tar").read_bytes() == (here / f"in/t-{n:03d}.tar").read_bytes()
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=here / "out", check=False).returncode == 0
    assert "0 of 3 tasks to run" in call("copy", *urls, "out/").output


def test_copy_refuses_names_that_meet_and_keeps_folders_if_told_to(call: Call, here: Path) -> None:
    (here / "in/deep").mkdir()
    (here / "in/deep/t-000.tar").write_bytes((here / "in/t-001.tar").read_bytes())
    result = call("copy", "in/t-000.tar", "in/deep/t-000.tar", "out/")
    assert result.exit_code == 2
    assert "--tree" in result.output
    assert call("copy", "in/t-000.tar", "in/deep/t-000.tar", "out/", "--tree").exit_code == 0
    assert (here / "out/deep/t-000.tar").read_bytes() == (here / "in/t-001.tar").read_bytes()
    assert call("copy", "in/t-000.tar", "out").exit_code == 2
