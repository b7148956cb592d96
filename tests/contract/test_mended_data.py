"""Faults of webdataset that are not copied: filters, decoding, tars and writing. Each test shows both sides."""

from __future__ import annotations

import gc
import importlib
import io
import pickle
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as ours
from tests.contract.common import outcome
from tests.servers import make_shards, make_tar
from wds_async.storage.registry import locate

theirs = pytest.importorskip("webdataset")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

BOTH = (theirs, ours)


def through(wds: Any, items: list[Any], *stages: Any) -> list[Any]:
    return list(wds.DataPipeline(lambda: iter([dict(i) for i in items]), *stages))


@pytest.fixture
def secure() -> Iterator[None]:
    for wds in BOTH:
        wds.utils.enforce_security = True
    yield
    for wds in BOTH:
        wds.utils.enforce_security = False


def fail(_: Any) -> bool:
    raise ValueError("bad")


def test_select_has_a_handler() -> None:
    with pytest.raises(TypeError, match="handler"):
        through(theirs, [{"a": 1}], theirs.select(fail, handler=theirs.ignore_and_continue))
    assert through(ours, [{"a": 1}], ours.select(fail, handler=ours.ignore_and_continue)) == []


def test_rename_keys_keeps_the_key() -> None:
    sample = {"__key__": "k", "__url__": "u", "jpg": b"1", "cls": b"2"}
    assert through(theirs, [sample], theirs.rename_keys(image="jpg")) == [{"image": b"1"}]
    [renamed] = through(ours, [sample], ours.rename_keys(image="jpg"))
    assert renamed["__key__"] == "k"
    assert {field for field in renamed if field[:2] != "__"} == {"image"}


def test_unbatched_of_unequal_columns() -> None:
    batch = {"x": [1, 2, 3], "y": [1, 2]}
    with pytest.raises(AssertionError):
        through(theirs, [batch], theirs.unbatched())
    with pytest.raises(ValueError, match=r"'x': 3.*'y': 2"):
        through(ours, [batch], ours.unbatched())


class Payload:
    """What a pickle from elsewhere might hold."""

    def __reduce__(self) -> Any:
        return (np.asarray, ([1],))


def test_pickles_in_secure_mode(secure: None) -> None:
    """`xdecode` unpickled even there."""
    sample = {"__key__": "k", "pyd": pickle.dumps([1])}
    assert through(theirs, [sample], theirs.xdecode())[0]["pyd"] == [1]
    with pytest.raises(ValueError, match="Unpickling is not allowed for security reasons when enforce_security is set"):
        through(ours, [sample], ours.xdecode())


