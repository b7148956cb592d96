"""What s3fs is told beside the program's options."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.servers import Origin
from tests.servers.moto import clean_aws as clean_aws_fixture
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.options import Options
from wds_async.storage.s3.options import s3fs_options, with_limits, with_region

clean_aws = clean_aws_fixture


def test_the_region_of_amazons_other_tools(clean_aws: pytest.MonkeyPatch) -> None:
    assert with_region({"key": "k"}) == {"key": "k"}
    clean_aws.setenv("AWS_REGION", "eu-west-3")
    assert with_region({"client_kwargs": {"verify": False}}) == {
        "client_kwargs": {"region_name": "eu-west-3", "verify": False}
    }
    assert with_region({"client_kwargs": {"region_name": "x"}}) == {"client_kwargs": {"region_name": "x"}}
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert with_region({}) == {}


def test_the_programs_own_client_settings_stay(clean_aws: pytest.MonkeyPatch) -> None:
    given = s3fs_options({"config_kwargs": {"read_timeout": 5}})["config_kwargs"]
    assert given["read_timeout"] == 5
    assert given["http_session_cls"] is s3fs_options({})["config_kwargs"]["http_session_cls"]
    assert s3fs_options({"config_kwargs": {"http_session_cls": socket}})["config_kwargs"]["http_session_cls"] is socket


def test_no_redirect_takes_the_token_along(origin: Origin, clean_aws: pytest.MonkeyPatch) -> None:
    options = Options({"key": "AKIAEXAMPLE", "secret": "s", "token": "the-session", "endpoint_url": origin.base})
    clean_aws.setenv("AWS_MAX_ATTEMPTS", "1")
    with Origin() as other:
        origin.behave(status=308, redirect=other.url("elsewhere"))

        async def read() -> None:
            filesystems = Filesystems(asyncio.to_thread, options)
            try:
                await (await filesystems.ranges("s3://bucket/x.tar")).read(0, 10)
            finally:
                await filesystems.close()

        with pytest.raises(OSError):
            asyncio.run(read())
        assert any(request.headers.get("x-amz-security-token") == "the-session" for request in origin.requests)
        assert other.requests == []


def test_limits_are_the_engines_unless_the_program_sets_them() -> None:
    config = with_limits({"key": "k"}, 1.0, 2.0)["config_kwargs"]
    assert (config["retries"]["total_max_attempts"], config["connect_timeout"], config["read_timeout"]) == (1, 1.0, 2.0)
    own = {"retries": {"max_attempts": 7}, "read_timeout": 90, "signature_version": "s3v4"}
    assert with_limits({"config_kwargs": own}, 1.0, 2.0)["config_kwargs"] == {**own, "connect_timeout": 1.0}
