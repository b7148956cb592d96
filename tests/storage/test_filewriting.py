"""Large pieces go to files in small system calls, whoever writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from wds_async.service.cache.disk import DataFile
from wds_async.service.delivery import SpillFile
from wds_async.shardcache.partial import PartialWriter
from wds_async.storage.filewriting import WRITE_BYTES, write_all
from wds_async.storage.sink import LocalSink
from wds_async.transfer.checksums import Spool

CALLS = Path("/proc/thread-self/io")
DATA = bytes(range(256)) * (8 << 12) + b"the end"  # 8 MiB and a rest


def _sink(folder: Path) -> Path:
    sink = LocalSink(str(folder / "sink.tar"))
    sink.write(b"a head, ")
    sink.write(DATA)
    sink.commit()
    return folder / "sink.tar"


def _shard(folder: Path) -> Path:
    filling = PartialWriter.begin(folder, "shard.tar")
    assert filling is not None
    filling.write(memoryview(b"a head, "))
    filling.write(memoryview(DATA))
    return filling.publish()


def _chunk(folder: Path) -> Path:
    file = DataFile(folder / "chunk", create=True)
    file.write(0, memoryview(b"a head, "))
    file.write(8, memoryview(DATA))
    file.close()
    return folder / "chunk"


def _spool(folder: Path) -> Path:
    spool = Spool(8, str(folder))
    spool.write(memoryview(b"a head, "))
    spool.write(memoryview(DATA))
    pieces = []
    while (piece := spool.read()) is not None:
        pieces.append(bytes(piece))
    (folder / "spool").write_bytes(b"".join(pieces))
    spool.clear()
    return folder / "spool"


def _spill(folder: Path) -> Path:
    spill = SpillFile(str(folder))
    found = spill.put(memoryview(b"a head, " + DATA))
    with open(found.fd, "rb", closefd=False) as file:
        (folder / "spill").write_bytes(file.read())
    spill.close()
    return folder / "spill"


@pytest.mark.skipif(not CALLS.exists(), reason="only Linux counts system calls")
@pytest.mark.parametrize("write", [_sink, _shard, _chunk, _spool, _spill])
def test_a_large_piece_is_written_in_small_calls(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    before = _calls()
    path = write(tmp_path)
    assert _calls() - before >= len(DATA) // WRITE_BYTES
    assert path.read_bytes() == b"a head, " + DATA


def test_it_writes_where_the_file_stands_or_at_an_offset(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        write_all(file.fileno(), memoryview(DATA))
        write_all(file.fileno(), memoryview(b"x" * (WRITE_BYTES + 1)), 3)
        write_all(file.fileno(), memoryview(b"!"))
        write_all(file.fileno(), memoryview(b""))
    assert (tmp_path / "file").read_bytes() == DATA[:3] + b"x" * (WRITE_BYTES + 1) + DATA[WRITE_BYTES + 4 :] + b"!"


def _calls() -> int:
    fields = dict(line.split(": ") for line in CALLS.read_text().splitlines())
    return int(fields["syscw"])
