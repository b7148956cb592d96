"""``wds-async convert``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.distributed import jobs

Call = Callable[..., Result]


def test_shards_go_to_tfrecord_and_mds_and_back(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    with wds.TarWriter("t.tar", mtime=0) as sink:
        sink.write({"__key__": "a", "cls": b"3", "txt": b"text"})
    renamed = ("--field", "cls=label", "--field", "txt")
    result = call("convert", "t.tar", "tf/", "--to", "tfrecord", "--typed", *renamed)
    assert result.exit_code == 0, result.output
    assert "1 samples in, 1 out" in result.output
    result = call("convert", "tf/t.tfrecord", "back.tar", *renamed)
    assert result.exit_code == 0, result.output
    assert Path("back.tar").read_bytes() == Path("t.tar").read_bytes()
    assert "_wds/convert-back" in call("job", "ls", ".").output
    result = call("convert", "t.tar", "mds/", "--to", "mds", "--typed", "--maxsize", "64M", *renamed)
    assert result.exit_code == 0, result.output
    result = call("convert", "mds", "again/{task}.tar", *renamed)
    assert result.exit_code == 0, result.output
    assert Path("again/0.tar").read_bytes() == Path("t.tar").read_bytes()
    for wrong in (["--field", "=x"], ["--field", "A=x"], ["--field", "a=x", "--field", "a=y"], ["--to", "lmdb"]):
        assert call("convert", "t.tar", "out/", *wrong).exit_code == 2
    Path("bad.tfrecord").write_bytes(b"x" * 20)
    result = call("convert", "bad.tfrecord", "out/", "--attempts", "1")
    assert result.exit_code == 1
    assert "bad.tfrecord: record 0, at byte 0" in result.output
