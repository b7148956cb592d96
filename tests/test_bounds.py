"""Memory and time within the contract, whatever the shards, the servers and the fields are like.

Every case runs in a fresh interpreter, which says by how much its resident memory rose at the most (`PEAK`).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import socket
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.servers import Nginx, Origin, make_shard, make_tar
from tests.transfer.reading import KIB, MIB
from wds_async import autodecode
from wds_async.autodecode import Decoder
from wds_async.config import default_budget_bytes, memory_bytes
from wds_async.errors import ConfigError, DecodingError, FieldTooLarge, ShardFormatError
from wds_async.shardlists import non_empty
from wds_async.tar.group import MAX_FIELDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

ROOT = Path(__file__).parents[1]
BUDGET, PART = 32 * MIB, 2 * MIB
SLACK = 24 * MIB  # of the allocator, and of threads' stacks

PEAK = """
import gc, json, os, sys
from pathlib import Path
import wds_async as wds
from wds_async.config import RetryPolicy
from wds_async.storage.http.backend import HttpBackend

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def peak(do):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    found = do()
    return status("VmHWM") - before, found

def count(urls, limit=None, **more):
    n = 0
    for sample in wds.WebDataset(urls, shardshuffle=False, **more):
        n += 1
        if n == limit:
            break
    return n

