"""What is fuzzed: a function of bytes for each reader, which may raise errors of the tree and nothing else.

A target also checks what must hold whatever it was given: that no more comes out than went in, that names are text,
that reading goes on, that credentials are gone. An AssertionError is a find, as any exception of another kind is.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from unittest import mock

from wds_async.decoding.unpickle import safe_loads
from wds_async.errors import CorruptShard, WdsError
from wds_async.indexed.index import load_index
from wds_async.redact import redact
from wds_async.rewrite import parse_rules, rewrite
from wds_async.shardlists import spec
from wds_async.shardlists.document import Document, _parsed
from wds_async.storage.base import Answer
from wds_async.storage.http.errors import explain_status
from wds_async.storage.listing import expand
from wds_async.tar.decompress import plain
from wds_async.tar.group import samples
from wds_async.tar.parse import members, members_of
from wds_async.tar.resync import resync
from wds_async.tar.source import ByteSource
from wds_async.tenbin import decode_buffer
from wds_async.transfer.connection import ConnectionBroken, parse_head
from wds_async.transfer.part_request import unchunked
from wds_async.urls import expand_urls

__all__ = ["TARGETS", "Target"]

Target = Callable[[bytes], None]

_FIELD_BYTES = 1 << 20
_DAMAGED_PICKLE = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,  # a length that no memory has; what is really taken libFuzzer's own limit watches
    TypeError,
    ValueError,
)
_HARMLESS = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789/:.-_{},=;\\()[]|*+?<>^$ @&#%~")


def _pieces(data: bytes) -> Callable[[], memoryview | None]:
    """``data`` in pieces whose sizes follow from it, as the engine would give them."""
    view, state = memoryview(data), [0, zlib.crc32(data)]

    def read() -> memoryview | None:
        at, seed = state
        if at >= len(view):
            return None
        state[1] = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        size = 1 + state[1] % (1, 7, 511, 512, 513, 4096)[seed % 6 if seed % 6 else 5]
        state[0] = at + size
        return view[at : at + size]

    return read


def tar(data: bytes) -> None:
    """Members and samples of a tar."""
    found = 0
    try:
        for sample in samples(members(_pieces(data), "x.tar", max_field_bytes=_FIELD_BYTES), "x.tar"):
            assert sample["__key__"] is not None
            assert 0 <= sample.offset <= len(data)
            found += sum(len(field) for field in sample.values() if isinstance(field, bytes))
    finally:
        assert found <= len(data)


def damaged(data: bytes) -> None:
    """A tar that is read on behind its damage: it always ends, and each gap lies behind the one before."""
    source = ByteSource(_pieces(data), "x.tar")
    before = -1
    while True:
        try:
            for name, field, offset in members_of(source, max_field_bytes=_FIELD_BYTES):
                assert isinstance(name, str)
                assert len(field) <= len(data)
                assert offset > before
                before = offset
            return
        except CorruptShard:
            at = source.offset
            skipped = resync(source)
            if skipped is None:
                return
            assert skipped >= 0
            assert source.offset <= len(data)
            assert source.offset + 512 > at


def compressed(data: bytes) -> None:
    """What comes out of a compressed stream, and no more of it than is asked for."""
    read, total = plain(_pieces(data), "x.tar"), 0
    while (piece := read()) is not None and total < 1 << 22:
        assert len(piece) <= 1 << 22
        total += len(piece)


def head(data: bytes) -> None:
    """The head of an answer, and what is concluded from it."""
    raw = data.partition(b"\r\n\r\n")
    try:
        parsed = parse_head(raw[0] + b"\r\n\r\n")
    except ConnectionBroken:
        return
    span = parsed.content_range()
    assert span is None or len(span) == 3
    assert parsed.length is None or parsed.length >= 0
    fault = explain_status(Answer(parsed.status, parsed.fields, unchunked(raw[2])[0][:4096]))
    assert fault.reason.isprintable()
    assert fault.retry_after_s is None or fault.retry_after_s >= 0


def rules(data: bytes) -> None:
    """Rules of rewriting, and a URL that they are applied to."""
    text = bytes(byte for byte in data if byte in _HARMLESS).decode()[:120]
    rule, _, url = text.partition("#")
    if any(rule.count(sign) > 2 for sign in "*+{"):  # nested repeats take Python's re for ever; the user wrote them
        return
    rewritten = rewrite(f"gs://{url}", parse_rules(rule))
    assert isinstance(rewritten, str)


def urls(data: bytes) -> None:
    """A specification of shards in one line; without the braces that say millions."""
    text = bytes(byte for byte in data if byte in _HARMLESS).decode()[:200]
    if text.count("..") > 1 or any(len(run) > 3 for run in "".join(c if c.isdigit() else " " for c in text).split()):
        return
    for url in expand_urls("https://host/" + text.replace("*", "").replace("?", "").replace("[", "")):
        assert url
        assert "user:secret@" not in redact(f"https://user:secret@{url.removeprefix('https://')}")


def specification(data: bytes) -> None:
    """A dataset specification in YAML or JSON, from elsewhere."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    if text.count("..") > 1:  # two ranges make a hundred thousand shards, as they should
        return
    name = "https://host/spec.yaml"
    # What names a folder or a pattern would be listed, over the network.
    with mock.patch.object(expand, "expand_listed", lambda given, *_: expand_urls(given)):
        spec._spec(Document(name, _parsed(text, name), text, "https://host/", trusted=False))


def index(data: bytes) -> None:
    """A JSON index of shards."""
    found = load_index(io.BytesIO(data), base="https://host/")
    assert json.dumps(found["shardlist"])


def tenbin(data: bytes) -> None:
    """Arrays; ValueError is what it promises."""
    try:
        found = decode_buffer(data)
    except ValueError:
        return
    assert sum(array.nbytes for array in found) <= len(data)


def pickled(data: bytes) -> None:
    """A pickle, by the rules for those of strangers. Python's own errors say that it is damaged; what must not be is
    code that runs, memory without end, a crash."""
    with contextlib.suppress(*_DAMAGED_PICKLE):
        safe_loads(data)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (tar, damaged, compressed, head, rules, urls, specification, index, tenbin, pickled)
}


def run(name: str, data: bytes) -> None:
    """One input; errors of the tree are answers."""
    with contextlib.suppress(WdsError):
        TARGETS[name](data)