def test_local_files_in_secure_mode(tmp_path: Path, secure: None) -> None:
    [path] = make_shards(tmp_path, 1, 3)
    for url in (str(path), f"file:{path}"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(list(theirs.WebDataset(url, shardshuffle=False))) == 3
        with pytest.raises(ValueError, match="cannot open local files"):
            list(ours.WebDataset(url, shardshuffle=False))


def test_rewriting_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards(tmp_path, 1, 3)
    monkeypatch.setenv("GOPEN_REWRITE", f"/elsewhere/={tmp_path}/")
    with pytest.raises(FileNotFoundError):
        list(theirs.WebDataset("/elsewhere/shard-000000.tar", shardshuffle=False))
    assert len(list(ours.WebDataset("/elsewhere/shard-000000.tar", shardshuffle=False))) == 3


def test_decoding_errors_say_what_is_wrong() -> None:
    sample = {"__key__": "k7", "__url__": "u.tar", "json": b"{"}
    messages = []
    for wds in BOTH:
        with pytest.raises(wds.DecodingError) as caught:
            through(wds, [sample], wds.decode())
        assert (caught.value.key, caught.value.url, caught.value.k) == ("k7", "u.tar", "json")
        messages.append(str(caught.value))
    assert messages[0] == ""
    assert all(part in messages[1] for part in ("k7", "u.tar", "json"))


class Stranger:
    """A class that ``weights_only`` does not know."""


def test_weights_only_at_the_top_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wds.pytorch_weights_only = False` is heard, and so is True."""
    torch = pytest.importorskip("torch")
    torch.save(Stranger(), tmp_path / "x.pth")
    sample = {"__key__": "k", "pth": (tmp_path / "x.pth").read_bytes()}
    for wds in BOTH:
        monkeypatch.setattr(wds, "pytorch_weights_only", True)
    assert isinstance(through(theirs, [sample], theirs.decode())[0]["pth"], Stranger)
    with pytest.raises(ours.DecodingError):
        through(ours, [sample], ours.decode())


@pytest.mark.parametrize("extension", ["h5", "hdf", "mpg", "mpeg", "ps", "eps", "rgb", "rgba"])
def test_what_is_no_image(extension: str) -> None:
    """Fields whose extension only happens to be one that Pillow has a plugin for are left to other decoders."""
    sample = {"__key__": "k", extension: b"no image"}
    with pytest.raises(theirs.DecodingError):
        through(theirs, [sample], theirs.decode("pil"))
    assert through(ours, [sample], ours.decode("pil"))[0][extension] == b"no image"


def test_streams_are_closed(tmp_path: Path) -> None:
    [path] = make_shards(tmp_path, 1, 3)

    def left_open(wds: Any) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(wds.WebDataset(str(path), shardshuffle=False))
            gc.collect()
        return sum(issubclass(w.category, ResourceWarning) for w in caught)

    assert left_open(theirs) > 0
    assert left_open(ours) == 0


def broken_pair(folder: Path) -> str:
    """A shard that is cut short in its last sample, and one that begins with a sample of that key."""
    members = [(f"{i}.{field}", bytes([i]) * 600) for i in range(3) for field in ("cls", "txt")]
    whole = make_tar(members)
    (folder / "0.tar").write_bytes(whole[: 5 * 1536 + 512 + 100])
    (folder / "1.tar").write_bytes(make_tar([("2.txt", b"another's"), ("3.txt", b"x")]))
    return str(folder / "{0..1}.tar")


def test_a_cut_sample_is_not_joined_with_the_next_shard(tmp_path: Path) -> None:
    """The rest of a broken shard's last sample is never taken from the next one, and what was read of it is dropped."""
    urls = broken_pair(tmp_path)

    def run(wds: Any) -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [dict(s) for s in wds.WebDataset(urls, shardshuffle=False, handler=wds.ignore_and_continue)]

    joined = next(s for s in run(theirs) if s["__key__"] == "2")
    assert joined["txt"] == b"another's"
    assert joined["cls"] == b"\x02" * 600
    seen = [(s["__key__"], s["__url__"][-5:], {k for k in s if k[0] != "_"}) for s in run(ours)]
    assert seen == [
        ("0", "0.tar", {"cls", "txt"}),
        ("1", "0.tar", {"cls", "txt"}),
        ("2", "1.tar", {"txt"}),
        ("3", "1.tar", {"txt"}),
    ]


def test_a_whole_sample_comes_before_the_error_of_the_next(tmp_path: Path) -> None:
    """webdataset learns that a sample has ended when it has the data of the next one."""
    path = tmp_path / "x.tar"
    path.write_bytes(make_tar([("a.x", b"1"), ("b.x", b"2" * 600)])[: 1536 + 100])

    def run(wds: Any) -> list[str]:
        seen: list[str] = []
        with pytest.raises(tarfile.ReadError):
            seen.extend(sample["__key__"] for sample in wds.WebDataset(str(path), shardshuffle=False))
        return seen

    assert (run(theirs), run(ours)) == ([], ["a"])


def test_a_shard_that_ends_inside_a_header(tmp_path: Path) -> None:
    """webdataset takes it for the shard's end."""
    data = make_tar([(f"{i}.txt", bytes([i]) * 600) for i in range(3)])
    (tmp_path / "x.tar").write_bytes(data[: 1536 + 100])

    def run(wds: Any) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [s["__key__"] for s in wds.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False)]

    assert run(theirs) == ["0"]
    with pytest.raises(tarfile.ReadError, match="byte 1636"):
        run(ours)


def test_a_shard_that_holds_half_a_sample(tmp_path: Path) -> None:
    """What webdataset gives of it has no field foo, nor the one that was cut."""
    data = make_tar([("0.cls", b"1"), ("0.png", b"2" * 60_000), ("1.cls", b"1")])
    (tmp_path / "x.tar").write_bytes(data[:10_000])

    def run(wds: Any) -> tuple[list[Any], ...]:
        stages = (wds.SimpleShardList(str(tmp_path / "x.tar")), wds.tarfile_to_samples(handler=wds.ignore_and_stop))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tuple(
                outcome(lambda step=step: wds.DataPipeline(*stages, step))  # type: ignore[misc]
                for step in (wds.to_tuple("cls"), wds.to_tuple("foo"), wds.rename(x="foo"))
            )

    whole, *missing = run(theirs)
    assert whole == ([(b"1",)], None)
    assert all(isinstance(error, ValueError) for _, error in missing)
    assert run(ours) == (([], None),) * 3
    with pytest.raises(ValueError, match="no sample came out"):
        list(ours.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False, handler=ours.ignore_and_stop))


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(make_tar([("0.cls", b"1")]))
    path = str(tmp_path / "x.tar")

    def run(wds: Any) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipelines = [
                wds.WebDataset(path, shardshuffle=False),
                wds.WebDataset(f"pipe:cat {path}", shardshuffle=False),
                wds.DataPipeline(wds.SimpleShardList(path), wds.tarfile_to_samples()),
            ]
            return [next(iter(pipeline)).get("__local_path__") for pipeline in pipelines]

    assert run(theirs) == [path, None, None]
    assert run(ours) == [path, None, path]


def names(data: Any) -> list[str]:
    """A loop over members as programs wrote it before webdataset put something between the shards."""
    return [item["fname"] for item in data]


def test_the_end_of_a_shard_in_older_loops(tmp_path: Path) -> None:
    """What stands between two shards is an empty dict in both, and in ours answers what is asked of a member."""
    for i in range(2):
        (tmp_path / f"{i}.tar").write_bytes(make_tar([("a.txt", b"%d" % i)]))

    def members(wds: Any) -> Iterator[Any]:
        opened = wds.tariterators.url_opener(iter([{"url": str(tmp_path / f"{i}.tar")} for i in range(2)]))
        return iter(wds.tariterators.tar_file_expander(opened))

    with pytest.raises(KeyError, match="fname"):
        names(members(theirs))
    assert [name for name in names(members(ours)) if name] == ["a.txt"] * 2
    for wds in BOTH:
        assert [item == {} for item in members(wds)] == [False, True] * 2
        assert [s["txt"] for s in wds.tariterators.group_by_keys(members(wds))] == [b"0", b"1"]


def test_no_empty_first_shard(tmp_path: Path) -> None:
    for wds in BOTH:
        wds.ShardWriter(str(tmp_path / f"{wds.__name__}-%d.tar"), verbose=0).close()
    assert [p.name for p in tmp_path.iterdir()] == ["webdataset-0.tar"]


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd"])
def test_pickles_are_encoded_by_every_extension_that_is_decoded(tmp_path: Path, field: str) -> None:
    """webdataset encodes pyd and pickle, and decodes pkl too."""

    def write(wds: Any) -> Any:
        path = str(tmp_path / f"{wds.__name__}.tar")
        with wds.TarWriter(path) as sink:
            sink.write({"__key__": "k", field: [1, 2]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return next(iter(wds.WebDataset(path, shardshuffle=False).decode()))[field]

    if field == "pkl":
        with pytest.raises(ValueError, match="no handler"):
            write(theirs)
    else:
        assert write(theirs) == [1, 2]
    assert write(ours) == [1, 2]


@pytest.mark.parametrize("name", ["USTAR_FORMAT", "GNU_FORMAT", None])
def test_the_format_of_archives(name: str | None) -> None:
    """A modification time that is no whole number makes PAX records, and webdataset always writes PAX."""

    def kinds(wds: Any) -> bytes:
        buffer = io.BytesIO()
        with wds.TarWriter(buffer, mtime=0.5, format=name) as sink:
            sink.write({"__key__": "k", "txt": "a"})
        return buffer.getvalue()

    assert b"PaxHeader" in kinds(theirs)
    assert b"PaxHeader" not in kinds(ours)
    assert (b"ustar  " in kinds(ours)) == (name == "GNU_FORMAT")


def test_uint32_tensors() -> None:
    array = np.arange(5, dtype="u4")
    with pytest.raises(ValueError, match=r"dtype|type"):
        theirs.tenbin.encode_buffer([array])
    [decoded] = ours.tenbin.decode_buffer(ours.tenbin.encode_buffer([array]))
    assert decoded.dtype == array.dtype
    assert (decoded == array).all()


def test_every_scheme_goes_where_it_says() -> None:
    """htgs:// is Google's storage over HTTP; webdataset gives curl a gs:// URL, which curl does not know."""
    theirs_gopen = importlib.import_module("webdataset.gopen")
    given = []
    original, theirs_gopen.Pipe = theirs_gopen.Pipe, lambda command, **kw: given.append(command[-1])
    try:
        theirs_gopen.gopen("htgs://bucket/x.tar")
    finally:
        theirs_gopen.Pipe = original
    assert given == ["gs://bucket/x.tar"]
    assert locate("htgs://bucket/x.tar").target == "gs://bucket/x.tar"
    assert locate("htgs://bucket/x.tar").kind != "pipe"


def test_dropping_a_pipe_waits_for_nobody() -> None:
    """A child that would go on for a minute is ended when its stream is dropped."""

    stream = ours.gopen("pipe:echo begun; exec sleep 60")
    assert stream.read(5) == b"begun"
    stream.close()
    del stream
    defaults = theirs.gopen.__globals__["Pipe"].__init__.__kwdefaults__
    assert defaults["timeout"] == 7200.0


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2", "v7"])
def test_what_the_cache_takes_for_a_tar(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w" if kind == "v7" else f"w:{kind}") as archive:
        archive.add(__file__, "a.txt")
    if kind == "v7":  # the header of 1979 has no magic number
        data = bytearray(path.read_bytes())
        data[257:265] = bytes(8)
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        path.write_bytes(data)
    checks = [importlib.import_module(f"{wds.__name__}.cache").check_tar_format for wds in BOTH]
    assert bool(checks[0](str(path))) == (kind == "gz")
    assert checks[1](str(path))
    (tmp_path / "page.tar").write_bytes(b"<html>not here</html>" * 100)
    assert not checks[1](str(tmp_path / "page.tar"))
