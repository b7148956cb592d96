"""Conversions in this process, and what they read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.tools.convert import convert_shards

JPEG = b"\xff\xd8\xff" + bytes(range(256)) * 300


def convert(inputs: Any, output: str, **how: Any) -> Any:
    return convert_shards(inputs, output, engine=InlineEngine(), attempts=1, **how).run()


def write_tar(name: str, samples: int = 5, **more: bytes) -> bytes:
    with wds.TarWriter(name, mtime=0) as sink:
        for n in range(samples):
            fields = {
                "cls": str(n - 2).encode(),
                "json": b'{"n": 1}',
                "jpg": JPEG,
                "seg.png": b"x",
                "txt": "ü".encode(),
            }
            sink.write({"__key__": f"ä/{n}", **fields, **more})
    return Path(name).read_bytes()


def samples(name: str) -> list[dict[str, Any]]:
    made = [dict(one) for one in wds.WebDataset(name, shardshuffle=False)]
    return [{name: value for name, value in one.items() if name == "__key__" or name[:2] != "__"} for one in made]
