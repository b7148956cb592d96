"""Everything that can be wrong with a shard: one error of the tree, in its place, with URL, offset and advice.

Each case stands between two good shards. With the default handler the run ends there; with `warn_and_continue` and
`ignore_and_continue` it goes on with the next shard, and no sample is mixed or lost.
"""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import BEFORE_HEAD, Origin, Tls, make_shard
from wds_async import errors

_QUICK = {"WDS_RETRIES": "2", "WDS_TIMEOUT": "5"}


def _samples(first: int, count: int = 4) -> dict[str, dict[str, bytes]]:
    return {f"{i:04d}": {"txt": b"%d" % i, "bin": bytes([i]) * 3000} for i in range(first, first + count)}


BEFORE, BAD, AFTER = _samples(0), _samples(100), _samples(200)


@dataclass
class Place:
    """Where a case may put its shard."""

    origin: Origin
    folder: Path
    tls: Tls
    monkeypatch: pytest.MonkeyPatch

    def file(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)


@dataclass(frozen=True)
class Case:
    """``put`` gives the URL; the error's class and words; ``offset`` must be in the message; ``good`` samples come
    first."""

    put: Callable[[Place], str]
    kind: type[Exception]
    words: str
    offset: bool = True
    good: int = 0


def _behave(**fields: Any) -> Callable[[Place], str]:
    def put(place: Place) -> str:
        place.origin.behave(path="/bad.tar", **fields)
        return place.origin.add("bad.tar", make_shard(BAD))

    return put


def _serve(content: bytes) -> Callable[[Place], str]:
    return lambda place: place.origin.add("bad.tar", content)


def _store(content: bytes) -> Callable[[Place], str]:
    return lambda place: place.file("bad.tar", content)


def _untrusted(place: Place) -> str:
    other = Origin({"/bad.tar": make_shard(BAD)}, tls=place.tls.server_context()).start()
    place.monkeypatch.setattr(place.origin, "tls_neighbour", other, raising=False)
    return other.url("bad.tar")


def _refused(place: Place) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/bad.tar"


def _directory(place: Place) -> str:
    (place.folder / "bad.tar").mkdir()
    return str(place.folder / "bad.tar")


_GOOD = make_shard(BAD)
_CUT = 11_000  # within the data of the third sample's second member
_WRONG_HEADER = bytearray(_GOOD)
_WRONG_HEADER[9216:9226] = b"\xff" * 10  # the header of the third sample's first member
_PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>" * 20

CASES = {
    "unknown scheme": Case(lambda place: "nosuch://b/bad.tar", errors.UrlError, "unknown scheme", False),
    "missing over http": Case(lambda place: place.origin.url("bad.tar"), errors.ShardNotFound, "404"),
    "missing file": Case(lambda place: str(place.folder / "bad.tar"), errors.ShardNotFound, "no such file"),
    "forbidden": Case(_behave(status=403), errors.AccessDenied, "403"),
    "directory": Case(_directory, errors.TransferError, "directory"),
    "empty over http": Case(_serve(b""), errors.NotATar, "empty", False),
    "empty file": Case(_store(b""), errors.NotATar, "empty", False),
    "not a tar": Case(_serve(b"something else " * 200), errors.NotATar, "no tar header", False),
    "short and not a tar": Case(_store(b"x"), errors.NotATar, "no tar header", False),
    "page with 200": Case(_behave(body=_PAGE), errors.NotATar, "HTML|not a tar", False),
    "truncated": Case(_serve(_GOOD[:_CUT]), errors.TruncatedShard, "", good=2),
    "truncated file": Case(_store(_GOOD[:_CUT]), errors.TruncatedShard, "", good=2),
    "wrong header": Case(_serve(bytes(_WRONG_HEADER)), errors.CorruptShard, "", good=1),
    "closes at once": Case(_behave(cut_after=BEFORE_HEAD, cut="fin"), errors.TransferError, "closed|lost"),
    "breaks always": Case(_behave(cut_after=0), errors.TransferError, "closed|lost|reset"),
    "refused": Case(_refused, errors.TransferError, "refused"),
    "no such host": Case(lambda place: "http://no-such-host.invalid/bad.tar", errors.TransferError, "resolve"),
    "untrusted certificate": Case(_untrusted, errors.TransferError, "certificate does not verify"),
    "redirect loop": Case(_behave(redirect="/bad.tar"), errors.TransferError, "redirects in a circle"),
    "broken server": Case(_behave(status=500), errors.TransferError, "500"),
    "failing pipe": Case(lambda place: "pipe:exit 3", errors.PipeError, "status 3"),
    "damaged gzip": Case(_serve(b"\x1f\x8b\x08\0" + b"x" * 3000), errors.ShardFormatError, ""),
    "gzip that ends early": Case(
        lambda place: place.file("bad.tar.gz", gzip.compress(_GOOD)[:-20]), errors.ShardFormatError, ""
    ),
}


