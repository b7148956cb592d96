"""``gopen``: any URL as a file, to read and to write, and WebDataset's openers by name."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, make_shard
from tests.transfer.reading import MIB, data
from wds_async.errors import PipeError, ShardNotFound, UnsafeContent, UrlError
from wds_async.reading import url_files
from wds_async.reading.url_files import (
    Pipe,
    ShardFile,
    gopen,
    gopen_schemes,
    reader,
    rewrite_url,
    set_options,
)

BYTES = data(3 * MIB + 17)


pytestmark = pytest.mark.usefixtures("openers")


def test_reading_over_http(origin: Origin) -> None:
    url = origin.add("x.bin", BYTES)
    with gopen(url) as file:
        assert isinstance(file, io.BufferedReader)
        assert (file.readable(), file.seekable(), file.name) == (True, False, url)
        assert (file.read(5), file.tell(), file.peek(1)[:1]) == (BYTES[:5], 5, BYTES[5:6])
        assert file.read(MIB) == BYTES[5 : MIB + 5]
        assert file.read() == BYTES[MIB + 5 :]
        assert (file.read(1), file.tell()) == (b"", len(BYTES))
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
    assert ShardFile(url).readall() == BYTES
    assert b"".join(reader(url, bufsize=100)) == BYTES


def test_lines_and_tars(origin: Origin) -> None:
    with gopen(origin.add("x.txt", b"a\nb\n")) as file:
        assert list(file) == [b"a\n", b"b\n"]
    shard = make_shard({"a": {"txt": b"1"}, "b": {"txt": b"2"}})
    with gopen(origin.add("x.tar", shard)) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        assert tar.getnames() == ["a.txt", "b.txt"]


def test_a_missing_file_shows_with_its_first_byte_and_again(origin: Origin) -> None:
    with gopen(origin.base + "/none") as file:
        for _ in range(2):
            with pytest.raises(ShardNotFound):
                file.read(1)
    with pytest.raises(FileNotFoundError):
        gopen("/nowhere/x")


def test_leaving_early_stops_at_once() -> None:
    for close in (True, False):
        file = gopen("pipe:yes; sleep 600")
        assert file.read(2) == b"y\n"
        if close:
            file.close()
        del file
        gc.collect()


def test_pipes(tmp_path: Path) -> None:
    with gopen(f"pipe:cat > {tmp_path}/x", "wb") as file:
        assert (file.write(b"abc"), file.tell(), file.writable()) == (3, 3, True)
    with gopen(f"pipe:cat {tmp_path}/x") as file:
        assert file.read() == b"abc"
    with gopen("pipe:printf abc; exit 3") as file:
        assert file.read(3) == b"abc"
        with pytest.raises(PipeError, match="status 3"):
            file.read(1)
    file = gopen("pipe:cat > /dev/null; exit 3", "wb")
    with pytest.raises(PipeError, match="status 3"):
        file.close()
    assert file.closed


def test_what_is_written_appears_whole_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with gopen("memory://opening/a", "wb") as file:
        file.write(b"abc")
        file.write(bytearray(b"def"))
    assert memory.cat_file("/opening/a") == b"abcdef"
    with pytest.raises(TypeError), gopen("memory://opening/b", "wb") as file:
        file.write(b"abc" + file)
    file = gopen("memory://opening/c?token=SECRET", "wb")
    file.write(b"abc")
    del file
    gc.collect()
    assert "never closed" in caplog.text
    assert "SECRET" not in caplog.text
    file = gopen("memory://opening/d", "wb")
    file.abort()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")
    assert memory.ls("/opening", detail=False) == ["/opening/a"]


def test_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b"
    with gopen(str(path), "wb") as file:
        file.write(b"abc")
    for url in (str(path), path.as_uri(), f"file:{path}"):
        with gopen(url) as file:
            assert isinstance(file, io.BufferedReader)
            assert file.read() == b"abc"
    monkeypatch.setenv("GOPEN_BUFFER", "0")
    with gopen(str(path)) as file:
        assert isinstance(file, io.FileIO)


def test_standard_streams_and_modes() -> None:
    code = "from wds_async.reading.url_files import gopen; gopen('-', 'wb').write(gopen('-').read()[::-1])"
    done = subprocess.run([sys.executable, "-c", code], input=b"abc", capture_output=True, check=True)
    assert done.stdout == b"cba"
    for mode in ("r", "ab", "xyz"):
        with pytest.raises(ValueError, match=f"{mode}: unknown mode"):
            gopen("x", mode)
        with pytest.raises(ValueError, match="unknown mode"):
            url_files.gopen_curl("http://h/x", mode)


def test_the_programs_openers_get_everything() -> None:
    asked: list[Any] = []

    def opener(url: str, mode: str, bufsize: int, **kw: Any) -> io.BytesIO:
        asked.append((url, mode, bufsize, kw))
        return io.BytesIO(b"x")

    gopen_schemes["http"] = gopen_schemes["own"] = gopen_schemes["__default__"] = opener
    assert gopen("http://h/x", "rb", 17, speed=3).read() == b"x"
    gopen("own:x", "wb")
    gopen("nosuch://x")
    assert asked == [
        ("http://h/x", "rb", 17, {"speed": 3}),
        ("own:x", "wb", 8192, {}),
        ("nosuch://x", "rb", 8192, {}),
    ]
    with pytest.raises(TypeError, match="takes no speed"):
        gopen("https://h/x", speed=3)


def test_an_opener_that_wraps_ours_to_write(tmp_path: Path) -> None:
    ours = gopen_schemes["pipe"]
    gopen_schemes["pipe"] = lambda url, mode, bufsize: ours(url.replace("TARGET", str(tmp_path / "x")), mode, bufsize)
    with gopen("pipe:cat > TARGET", "wb") as file:
        file.write(b"abc")
    assert gopen("pipe:cat TARGET").read() == b"abc"


def test_a_scheme_that_nothing_knows() -> None:
    with pytest.raises(ValueError, match="nosuch://x: no gopen handler defined"):
        gopen("nosuch://x")
    with pytest.raises(ValueError, match="x: no gopen handler defined"):
        url_files.gopen_error("x", "rb", 8192)


def test_openers_by_name(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x", b"abc")
    (tmp_path / "y").write_bytes(b"def")
    with url_files.gopen_curl(url) as file:
        assert file.read() == b"abc"
    with gopen_schemes["http"](url, "rb", 8192) as file:
        assert file.read() == b"abc"
    with url_files.gopen_file(f"file:{tmp_path}/y") as file, url_files.gopen_pipe("pipe:printf ghi") as other:
        assert (file.read(), other.read()) == (b"def", b"ghi")
    for opener in (url_files.gopen_hf, url_files.gopen_htgs):
        with pytest.raises(ValueError, match="wb: cannot write"):
            opener("hf://x", "wb")
    assert url_files.gopen_htgs("htgs://b/x")
    assert url_files.gopen_gsutil("gs://b/x")
    with pytest.raises(UrlError):
        url_files.gopen_ais("nosuch://b/x")


def test_rewriting(origin: Origin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    origin.add("x", b"abc")
    monkeypatch.setenv("GOPEN_REWRITE", f"s3://b/={origin.base}/")
    monkeypatch.setenv("GOPEN_VERBOSE", "1")
    assert rewrite_url("s3://b/x") == f"{origin.base}/x"
    assert rewrite_url("s3://c/x") == "s3://c/x"
    with gopen("s3://b/x") as file:
        assert file.read() == b"abc"
    assert f"rewrite s3://b/x -> {origin.base}/x" in caplog.text
    assert "gopen s3://b/x rb" in caplog.text
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(
        UnsafeContent, match="rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment"
    ):
        rewrite_url("s3://b/x")


@pytest.fixture
def enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    from wds_async import utils

    monkeypatch.setattr(utils, "enforce_security", True, raising=False)


@pytest.mark.parametrize("mode", ["rb", "wb"])
@pytest.mark.usefixtures("enforced")
def test_security_enforced_by_the_program(tmp_path: Path, mode: str) -> None:
    for url in (str(tmp_path / "x"), f"file:{tmp_path}/x"):
        with pytest.raises(ValueError, match="gopen: unsafe_gopen is False, cannot open local files"):
            gopen(url, mode)
    with pytest.raises(ValueError, match="gopen_pipe: unsafe_gopen is False, cannot open pipe URLs"):
        gopen("pipe:cat", mode)
    with pytest.raises(ValueError, match="cannot open pipe URLs"):
        gopen_schemes["pipe"]("pipe:cat", mode, 8192)
    gopen("-", mode)
    gopen("http://127.0.0.1:9/x", "rb").close()
    assert list(tmp_path.iterdir()) == []


def test_security_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from wds_async import config, utils

    monkeypatch.delitem(vars(utils), "enforce_security", raising=False)  # what another test set and set back
    assert (utils.enforce_security, config.settings().secure) == (False, False)
    monkeypatch.setenv("WDS_SECURE", "1")
    assert (utils.enforce_security, config.settings().secure) == (True, True)


def test_options_of_a_pipe() -> None:
    with Pipe("exit 3", mode="rb", shell=True) as pipe:
        assert set_options(pipe, timeout=9.0, ignore_status=[3], ignore_errors=False, handler=print)
        assert (pipe.timeout, pipe.ignore_status, pipe.ignore_errors, pipe.handler) == (9.0, [3], False, print)
        assert pipe.read() == b""
    assert not set_options(io.BytesIO(), timeout=1.0)


_ORDERS = {
    "import wds_async.gopen": "wds_async",
    "from wds_async.gopen import gopen_schemes, Pipe, gopen": "wds_async",
    "import wds_async as w; w.gopen('-'); import wds_async.gopen as g; assert g is w.gopen": "wds_async",
    "import importlib; importlib.import_module('wds_async.gopen').gopen_schemes['x'] = 1": "wds_async",
    "from wds_async.cli.alias import install; install(); from webdataset import gopen as g; g('-')": "webdataset",
    "from wds_async.cli.alias import install; install(); import webdataset.gopen": "webdataset",
    "from wds_async.cli.alias import install; install(); from webdataset.gopen import gopen, Pipe": "webdataset",
}

_CHECK = """
import inspect, pickle, sys
import {package} as wds
from wds_async.reading import url_files
assert wds.gopen is url_files.gopen, wds.gopen
assert inspect.isfunction(wds.gopen)
assert wds.gopen_schemes is url_files.gopen_schemes
import {package}.gopen
assert wds.gopen is url_files.gopen
from {package}.gopen import gopen_schemes, Pipe, gopen, reader, rewrite_url, set_options
assert gopen is wds.gopen and gopen_schemes is url_files.gopen_schemes and Pipe is url_files.Pipe
assert pickle.loads(pickle.dumps(wds.gopen)) is url_files.gopen
"""


@pytest.mark.parametrize("first", _ORDERS)
def test_the_function_stays_the_function_whatever_is_imported_first(first: str) -> None:
    code = f"{first}\n{_CHECK.format(package=_ORDERS[first])}"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_path_object_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"content")
    with gopen(tmp_path / "x.bin") as stream:  # type: ignore[arg-type]
        assert stream.read() == b"content"
