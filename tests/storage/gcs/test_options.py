"""gcsfs's options, by name."""

from __future__ import annotations

import pytest

from wds_async.errors import ConfigError
from wds_async.storage.gcs.backend import check_options


def test_names() -> None:
    check_options({"token": "anon", "requester_pays": True, "session_kwargs": {}, "endpoint_url": "http://h:1"})
    with pytest.raises(ConfigError, match=r"tokn means nothing here; did you mean token\?") as caught:
        check_options({"tokn": "hush"})
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="write https://host"):
        check_options({"endpoint_url": "x"})


def test_all_that_gcsfs_names_is_known() -> None:
    inspect, core = pytest.importorskip("inspect"), pytest.importorskip("gcsfs.core")
    check_options(dict.fromkeys(set(inspect.signature(core.GCSFileSystem.__init__).parameters) - {"self", "kwargs"}))
