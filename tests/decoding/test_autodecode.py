"""wds_async.autodecode: handlers, formats, errors, the rules for pickles."""

from __future__ import annotations

import fractions
import gc
import gzip
import io
import json
import pickle
import subprocess
import sys
import weakref
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch
import webdataset

from wds_async import autodecode
from wds_async.autodecode import (
    Decoder,
    DecodingError,
    basichandlers,
    gzfilter,
    handle_extension,
    imagehandler,
    npy_loads,
    torch_loads,
    unpickle_loads,
)
from wds_async.errors import MissingExtra, UnsafeContent


@pytest.fixture(autouse=True)
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WDS_SECURE", "WDS_ALLOW_PICKLE", "WDS_PYTORCH_WEIGHTS_ONLY"):
        monkeypatch.delenv(name, raising=False)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def basic(**fields: bytes) -> dict[str, Any]:
    return Decoder([])({"__key__": "k", **{name.replace("_", "."): data for name, data in fields.items()}})


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("field", "data", "value"),
    [
        *[(name, "é".encode(), "é") for name in ("txt", "text", "transcript")],
        *[(name, b" 12\n", 12) for name in ("cls", "cls2", "index", "inx", "id")],
        *[(name, b'{"a": [1]}', {"a": [1]}) for name in ("json", "jsn")],
        *[(name, pickle.dumps({"a": 1}), {"a": 1}) for name in ("pyd", "pickle", "pkl")],
        *[(name, msgpack.packb({"a": [1]}), {"a": [1]}) for name in ("mp", "msg")],
        ("cbor", cbor2.dumps({"a": [1]}), {"a": [1]}),
        ("a.b.cls", b"3", 3),
        ("txt.gz", gzip.compress(b"x"), "x"),
        ("json.gz", gzip.compress(b"[1]"), [1]),
        ("unknown", b"x", b"x"),
        ("unknown.gz", gzip.compress(b"x"), b"x"),
        ("CLS", b"3", b"3"),
    ],
)
def test_formats(field: str, data: bytes, value: Any) -> None:
    assert Decoder([])({"__key__": "k", field: data}) == {"__key__": "k", field: value}


# ---------------------------------------------------------------- handlers


def test_partial_passes_decoded_fields_on() -> None:
    once = {"__key__": "k", "cls": 1, "txt": b"a"}
    assert Decoder([], partial=True)(once) == {"__key__": "k", "cls": 1, "txt": "a"}
    with pytest.raises(DecodingError, match=r"'cls'.*it is int and not bytes \(partial=True"):
        Decoder([])(once)
    for partial in (False, True):
        with pytest.raises(DecodingError, match=r"'cls'.*it is None"):
            Decoder([], partial=partial)({"cls": None})


def test_the_sample_itself_is_not_changed() -> None:
    sample = {"__key__": "k", "cls": b"1"}
    Decoder([])(sample)
    assert sample == {"__key__": "k", "cls": b"1"}


@pytest.mark.parametrize(
    ("extensions", "field", "mine"),
    [
        ("png", "png", True),
        ("png", "seg.PNG", True),
        ("PNG jpg", "x.jpg", True),
        ("seg.png", "seg.png", True),
        ("seg.png", "a.seg.png", True),
        ("seg.png", "png", False),
        ("seg.png", "noseg.png", False),
        ("ng", "png", False),
        (".png", "png", True),
        (".png", "seg.png", False),
        ("", "png", False),
    ],
)
def test_handle_extension(extensions: str, field: str, mine: bool) -> None:
    for library in (handle_extension, webdataset.handle_extension):
        assert library(extensions, len)(f".{field}", b"abc") == (3 if mine else None)


