"""wds_async.handlers: go on, stop, or raise; silently or with a warning."""

from __future__ import annotations

import pickle

import pytest

from wds_async import handlers

ERROR = ValueError("shard 7 is bad")


@pytest.mark.parametrize(("name", "goes_on"), [("warn_and_continue", True), ("warn_and_stop", False)])
def test_warning_tells_the_error_and_where(name: str, goes_on: bool) -> None:
    with pytest.warns(UserWarning, match="ValueError.*shard 7 is bad") as record:
        assert getattr(handlers, name)(ERROR) is goes_on
    assert len(record) == 1
    assert record[0].filename == __file__


@pytest.mark.parametrize("name", [n for n in handlers.__all__ if n not in ("Handler", "check_handler")])
def test_handlers_pickle_by_name(name: str) -> None:
    handler = getattr(handlers, name)
    assert pickle.loads(pickle.dumps(handler)) is handler


@pytest.mark.parametrize("given", ["warn", 3, True])
def test_what_is_no_handler_is_told_before_it_is_needed(given: object) -> None:
    from wds_async.dataset import WebDataset
    from wds_async.errors import ConfigError
    from wds_async.filters import map, select

    for make in (
        lambda: WebDataset("x.tar", handler=given),
        lambda: map(str, handler=given),
        lambda: select(bool, handler=given),
    ):
        with pytest.raises(ConfigError, match="handler="):
            make()


def test_a_recorder_tells_what_passed() -> None:
    told: list[tuple[Exception, object]] = []
    recorder = handlers.Recorder(handlers.ignore_and_stop, lambda exn, sample: told.append((exn, sample)))
    error = ValueError()
    assert handlers.passed(recorder, error, "sample") is False
    assert recorder(error) is False
    assert told == [(error, "sample"), (error, None)]
    raising = handlers.Recorder(handlers.reraise_exception, lambda exn, sample: told.append((exn, sample)))
    with pytest.raises(ValueError):
        handlers.passed(raising, error, "sample")
    assert len(told) == 2
    assert handlers.passed(handlers.ignore_and_continue, error, "sample") is True
