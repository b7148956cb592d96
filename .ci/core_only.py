"""What a core-only install must do: write a shard, read it back from a file and over HTTP, without any extra."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import tempfile
import threading
from pathlib import Path

for absent in ("torch", "s3fs", "gcsfs", "adlfs", "huggingface_hub", "PIL", "webdataset"):
    assert importlib.util.find_spec(absent) is None, f"{absent} is installed: this is no core-only environment"

import wds_async as wds  # noqa: E402

ITEMS = [{"__key__": f"{n:04d}", "cls": n % 10, "txt": f"sample {n}", "json": {"n": n}} for n in range(100)]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Knows no ranges, and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def read(url: str) -> None:
    got = [
        {field: value for field, value in sample.items() if field not in ("__url__", "__local_path__")}
        for sample in wds.WebDataset(url, shardshuffle=False).decode()
    ]
    assert got == ITEMS, f"{url}: {got[:2]}"
    print(f"{url}: {len(got)} samples")


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "shard.tar"
    with wds.TarWriter(str(path)) as sink:
        for item in ITEMS:
            sink.write(item)
    read(str(path))
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            read(f"http://127.0.0.1:{server.server_address[1]}/shard.tar")
        finally:
            server.shutdown()
print("core-only: ok")