def test_handlers_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"f\(key, data\).*'rgb'"):
        Decoder(["rgb"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="no further ones"):
        Decoder([], None, None, None, False, gzfilter)


def reverse(key: str, data: bytes) -> Any:
    return data[::-1] if key.endswith(".rev") else None


def shout(key: str, data: bytes) -> Any:
    return data.upper() if key.endswith(".up") else None


RAW = [{"__key__": str(n), "rev": b"ab", "up": b"c", "cls": b"%d" % n, "flac": b""} for n in range(3)]


@pytest.mark.parametrize("n", range(1, 8))
def test_handlers_as_arguments_of_2020(n: int) -> None:
    functions: list[Any] = [reverse, *[handle_extension(f"x{i}", len) for i in range(n - 1)]]
    decoder = Decoder(*functions)
    assert decoder.handlers == [gzfilter, *functions, basichandlers]
    assert (decoder.only, decoder.partial) == (None, False)
    assert decoder(dict(RAW[2], flac=b"2"))["rev"] == b"ba"
    assert Decoder(reverse, pre=[], only="rev", partial=True).handlers == [reverse, basichandlers]


@pytest.mark.parametrize("kind", ["list", "pipeline", "WebDataset", "user's dataset"])
def test_a_decoder_called_with_a_dataset(kind: str) -> None:
    from wds_async.dataset import WebDataset
    from wds_async.decoding.media import torch_video
    from wds_async.fluid import FluidWrapper
    from wds_async.pipeline import DataPipeline

    source: Any = {
        "list": RAW,
        "pipeline": DataPipeline([RAW]),
        "WebDataset": FluidWrapper((*RAW,)),
        "user's dataset": UsersDataset(),
    }[kind]
    with pytest.warns(DeprecationWarning, match=r"use dataset\.decode") as caught:
        decoded = Decoder(reverse, shout, torch_video)(source)
    assert caught[0].filename == __file__
    expected = [dict(sample, rev=b"ba", up=b"C", cls=n) for n, sample in enumerate(RAW)]
    assert list(decoded) == list(decoded) == list(pickle.loads(pickle.dumps(decoded))) == expected
    assert isinstance(decoded, torch.utils.data.IterableDataset)
    assert list(torch.utils.data.DataLoader(decoded, batch_size=None, num_workers=1)) == expected
    if isinstance(source, DataPipeline):
        assert type(decoded) is type(source)
    assert issubclass(WebDataset, DataPipeline)


class UsersDataset(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(RAW)


def test_a_decoder_called_with_neither() -> None:
    with pytest.raises(TypeError, match=r"a sample .* or a dataset, not 3"):
        Decoder([])(3)


def test_a_decoder_of_one_extension_on_a_dataset() -> None:
    with pytest.warns(DeprecationWarning, match="Decoder"):
        decoded = Decoder(handle_extension(".rev", len))([{"__key__": "k", "rev": b"abc", "a.rev": b"abc"}])
    assert list(decoded) == [{"__key__": "k", "rev": 3, "a.rev": b"abc"}]


def test_decoders_pickle() -> None:
    decoder = Decoder([imagehandler("rgb"), handle_extension("x", len)], only="cls x", allow_pickle=True)
    copy = pickle.loads(pickle.dumps(decoder))
    assert copy({"cls": b"3", "x": b"abc", "y": b""}) == {"cls": 3, "x": 3, "y": b""}


# ---------------------------------------------------------------- errors


def test_an_error_names_shard_key_and_field_and_keeps_its_cause() -> None:
    sample = {"__key__": "a/001", "__url__": "https://me:pw@h/x.tar?sig=s", "txt": b"fine", "json": b"{"}
    with pytest.raises(DecodingError) as caught:
        Decoder([])(sample)
    error = caught.value
    assert isinstance(error.__cause__, json.JSONDecodeError)
    url = "https://me:***@h/x.tar?sig=***"
    said = {"url": url, "shard": url, "offset": None, "key": "a/001", "field": "json", "k": "json"}
    assert vars(error) == said
    for part in ("https://me:***@h/x.tar?sig=***", "'a/001'", "'json'", "1 bytes, b'{'", "JSONDecodeError"):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (DecodingError, str(error), vars(error))


class _Weak(dict[str, Any]):
    pass


def test_an_error_does_not_hold_the_sample() -> None:
    sample = _Weak({"__key__": "k", "json": b"{" * 10})
    watched = weakref.ref(sample)
    try:
        Decoder([])(sample)
    except DecodingError as exn:
        kept = exn.with_traceback(None)
        kept.__cause__ = None
        kept.__context__ = None
    del sample
    gc.collect()
    assert watched() is None
    assert len(str(kept)) < 300


# ---------------------------------------------------------------- pickles


FRACTION = fractions.Fraction(1, 3)


def test_other_classes_need_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(FRACTION)
    with pytest.raises(DecodingError, match=r"fractions\.Fraction.*allow_pickle=True.*WDS_ALLOW_PICKLE=1") as caught:
        basic(pyd=data)
    assert isinstance(caught.value.__cause__, UnsafeContent)
    assert Decoder([], allow_pickle=True)({"pyd": data, "cls": b"1", "x": b""}) == {
        "pyd": FRACTION,
        "cls": 1,
        "x": b"",
    }
    assert unpickle_loads(data, allow_pickle=True) == FRACTION
    monkeypatch.setenv("WDS_ALLOW_PICKLE", "1")
    assert basic(pyd=data)["pyd"] == FRACTION
    monkeypatch.setenv("WDS_ALLOW_PICKLE", "0")
    with pytest.raises(UnsafeContent):
        unpickle_loads(data)


def test_pth_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved({"a": FRACTION})
    with pytest.raises(UnsafeContent, match=r"fractions\.Fraction.*allow_pickle=True"):
        torch_loads(data)
    assert Decoder([], allow_pickle=True)({"pth": data})["pth"] == {"a": FRACTION}
    monkeypatch.setattr(autodecode, "pytorch_weights_only", False)
    assert torch_loads(data) == {"a": FRACTION}
    monkeypatch.setattr(autodecode, "pytorch_weights_only", None)
    monkeypatch.setenv("WDS_PYTORCH_WEIGHTS_ONLY", "0")
    assert torch_loads(data) == {"a": FRACTION}
    monkeypatch.setattr(autodecode, "pytorch_weights_only", True)
    with pytest.raises(UnsafeContent):
        torch_loads(data)


def test_weights_only_is_heeded_where_programs_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import wds_async

    data = saved({"a": FRACTION})
    monkeypatch.setattr(wds_async, "pytorch_weights_only", False, raising=False)
    assert torch_loads(data) == basic(pth=data)["pth"] == {"a": FRACTION}
    monkeypatch.setattr(autodecode, "pytorch_weights_only", True)
    assert torch_loads(data) == {"a": FRACTION}
    monkeypatch.setattr(wds_async, "pytorch_weights_only", True, raising=False)
    monkeypatch.setattr(autodecode, "pytorch_weights_only", False)
    with pytest.raises(UnsafeContent):
        torch_loads(data)


def test_secure_mode_by_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    from wds_async import utils

    assert unpickle_loads(pickle.dumps(1)) == 1
    monkeypatch.setattr(utils, "enforce_security", True, raising=False)
    with pytest.raises(UnsafeContent, match="enforce_security"):
        unpickle_loads(pickle.dumps(1))
    with pytest.raises(UnsafeContent, match="enforce_security"):
        torch_loads(saved(1))


def test_npy_of_objects_needs_trust() -> None:
    array = np.array([1, "a"], object)
    for loads in (npy_loads, lambda data: basic(npy=data)):
        with pytest.raises((ValueError, DecodingError), match="allow_pickle"):
            loads(npy(array))
    with pytest.raises(DecodingError, match="allow_pickle"):
        basic(npz=npz(a=array))
    found = Decoder([], allow_pickle=True)({"npy": npy(array), "npz": npz(a=array)})
    assert found["npy"].tolist() == found["npz"]["a"].tolist() == [1, "a"]


def test_secure_mode_refuses_pickles_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    monkeypatch.setenv("WDS_ALLOW_PICKLE", "1")
    unpickling = "Unpickling is not allowed for security reasons when enforce_security is set"
    loading = "torch.loads is not allowed for security reasons when enforce_security is set"
    for trust in (False, True):
        with pytest.raises(UnsafeContent, match=unpickling):
            unpickle_loads(pickle.dumps(1), allow_pickle=trust)
        with pytest.raises(UnsafeContent, match=loading):
            torch_loads(saved(1), allow_pickle=trust)
        with pytest.raises(ValueError, match="allow_pickle"):
            npy_loads(npy(np.array([{}])), allow_pickle=trust)
        for field in ("pyd", "pkl", "pickle"):
            with pytest.raises(DecodingError, match=unpickling):
                Decoder([], allow_pickle=trust)({field: pickle.dumps(1)})
    assert basic(cls=b"1", npy=npy(np.array(1)))["cls"] == 1


# ---------------------------------------------------------------- packages that are not there


@pytest.mark.parametrize(
    ("absent", "field", "extra"),
    [("msgpack", "mp", "formats"), ("cbor2", "cbor", "formats"), ("torch", "pth", "torch")],
)
def test_missing_packages(absent: str, field: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(DecodingError, match=rf'pip install "wds-async\[{extra}\]"') as caught:
        basic(**{field: b"\1"})
    assert isinstance(caught.value.__cause__, MissingExtra)


def test_decoding_plain_fields_imports_no_extra() -> None:
    script = """
import sys
from wds_async.autodecode import Decoder
import pickle, numpy
Decoder([])({"cls": b"1", "pyd": pickle.dumps({"a": numpy.arange(3)})})
print([name for name in ("torch", "PIL", "msgpack", "cbor2", "simplejpeg") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