import aiohttp, numpy, zstandard  # what the first of its kind imports is no part of a peak
given = json.loads(sys.argv[1])
count(given.pop("warm"))
"""


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., Any]:
    """``child(script, **given)`` runs it behind `PEAK` and returns what it printed, as JSON."""
    warm = tmp_path / "warm.tar"
    warm.write_bytes(make_shard({"a": {"txt": b"a"}}))

    def run(script: str, *, environment: dict[str, str] | None = None, **given: Any) -> Any:
        source = PEAK + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", source, json.dumps({"warm": str(warm), **given})],
            cwd=ROOT,
            env={**os.environ, "WDS_BUDGET": str(BUDGET), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=45,
            check=False,
        )
        lines = done.stdout.splitlines()
        assert lines, done.stderr
        return json.loads(lines[-1])

    return run


def sparse(path: Path, sizes: list[int]) -> str:
    """A shard whose fields are holes of these sizes, and its name."""
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number:05}.bin")
            info.size = size
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(-(-size // 512) * 512, os.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    return path.name


# ------------------------------------------------------------------ shards and fields of every size


@pytest.mark.parametrize("ignore_ranges", [False, True], ids=["ranges", "stream"])
def test_shards_of_one_kilobyte_and_of_twenty_gigabytes(
    child: Any, nginx: Callable[..., Nginx], tmp_path: Path, ignore_ranges: bool
) -> None:
    (tmp_path / "tiny.tar").write_bytes(make_tar([("a.txt", b"1" * 512)])[:1024])
    huge = sparse(tmp_path / "huge.tar", [4 * MIB] * 4900)
    assert (tmp_path / huge).stat().st_size > 20e9
    server = nginx(tmp_path, ignore_ranges=ignore_ranges)
    script = """
        tiny = peak(lambda: count([given["tiny"]] * 500))
        huge = peak(lambda: count(given["huge"], limit=30))
        hole = peak(lambda: count(given["hole"], limit=1, select_files=lambda name: name[4] in "12"))
        print(json.dumps([tiny, huge, hole]))
    """
    hole = sparse(tmp_path / "hole.tar", [200 * MIB, 100, 100, 19 << 30])
    found = child(script, tiny=server.url("tiny.tar"), huge=server.url(huge), hole=server.url(hole))
    (tiny, shards), (large, samples), (passed, after) = found
    assert (shards, samples, after) == (500, 30, 1)
    assert tiny <= BUDGET + PART + SLACK
    assert large <= BUDGET + PART + 3 * 4 * MIB + SLACK
    assert passed <= BUDGET + PART + SLACK


def test_a_field_above_the_budget_is_held_once(child: Any, tmp_path: Path) -> None:
    """A plain loop holds three: the sample that it has, the one behind it, and the field that comes then."""
    size = 64 * MIB
    one, six = (sparse(tmp_path / f"{n}.tar", [size] * n) for n in (1, 6))
    script = 'print(json.dumps([peak(lambda: count(given["one"])), peak(lambda: count(given["six"]))]))'
    (single, _), (several, samples) = child(script, one=str(tmp_path / one), six=str(tmp_path / six))
    assert samples == 6
    assert size < single <= BUDGET + PART + size + SLACK
    assert several <= BUDGET + PART + 3 * size + SLACK


def test_a_check_for_emptiness_keeps_no_sample() -> None:
    class Sample(dict[str, Any]):
        pass

    alive: set[int] = set()

    class Told(Sample):
        def __del__(self) -> None:
            alive.discard(id(self))

    def source() -> Iterator[Sample]:
        for _ in range(3):
            sample = Told()
            alive.add(id(sample))
            yield sample
            del sample

    for sample in non_empty(source()):
        del sample
        assert len(alive) <= 1


def test_the_limit_of_a_field_is_the_users(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in ("a.tar", "b.tar")]
    for url in urls:
        fields = {"txt": b"1"}
        Path(url).write_bytes(make_shard({"0": fields, "a": fields, "b": {"bin": bytes(5000)}, "c": fields}))

    def keys(**more: Any) -> list[str]:
        return [sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False, **more)]

    assert keys(max_field_bytes=5000) == ["0", "a", "b", "c"] * 2
    with pytest.raises(FieldTooLarge, match=r"a\.tar: member 'b\.bin' at byte 2048 has 5000 bytes"):
        keys(max_field_bytes=4999)
    assert keys(max_field_bytes=4999, handler=wds.ignore_and_continue) == ["0", "a"] * 2
    assert keys(max_field_bytes=4999, select_files=lambda name: name != "b.bin") == ["0", "a", "c"] * 2
    stage = wds.tarfile_to_samples(max_field_bytes=4999)
    with pytest.raises(FieldTooLarge):
        list(stage(urls))
    with pytest.raises(ConfigError, match="max_field_bytes=0"):
        wds.WebDataset(urls, shardshuffle=False, max_field_bytes=0)


def test_a_sample_of_more_fields_than_there_may_be(tmp_path: Path) -> None:
    header, path = bytearray(tarfile.TarInfo("a.000000").tobuf(tarfile.USTAR_FORMAT)), tmp_path / "many.tar.gz"
    plain = sum(header) - sum(header[148:156]) - sum(b"000000")
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(MAX_FIELDS + 1):
            digits = b"%06d" % number
            header[2:8], header[148:156] = digits, b"%06o\0 " % (plain + sum(digits) + 8 * 32)
            file.write(header)
    with pytest.raises(ShardFormatError, match="sample 'a' has more than 100,000 fields"):
        list(wds.WebDataset(str(path), shardshuffle=False))


# ------------------------------------------------------------------ consumers and processes


@pytest.mark.parametrize(
    ("behaviour", "in_sockets"),
    [({}, 0), ({"ignore_range": True}, 16 * MIB), ({"chunked": True}, 16 * MIB)],
    ids=["ranges", "stream", "chunked"],
)
def test_a_slow_consumer_is_read_ahead_of_by_the_budget_at_most(
    origin: Origin, behaviour: dict[str, Any], in_sockets: int
) -> None:
    field, samples, budget, part = 512 * KIB, 64, 4 * MIB, 256 * KIB
    url = origin.add("x.tar", make_tar([(f"{n}.bin", bytes(field)) for n in range(samples)]))
    origin.behave(**behaviour)
    transfer = {"budget_bytes": budget, "part_bytes": part}
    taken, most = 0, 0
    for _ in itertools.islice(wds.WebDataset(url, shardshuffle=False, transfer=transfer), 24):
        taken += field + 512
        if not behaviour:
            origin.wait_until(lambda o: o.in_flight == 0)  # it has sent whatever it was asked for
            most = max(most, sum(sent.body_bytes for sent in origin.sent) - taken)
        with origin._changed:
            assert sum(sent.body_bytes for sent in origin.sent) <= taken + budget + part + field + in_sockets
    assert behaviour or most >= budget // 4  # else nothing was read ahead


def test_sixty_four_workers_share_a_host() -> None:
    for processes in (1, 8, 64, 512):
        each = default_budget_bytes(processes)
        assert processes * each <= max(3 << 30, processes * 32 * MIB)
        assert processes * each <= memory_bytes() // 8 or each == 32 * MIB


def test_sixteen_processes_at_once(child: Any, tmp_path: Path) -> None:
    path = sparse(tmp_path / "x.tar", [MIB] * 16)
    script = """
        ends = []
        for number in range(16):
            out, into = os.pipe()
            if os.fork() == 0:
                code = 1
                try:
                    os.write(into, json.dumps(peak(lambda: count(given["path"], transfer=given["transfer"]))).encode())
                    code = 0
                finally:
                    os._exit(code)
            os.close(into)
            ends.append(open(out))
        found = [json.loads(end.read()) for end in ends]
        print(json.dumps(found))
    """
    transfer = {"budget_bytes": 8 * MIB, "part_bytes": 1 * MIB}
    found = child(script, path=str(tmp_path / path), transfer=transfer)
    assert [samples for _, samples in found] == [16] * 16
    assert sum(peak for peak, _ in found) <= 16 * (8 * MIB + MIB + 3 * MIB + SLACK // 2)


def test_a_shard_that_is_held_back_is_on_the_disk_and_nowhere_after_a_kill(child: Any, tmp_path: Path) -> None:
    shard, room = tmp_path / "x.tar", tmp_path / "room"
    room.mkdir()
    sparse(shard, [MIB] * 96)
    (tmp_path / "x.tar.sha256").write_text(f"{sha256(shard.read_bytes()).hexdigest()}  x.tar\n")
    script = """
        it = iter(wds.WebDataset(given["url"], shardshuffle=False, verify="always"))
        most, sample = peak(lambda: next(it)["__key__"])
        files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        print(json.dumps([most, sample, [name for name in files if name.startswith(given["room"])]]), flush=True)
        os.kill(os.getpid(), 9)
    """
    found = child(script, environment={"TMPDIR": str(room)}, url=str(shard), room=str(room))
    peak, key, (held,) = found
    assert (key, held.endswith("(deleted)")) == ("00000", True)
    assert peak <= BUDGET + BUDGET // 4 + PART + 3 * MIB + SLACK
    assert not list(room.iterdir())


# ------------------------------------------------------------------ what inflates


def packed(kind: str, size: int) -> bytes:
    """A shard with a field of ``size`` zeros and a small one, compressed."""
    zstandard: Any = pytest.importorskip("zstandard")
    pack: Any = {
        "gz": lambda: zlib.compressobj(1, zlib.DEFLATED, 31),
        "xz": lambda: lzma.LZMACompressor(preset=0),
        "zst": lambda: zstandard.ZstdCompressor(1).compressobj(),
    }[kind]()
    info, small = tarfile.TarInfo("a.bin"), make_tar([("b.txt", b"b")])
    info.size = size
    pieces = itertools.chain([info.tobuf()], itertools.repeat(bytes(MIB), size // MIB), [small])
    return b"".join([*map(pack.compress, pieces), pack.flush()])


def test_compressed_shards_come_out_piece_by_piece(child: Any, tmp_path: Path) -> None:
    for kind in ("gz", "xz", "zst"):
        (tmp_path / f"x.tar.{kind}").write_bytes(packed(kind, 64 * MIB))
    script = """
        found = {}
        for url in given["urls"]:
            found[url[-3:]] = peak(lambda: count(url, select_files=lambda name: name == "b.txt"))
        print(json.dumps(found))
    """
    found = child(script, urls=[str(tmp_path / f"x.tar.{kind}") for kind in ("gz", "xz", "zst")])
    for kind, (peak, samples) in found.items():
        assert (samples, peak <= SLACK) == (1, True), (kind, peak)


def _npy(shape: tuple[int, ...]) -> bytes:
    head = io.BytesIO()
    writing: Any = np.lib.format
    writing.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return head.getvalue() + b"abc"


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def _jpeg(width: int, height: int) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (16, 16)).save(made, "JPEG")
    data = bytearray(made.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def _bombs() -> dict[str, tuple[str, bytes, str]]:
    """By name: the field, its bytes, and what the error says."""
    tenbin = b"f4".ljust(16, b"\0") + struct.pack("<qqq", 2, 1 << 31, 1 << 31)
    chunk = b"~TenBin~%b%b"
    return {
        "npy": ("npy", _npy((4 << 30,)), "EOF: reading array data"),
        "npy, more than there is": ("npy", _npy((1 << 46,)), "MemoryError"),
        "npy, overflow": ("npy", _npy((1 << 32, 1 << 32)), "cannot reshape"),
        "png": ("png", _png(60_000, 60_000), "DecompressionBombError"),
        "jpg": ("jpg", _jpeg(60_000, 60_000), "DecompressionBombError"),
        "pickled bytes": ("pkl", b"\x80\x04\x8e" + struct.pack("<q", 4 << 30) + b"abc.", "truncated"),
        "pickled text": ("pkl", b"\x80\x04\x8d" + struct.pack("<q", 4 << 30) + b"abc.", "truncated"),
        "pickled frame": ("pkl", b"\x80\x04\x95" + struct.pack("<q", 4 << 30) + b"abc.", "truncated"),
        "tenbin chunk": ("ten", chunk % (struct.pack("<q", 1 << 62), b""), "a chunk of 4611686018427387904 bytes"),
        "tenbin shape": (
            "ten",
            chunk % (struct.pack("<q", len(tenbin)), tenbin.ljust(64, b"\0"))
            + chunk % (struct.pack("<q", 4), bytes(4)),
            "cannot reshape",
        ),
        "cbor bytes": ("cbor", b"\x5b" + struct.pack(">Q", 4 << 30) + b"abc", "premature end"),
        "cbor array": ("cbor", b"\x9b" + struct.pack(">Q", 1 << 40) + b"abc", "premature end"),
        "cbor map": ("cbor", b"\xbb" + struct.pack(">Q", 1 << 40) + b"abc", "premature end"),
        "cbor depth": ("cbor", b"\x81" * 100_000, "depth|recursion"),
        "msgpack bytes": ("mp", b"\xc6\xff\xff\xff\xffabc", "incomplete input"),
        "msgpack array": ("mp", b"\xdd\x7f\xff\xff\xffabc", "max_array_len"),
        "json depth": ("json", b"[" * 1_000_000, "RecursionError"),
        "json number": ("json", b"9" * 1_000_000, "4300 digits"),
    }


def test_fields_that_claim_much_are_errors_in_little_memory(child: Any, tmp_path: Path) -> None:
    bombs = _bombs()
    path = tmp_path / "x.tar"
    path.write_bytes(make_shard({str(n): {field: data} for n, (field, data, _) in enumerate(bombs.values())}))
    script = """
        import cbor2, msgpack
        found = []
        for spec in ("rgb8", "pil", "torchrgb"):
            errors = []
            def handler(exn):
                errors.append([type(exn).__name__, str(exn)])
                return True
            most, n = peak(lambda: count_of(wds.WebDataset(given["path"], shardshuffle=False), spec, handler))
            found.append([most, n, errors])
        print(json.dumps(found))
    """
    counting = """
