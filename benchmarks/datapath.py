"""nginx as the data path of each cloud: reading an object is an HTTP GET, whatever signs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import Corpus

__all__ = ["BUCKET", "MODULES", "STORES", "DataPath", "directives", "prepare"]

BUCKET = "bench"
MODULES = ("headers_more_filter",)
"""Of nginx: Azure's client asks for ranges by a header of its own."""
_ACCOUNT = "devstoreaccount1"


@dataclass(frozen=True, slots=True)
class DataPath:
    """One store: its URL of a shard by name, and the environment that leads it to a server."""

    scheme: str
    environment: Callable[[str], dict[str, str]]

    def urls(self, corpus: Corpus) -> list[str]:
        """The corpus in the bucket that nginx stands for."""
        return [f"{self.scheme}://{BUCKET}/{name}" for name in corpus.names]


def _s3(base: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": base,
        "AWS_ACCESS_KEY_ID": "AKIABENCHMARK",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _gs(base: str) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": base}


def _az(base: str) -> dict[str, str]:
    key = "bm90LWEtc2VjcmV0"
    endpoint = f"BlobEndpoint={base}/{_ACCOUNT}"
    account = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key}"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{endpoint}"}


STORES = {"s3": DataPath("s3", _s3), "gs": DataPath("gs", _gs), "az": DataPath("az", _az)}


def prepare(root: Path, corpus: Corpus) -> None:
    """Make the folders that the stores' paths lead to, and Google's metadata of each object as a file."""
    (root / BUCKET).mkdir()
    (root / _ACCOUNT).symlink_to(root)
    metadata = root / "metadata"
    metadata.mkdir()
    for name in dict.fromkeys(corpus.names):
        (root / BUCKET / name).symlink_to(root / name)
        size = (root / name).stat().st_size
        item = {"name": name, "bucket": BUCKET, "size": str(size), "generation": "1", "etag": f"{name}=", "updated": ""}
        (metadata / name).write_text(json.dumps({**item, "updated": "2026-01-01T00:00:00Z"}), encoding="utf-8")


def directives(root: Path) -> str:
    """What nginx's ``server`` block needs beside the files: Google's paths, and Azure's header for the HEAD."""
    return f"""
        location ~ ^/download/storage/v1/b/{BUCKET}/o/(?<object>[^/]+)$ {{ alias {root}/$object; }}
        location ~ ^/storage/v1/b/{BUCKET}/o/(?<object>[^/]+)$ {{
            default_type application/json;
            alias {root}/metadata/$object;
            if ($arg_alt = media) {{ rewrite ^ /{BUCKET}/$object last; }}
        }}
        location /{_ACCOUNT}/ {{
            add_header x-ms-blob-type BlockBlob;
            add_header x-ms-version 2021-08-06;
            set $wanted $http_range;
            if ($http_x_ms_range) {{ set $wanted $http_x_ms_range; }}
            more_set_input_headers "Range: $wanted";
        }}
    """
