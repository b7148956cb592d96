"""The service's log: its two forms, fields, levels, and what it must never show."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest

from wds_async.config import configure_logging
from wds_async.errors import ConfigError
from wds_async.service import logs

logger = logging.getLogger("wds_async")


def lines(form: str) -> io.StringIO:
    out = io.StringIO()
    logs.configure(form, out)
    return out


@pytest.mark.parametrize("name", ["asyncio", "aiohttp.server"])
def test_what_libraries_warn_of_has_the_same_form(name: str) -> None:
    out = lines("json")
    logging.getLogger(name).warning("socket.send() raised exception.")
    assert json.loads(out.getvalue())["logger"] == name


def test_people_get_a_short_line() -> None:
    out = lines("human")
    logging.getLogger("wds_async.audit").warning("refused %s", "it", extra={"client": "job-1", "audit": {"a": 1}})
    logger.info("listening")
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} warning audit: refused it  client=job-1", first)
    assert second.endswith(" info: listening")


@pytest.mark.parametrize("form", ["human", "json"])
def test_what_a_library_adds_to_every_record_is_not_shown(form: str) -> None:
    """Ray has a factory of its own once it was imported, also in a process that reads no more by it."""
    out, former = lines(form), logging.getLogRecordFactory()

    def stamped(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = former(*args, **kwargs)
        record.__dict__["_ray_timestamp_ns"] = 17
        return record

    logging.setLogRecordFactory(stamped)
    try:
        logger.info("listening", extra={"port": 1})
    finally:
        logging.setLogRecordFactory(former)
    said = out.getvalue()
    assert "port" in said
    assert "ray" not in said


def test_machines_get_an_object_a_line() -> None:
    out = lines("json")
    audit = {"status": 403, "path": "/x?token=geheim", "peers": ["a", 1, None]}
    logger.info(
        "over\ntwo lines", extra={"bytes": 7, "time": "theirs", "audit": audit, "ratio": 0.5, "kind": Exception}
    )
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("info", "wds_async", "over\\ntwo lines")
    assert (said["bytes"], said["ratio"], said["time_"]) == (7, 0.5, "theirs")
    assert said["audit"] == {"status": 403, "path": "/x?token=***", "peers": ["a", 1, None]}
    assert isinstance(said["time"], float)
    assert said["kind"] == "<class 'Exception'>"


@pytest.mark.parametrize("form", ["human", "json"])
def test_no_secret_is_shown(form: str) -> None:
    out = lines(form)
    url = "https://me:geheim@host/x?X-Amz-Signature=geheim"
    try:
        raise RuntimeError(url)
    except RuntimeError:
        logger.exception("failed: %s", url, extra={"url": url})
    logger.error("Authorization: Bearer geheim")
    said = out.getvalue()
    assert "geheim" not in said
    assert said.count("https://me:***@host/x?X-Amz-Signature=***") == 3
    assert "RuntimeError" in said
    if form == "json":
        assert "Traceback" in json.loads(said.splitlines()[0])["error"]


def test_levels(monkeypatch: Any) -> None:
    out = lines("human")
    logger.debug("access")
    assert out.getvalue() == ""
    monkeypatch.setenv("WDS_LOG", "debug")
    out = lines("human")
    logger.debug("access")
    assert "access" in out.getvalue()
    monkeypatch.setenv("WDS_LOG", "error")
    out = lines("json")
    logger.warning("no")
    assert out.getvalue() == ""


def test_no_line_is_written_twice(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("WDS_LOG", "info")
    logger.handlers[:], logger.propagate = [], False
    configure_logging()  # as any command does
    lines("json")
    out = lines("human")
    logger.warning("one")
    assert len(out.getvalue().splitlines()) == 1
    assert capsys.readouterr().err == ""
    logs.configure("json")
    logger.warning("two")
    assert json.loads(capsys.readouterr().err)["message"] == "two"


def test_what_there_is_not(monkeypatch: Any) -> None:
    monkeypatch.setenv("WDS_LOG", "loud")
    with pytest.raises(ConfigError, match="'loud' is not a level"):
        logs.configure()


def test_a_reader_that_has_gone_ends_nothing(capsys: Any) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logs.configure("human", Closed())
    logger.warning("into the void")
    assert capsys.readouterr().err == ""
