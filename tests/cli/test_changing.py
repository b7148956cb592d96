"""``wds-async filter``, ``select``, ``rename`` and ``proc``: new shards of changed samples."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import wds_async as wds
from tests.distributed.inline import InlineEngine
from tests.service.serving import until
from wds_async.distributed import jobs

Call = Callable[..., Result]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards in the working directory; tasks run in this process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    for shard in range(2):
        with wds.TarWriter(tmp_path / f"in/t-{shard}.tar", mtime=0) as sink:
            for n in range(4):
                sink.write({"__key__": f"ä{shard}/-{n}", "txt": f"text {n}", "json": {"n": n}, "seg.png": b"x"})
    return tmp_path


def samples(*names: str) -> list[dict[str, Any]]:
    return list(wds.WebDataset(list(names), shardshuffle=False, empty_check=False))


def keys(*names: str) -> list[str]:
    return [sample["__key__"] for sample in samples(*names)]


def refused(result: Result, status: int, message: str) -> bool:
    """Return whether a command ended with ``status``, and with an error that ``message`` fits."""
    assert re.search(message, result.output), result.output
    return result.exit_code == status


def test_filter_keeps_what_the_expression_is_true_for_under_the_names_of_the_inputs(call: Call, here: Path) -> None:
    result = call("filter", "in/*.tar", "out/", "json.n >= 2")
    assert result.exit_code == 0, result.output
    assert "8 samples in, 4 out, 4 dropped" in result.output
    assert keys("out/t-0.tar", "out/t-1.tar") == ["ä0/-2", "ä0/-3", "ä1/-2", "ä1/-3"]
    first = (here / "out/t-1.tar").read_bytes()
    assert call("filter", "in/*.tar", "again/", "json.n < 2", "--invert").exit_code == 0
    assert (here / "again/t-1.tar").read_bytes() == first
    assert "_wds/filter" in call("job", "ls", "out/").output


def test_a_wrong_expression_stops_before_anything_is_written(call: Call, here: Path) -> None:
    for text in ("json.n >", "open('x')"):
        assert refused(call("filter", "in/*.tar", "out/", text), 2, "expression|function")
    assert not (here / "out").exists()


def test_a_sample_without_the_field_is_named_or_passed_over(call: Call, here: Path) -> None:
    with wds.TarWriter(here / "in/t-1.tar", mtime=0) as sink:
        sink.write({"__key__": "odd", "txt": "x"})
        sink.write({"__key__": "even", "txt": "x", "json": {"n": 9}})
    result = call("filter", "in/*.tar", "out/", "json.n > 2", "--attempts", 1)
    assert refused(result, 1, r"no field 'json'.*sample 'odd' at byte 0 of in/t-1.tar")
    assert call("filter", "in/*.tar", "out/", "json.n > 2", "--skip-errors", "--overwrite").exit_code == 0
    assert keys("out/t-0.tar", "out/t-1.tar") == ["ä0/-3", "even"]
    assert json.loads((here / "out/_wds/filter/00001.json").read_text())["skipped"][0]["key"] == "odd"


@pytest.mark.parametrize(
    ("command", "output", "rest"),
    [
        ("filter", "in/", ["json.n > 2"]),
        ("filter", "./in/t-1.tar", ["json.n > 2"]),
        ("select", "link/{name}.tar", ["txt"]),
        ("rename", "in/t{part:02d}.tar", ["b=txt", "--maxcount", 2]),
        ("sort", "file:in/t-0.tar", []),
        ("split", "in/t-{0..1}.tar", []),
        ("split", "in/t-{0..}.tar", ["--maxcount", 3]),
        ("split", "in/{split}-{0..}.tar", ["--weights", "t=1"]),
        ("convert", "in/{name}.tar", ["--to", "tfrecord"]),
        ("copy", "in/", []),
    ],
)
def test_an_output_does_not_replace_an_input(
    call: Call, here: Path, command: str, output: str, rest: list[Any]
) -> None:
    (here / "link").symlink_to(here / "in")
    (here / "in/t00.tar").write_bytes((here / "in/t-0.tar").read_bytes())
    before = {path.name: path.read_bytes() for path in here.glob("in/*")}
    assert refused(call(command, "in/*.tar", output, *rest), 2, "in/t.*tar is an input, and an output would replace it")
    assert {path.name: path.read_bytes() for path in here.glob("in/*")} == before
    assert call("split", "in/t-*.tar", "in/t-{2..}.tar", "--maxcount", 8).exit_code == 2  # as many as it takes
    assert call("split", "in/t-*.tar", "in/t-{2..3}.tar").exit_code == 0
    assert call("filter", "in/t-0.tar", "in/{name}-{part}.tar", "--maxcount", 2, "True").exit_code == 0


def test_standard_input_is_read_once(program: Callable[..., Any], here: Path) -> None:
    with wds.TarWriter(here / "odd.tar", mtime=0) as sink:
        for n in range(3000):  # more than the first read takes, so that a second attempt would begin with a header
            sink.write({"__key__": f"{n:05d}", "txt": "x"} | ({} if n == 3 else {"json": {"n": n}}))
    for command in (["filter", "-", "out/", "json.n >= 0"], ["sort", "-", "out/", "--by", "json.n"]):
        with open(here / "odd.tar", "rb") as file:
            result = program(*command, cwd=here, input=file.read())
        assert result.returncode == 1, result
        assert re.search(rb"'00003'.*it is not run again, since what was read of - ", result.stderr), result
    for command in (["filter", "-", "new/", "True"], ["sort", "-", "new.tar"]):
        for shard, more in ((0, []), (1, []), (1, ["--overwrite"])):
            data = (here / f"in/t-{shard}.tar").read_bytes()
            result = program(*command, *more, cwd=here, input=data)
            assert result.returncode == (2 if (shard, more) == (1, []) else 0), result
        assert keys("new/-.tar" if command[0] == "filter" else "new.tar") == keys("in/t-1.tar")


def test_two_inputs_of_one_name_are_refused(call: Call, here: Path) -> None:
    with wds.TarWriter(here / "other/t-0.tar.gz", mtime=0) as sink:
        sink.write({"__key__": "a", "txt": "x"})
    assert refused(call("filter", "in/t-0.tar", "other/t-0.tar.gz", "out/", "True"), 2, "same name")
    assert call("filter", "in/t-0.tar", "other/t-0.tar.gz", "out/{name}-{task}.tar", "True").exit_code == 0
    assert keys("out/t-0-1.tar") == ["a"]


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["txt,seg.*"], {"txt", "seg.png"}),
        (["seg.png", "--drop"], {"txt", "json"}),
        (["txt,jpg", "--optional"], {"txt"}),
    ],
)
def test_select_keeps_or_drops_fields(call: Call, arguments: list[str], left: set[str]) -> None:
    assert call("select", "in/*.tar", "all.tar", *arguments).exit_code == 0
    assert [{name for name in one if name[0] != "_"} for one in samples("all.tar")] == [left] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select", "in/*.tar", "o/", "txt,jpg"], "no field jpg; there are: json, seg.png, txt"),
        (["select", "in/*.tar", "o/", "*", "--drop"], "no field is left"),
        (["rename", "in/*.tar", "o/", "png=jpg"], "no field jpg"),
        (["rename", "in/*.tar", "o/", "txt=json"], "there is a field txt already"),
        (["rename", "in/*.tar", "o/", "--key", "json"], "it has to be a text"),
        (["proc", "in/*.tar", "o/", "no-such-command-here"], "cannot be started"),
        (["proc", "in/*.tar", "o/", "rm {txt} {json} {seg.png}"], "no files"),
        (["proc", "in/*.tar", "o/", "touch other.txt"], r"left 'other.txt', which is no field"),
        (["proc", "in/*.tar", "o/", "sleep 9", "--timeout", "0.1"], "was ended after 0.1 s"),
        (["proc", "in/*.tar", "o/", "--shell", "echo no >&2; exit 3"], r"sample 'ä0/-0': .*status 3: no"),
    ],
)
def test_what_does_not_fit_fails_its_tasks_and_leaves_nothing(
    call: Call, here: Path, arguments: list[str], message: str
) -> None:
    assert refused(call(*arguments, "--attempts", 1), 1, message)
    assert not list(here.glob("o/*.tar"))
    until(lambda: not list(here.glob("scratch/*")))  # commands that were begun ahead may still run


def test_a_missing_field_is_not_looked_for_again(call: Call) -> None:
    result = call("select", "in/*.tar", "o/", "jpg")
    assert result.exit_code == 1
    assert "attempts repeated" not in result.output
    assert "run again" not in result.output


def test_an_expression_that_is_never_true_is_mentioned(call: Call) -> None:
    result = call("filter", "in/*.tar", "o/", "False")
    assert result.exit_code == 0
    assert "no sample was left to write" in result.stderr


def test_rename_moves_fields_and_keys(call: Call) -> None:
    assert call("rename", "in/*.tar", "r/{task}.tar", "text.txt=txt", "txt=json", "--key", "'x-' + key").exit_code == 0
    (first, *_) = samples("r/1.tar")
    assert first["__key__"] == "x-ä1/-0"
    assert (first["text.txt"], first["txt"]) == (b"text 0", b'{"n": 0}')
    for wrong in (["in/*.tar", "o/"], ["in/*.tar"], ["in/*.tar", "o/", "a="], ["in/*.tar", "o/", "a=x", "b=x"]):
        assert call("rename", *wrong).exit_code == 2


def test_proc_makes_changes_and_removes_the_files_of_a_sample(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "tr a-z A-Z < {txt} > {up.txt}; rm {json}; echo {key} '{{}}' > {key.txt}"
    assert call("proc", "in/*.tar", "p/", "--shell", line, "--jobs", 3).exit_code == 0
    for n, sample in enumerate(samples("p/t-1.tar")):
        assert {name: data for name, data in sample.items() if name[0] != "_"} == {
            "txt": b"text %d" % n,
            "up.txt": b"TEXT %d" % n,
            "seg.png": b"x",
            "key.txt": f"ä1/-{n} {{}}\n".encode(),
        }
    assert call("proc", "in/t-0.tar", "c.tar", "cp {txt} {copy.txt}").exit_code == 0
    assert [one["copy.txt"] for one in samples("c.tar")] == [b"text %d" % n for n in range(4)]
    monkeypatch.setenv("WDS_SECURE", "1")
    assert refused(call("proc", "in/t-0.tar", "d.tar", "cp {txt} {copy.txt}"), 1, "WDS_SECURE")


def test_a_key_cannot_leave_its_argument(call: Call, here: Path) -> None:
    with wds.TarWriter(here / "evil.tar", mtime=0) as sink:
        sink.write({"__key__": "a; touch $(echo gone) ../x 'q'", "txt": "x"})
    assert call("proc", "evil.tar", "e/", "--shell", "echo {key} > {key.txt}").exit_code == 0
    assert call("proc", "evil.tar", "f/", "sh -c 'printf %s \"$1\" > sample.key.txt' - {key}").exit_code == 0
    for name in ("e/evil.tar", "f/evil.tar"):
        assert samples(name)[0]["key.txt"].rstrip() == b"a; touch $(echo gone) ../x 'q'"
    assert not list(here.rglob("gone"))
