"""What s3fs is told beside the program's options."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.servers import Origin
from tests.servers.moto import clean_aws as clean_aws_fixture
from wds_async.storage.filesystems import Filesystems
from wds_async.storage.options import Options
from wds_async.storage.s3.options import s3fs_options, tried_once, with_patience, with_region

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


def test_requests_are_tried_once_unless_the_program_says_otherwise() -> None:
    assert tried_once({})["config_kwargs"]["retries"]["total_max_attempts"] == 1
    given = {"key": "k", "config_kwargs": {"retries": {"max_attempts": 7}, "signature_version": "s3v4"}}
    assert tried_once(given) == given


def test_patience_is_the_engines_unless_the_program_says_otherwise() -> None:
    assert with_patience({"key": "k"}, 1.0, 2.0)["config_kwargs"] == {"connect_timeout": 1.0, "read_timeout": 2.0}
    given = with_patience({"config_kwargs": {"read_timeout": 90, "signature_version": "s3v4"}}, 1.0, 2.0)
    assert given["config_kwargs"] == {"connect_timeout": 1.0, "read_timeout": 90, "signature_version": "s3v4"}