def count_of(dataset, spec, handler):
    from wds_async.autodecode import ImageHandler
    return sum(1 for _ in dataset.decode(ImageHandler(spec) if spec != "torchrgb" else "rgb8", handler=handler))
"""
    for peak, decoded, errors in child(counting + textwrap.dedent(script), path=str(path)):
        assert decoded == 0
        assert peak <= SLACK + 16 * MIB  # Pillow, and what its plug-ins load
        assert [kind for kind, _ in errors] == ["DecodingError"] * len(bombs)
        for (kind, text), (name, (_, _, said)) in zip(errors, bombs.items(), strict=True):
            assert any(word in text for word in said.split("|")), (name, kind, text)


@pytest.mark.parametrize("kind", ["npz", "pth", "json.gz"])
def test_what_is_packed_in_a_field_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, made = 3 * MIB, io.BytesIO()
    if kind == "npz":
        np.savez_compressed(made, a=np.zeros(size, np.uint8), b=np.zeros(size, np.uint8))
    elif kind == "json.gz":
        made.write(gzip.compress(b"0" + b" " * (2 * size)))
    else:
        torch = pytest.importorskip("torch")
        whole = io.BytesIO()
        torch.save(torch.zeros(2 * size, dtype=torch.uint8), whole)
        with zipfile.ZipFile(whole) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
            for info in source.infolist():
                target.writestr(info.filename, source.read(info))
    sample = {"__key__": "k", "__url__": "u", kind: made.getvalue()}
    assert len(made.getvalue()) < 64 * KIB
    Decoder([]).decode(sample)
    monkeypatch.setattr(autodecode, "MAX_UNPACKED_BYTES", 2 * size - 1)
    with pytest.raises(DecodingError, match=f"field '{kind}'.*FieldTooLarge"):
        Decoder([]).decode(sample)


# ------------------------------------------------------------------ servers


class Abuser:
    """Answers every request on a path with what ``answers[path](head)`` yields, until the client goes away."""

    def __init__(self, answers: dict[str, Callable[[bytes], Iterator[bytes]]]) -> None:
        self._answers = answers
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.base = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Abuser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for sock in (self._server, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                self._open.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            while True:
                head = b""
                while b"\r\n\r\n" not in head:
                    if not (more := sock.recv(65536)):
                        return
                    head += more
                path = head.split(b" ", 2)[1].decode()
                for piece in self._answers[path](head):
                    sock.sendall(piece)


def _abuse() -> dict[str, Callable[[bytes], Iterator[bytes]]]:
    sample = make_tar([("a.bin", bytes(60_000)), ("b.bin", bytes(60_000))])[: 2 * (512 + 60_416)]

    def forever(head: bytes, piece: bytes, *, chunked: bool = False) -> Iterator[bytes]:
        yield b"HTTP/1.1 " + head + b"\r\n\r\n"
        while True:
            yield b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece

    def ranges(head: bytes) -> Iterator[bytes]:
        span = head.lower().split(b"range: bytes=")[1].split(b"\r\n")[0]
        start, stop = int(span.split(b"-")[0]), int(span.split(b"-")[1]) + 1
        yield b'HTTP/1.1 206 OK\r\nETag: "x"\r\nContent-Length: %d\r\n' % (stop - start)
        yield b"Content-Range: bytes %d-%d/%d\r\n\r\n" % (start, stop - 1, 1 << 63)
        first = start // len(sample) * len(sample)
        whole = sample * ((stop - first) // len(sample) + 1)
        yield whole[start - first : stop - first]

    def inflates(head: bytes) -> Iterator[bytes]:
        info, pack = tarfile.TarInfo("big.skip"), zlib.compressobj(9, zlib.DEFLATED, 31)
        info.size = 96 * MIB
        pieces = itertools.chain([info.tobuf()], itertools.repeat(bytes(MIB), 96), itertools.repeat(sample))
        yield b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in pieces:
            if out := pack.compress(piece):
                yield b"%x\r\n%b\r\n" % (len(out), out)

    def interim(head: bytes) -> Iterator[bytes]:
        while True:
            yield b"HTTP/1.1 102 Processing\r\n\r\n" * 100
            threading.Event().wait(0.001)  # by aiohttp they are bounded in time only

    def slowly(head: bytes) -> Iterator[bytes]:
        for byte in itertools.chain(b"HTTP/1.1 200 OK\r\n", itertools.cycle(b"X: y\r\n")):
            yield bytes([byte])
            threading.Event().wait(0.02)

    page = b"500 Oh\r\nContent-Type: text/html\r\n"
    return {
        "/loop": lambda head: iter([b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n"]),
        "/flood": lambda head: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X-Y: z\r\n" * 100)),
        "/field": lambda head: itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], itertools.repeat(b"y" * 10_000)),
        "/interim": interim,
        "/slow": slowly,
        "/page": lambda head: forever(page + b"Content-Length: 1000000000", b"<html>" * 10_000),
        "/chunkedpage": lambda head: forever(page + b"Transfer-Encoding: chunked", b"<html>" * 10_000, chunked=True),
        "/garbage": lambda head: forever(b"200 OK\r\nTransfer-Encoding: chunked", b"<html>" * 10_000, chunked=True),
        "/ranges": ranges,
        "/length": lambda head: forever(b"200 OK\r\nContent-Length: %d" % (1 << 63), sample),
        "/chunks": lambda head: forever(b"200 OK\r\nTransfer-Encoding: chunked", sample, chunked=True),
        "/inflates": inflates,
    }


_SAID = {  # by the engine, or by aiohttp
    "/loop": "redirects in a circle",
    "/flood": "head is longer|Too many headers",
    "/field": "head is longer|Got more than 8190 bytes",
    "/interim": "head is longer|TimeoutError|timed out|no byte",
    "/slow": "head was not complete within|TimeoutError|timed out|no byte",
    "/page": "answered 500",
    "/chunkedpage": "answered 500",
    "/garbage": "looks like an HTML page",
}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "aiohttp"])
def test_servers_that_never_end(child: Any, direct: bool) -> None:
    script = """
        transfer = {
            "direct": given["direct"], "part_bytes": 1 << 18, "stall_timeout_s": 0.2, "connect_timeout_s": 0.2,
            "retry": RetryPolicy(max_attempts=2, base_s=0.001, cap_s=0.01, timeout_s=2),
        }
        from wds_async.transfer.engine import end_idle
        found = {}
        for url in given["urls"]:
            end_idle()  # it remembers that the server ignores ranges, at another path
            errors = []
            def handler(exn):
                errors.append([type(exn).__name__, str(exn)])
                return False
            def read():
                skip = lambda name: not name.endswith(".skip")
                return count(url, limit=300, transfer=transfer, handler=handler, empty_check=False, select_files=skip)
            most, n = peak(read)
            found[url] = most, n, errors
        print(json.dumps(found))
    """
    with Abuser(_abuse()) as server:
        found = child(script, urls=[server.base + path for path in _abuse()], direct=direct)
    for url, (peak, samples, errors) in found.items():
        path = url.removeprefix(server.base)
        assert peak <= BUDGET + PART + SLACK, path
        if path in _SAID:
            assert (samples, len(errors)) == (0, 1), (path, samples, errors)
            assert any(word in errors[0][1] for word in _SAID[path].split("|")), (path, errors)
        else:
            assert (samples, errors) == (300, []), (path, errors)