@pytest.fixture
def place(origin: Origin, tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in _QUICK.items():
        monkeypatch.setenv(name, value)
    made = Place(origin, tmp_path, tls, monkeypatch)
    yield made
    neighbour = getattr(origin, "tls_neighbour", None)
    if neighbour is not None:
        neighbour.stop()


def _urls(place: Place, case: Case) -> list[str]:
    before = place.origin.add("before.tar", make_shard(BEFORE))
    after = place.file("after.tar", make_shard(AFTER))
    return [before, case.put(place), after]


def _check(sample: dict[str, Any]) -> str:
    """A sample is whole and its own."""
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    key: str = sample["__key__"]
    assert fields == {**BEFORE, **BAD, **AFTER}[key]
    return key


@pytest.mark.parametrize("name", CASES)
def test_one_error_in_its_place(place: Place, name: str) -> None:
    case = CASES[name]
    urls = _urls(place, case)
    keys: list[str] = []
    with pytest.raises(errors.WdsError) as caught:
        keys.extend(_check(sample) for sample in wds.WebDataset(urls, shardshuffle=False))
    assert isinstance(caught.value, case.kind)
    assert type(caught.value) is not errors.WdsError
    text = str(caught.value)
    assert re.search(case.words, text), text
    assert urls[1] in text
    assert not case.offset or re.search(r"(byte|offset) \d+|\d+ compressed bytes", text), text
    assert keys[:4] == list(BEFORE)
    assert keys[4:] == list(BAD)[: len(keys) - 4]
    assert len(keys) - 4 >= case.good


@pytest.mark.parametrize("name", CASES)
def test_the_run_goes_on(place: Place, name: str) -> None:
    case = CASES[name]
    dataset = wds.WebDataset(_urls(place, case), shardshuffle=False, handler=wds.ignore_and_continue)
    keys = [_check(sample) for sample in dataset]
    assert keys[:4] == list(BEFORE)
    assert keys[-4:] == list(AFTER)
    assert keys[4:-4] == list(BAD)[: len(keys) - 8]
    assert case.good <= len(keys) - 8 < 4


@pytest.mark.parametrize("name", ["missing over http", "truncated", "page with 200", "unknown scheme"])
def test_each_bad_shard_is_warned_about_once(place: Place, name: str) -> None:
    case = CASES[name]
    urls = _urls(place, case)
    dataset = wds.WebDataset(urls, shardshuffle=False, handler=wds.warn_and_continue)
    with pytest.warns(UserWarning, match=case.kind.__name__) as caught:
        keys = [sample["__key__"] for sample in dataset]
    assert len(caught) == 1
    assert keys[-4:] == list(AFTER)


def test_nothing_but_bad_shards(place: Place) -> None:
    urls = [place.origin.url(f"{i}.tar") for i in range(70)]
    dataset = wds.WebDataset(urls, shardshuffle=False, handler=wds.ignore_and_continue, empty_check=False)
    assert list(dataset) == []


@pytest.mark.parametrize("rule", ["([=x", "no equals sign", "=x"])
def test_a_malformed_rewrite_rule(place: Place, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", rule)
    with pytest.raises((errors.UrlError, errors.ConfigError), match=r"rewrite rule|WDS_REWRITE"):
        list(wds.WebDataset(place.file("x.tar", make_shard(BAD)), shardshuffle=False))


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:/h/x.tar",
        "http://h:port/x.tar",
        "http://[::1/x.tar",
        "",
        "x-{000..002.tar",
        "file://elsewhere/x.tar",
    ],
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(errors.UrlError) as caught:
        list(wds.WebDataset(url, shardshuffle=False))
    assert str(caught.value)


def test_errors_come_through_a_data_pipeline(place: Place) -> None:
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(_urls(place, CASES["truncated"])), wds.tarfile_to_samples(handler=wds.ignore_and_continue)
    )
    keys = [_check(sample) for sample in pipeline]
    assert keys[:4] == list(BEFORE)
    assert keys[-4:] == list(AFTER)


def test_a_handler_that_stops(place: Place) -> None:
    urls = _urls(place, CASES["missing over http"])
    dataset = wds.WebDataset(urls, shardshuffle=False, handler=wds.ignore_and_stop)
    assert [sample["__key__"] for sample in dataset] == list(BEFORE)
