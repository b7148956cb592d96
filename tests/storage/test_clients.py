"""What is imported before workers are forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch.utils.data
import wds_async as wds
before = set(sys.modules)
wds.WebDataset({url!r}, shardshuffle=False)
print(*(name for name in ({names}) if name in sys.modules and name not in before))
"""


@pytest.mark.parametrize(
    ("url", "imported"),
    [
        ("s3://b/x.tar", "s3fs"),
        ("s3a://b/x.tar", "s3fs"),
        ("gs://b/x.tar", "google.oauth2.service_account"),
        ("az://c/x.tar", "azure.storage.blob.aio"),
        ("http://h/x.tar", ""),
        ("x.tar", ""),
        ("nosuch://x.tar", ""),
    ],
)
def test_what_the_workers_will_need_is_there_before_they_are(url: str, imported: str) -> None:
    names = "'s3fs', 'google.oauth2.service_account', 'azure.storage.blob.aio'"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(url=url, names=names)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == imported


def test_nothing_is_imported_where_no_workers_are_to_come() -> None:
    script = SCRIPT.format(url="s3://b/x.tar", names="'s3fs',").replace("import torch.utils.data\n", "")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
