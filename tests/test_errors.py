"""wds_async.errors: one tree, every error pickles, and each is also what a caller would expect."""

from __future__ import annotations

import copy
import pickle
import re
import tarfile

import pytest

from wds_async import errors
from wds_async.errors import WdsError

CLASSES = [getattr(errors, name) for name in errors.__all__]
EXPECTED: dict[str, type[BaseException]] = {
    "AccessDenied": PermissionError,
    "ConfigError": ValueError,
    "CorruptShard": tarfile.ReadError,
    "FetchTimeout": TimeoutError,
    "MissingExtra": ImportError,
    "NotATar": tarfile.ReadError,
    "ReaderClosed": RuntimeError,
    "ShardFormatError": ValueError,
    "ShardNotFound": FileNotFoundError,
    "StorageError": OSError,
    "TransferError": ConnectionError,
    "TruncatedShard": tarfile.ReadError,
    "UnsafeContent": ValueError,
    "UrlError": ValueError,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_made_of_one_string_and_pickles(kind: type[WdsError]) -> None:
    error = kind("gs://b/x.tar: at byte 512")
    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "gs://b/x.tar: at byte 512"
        assert twin.args == ("gs://b/x.tar: at byte 512",)


@pytest.mark.parametrize("name", EXPECTED)
def test_errors_are_the_builtin_that_a_caller_expects(name: str) -> None:
    with pytest.raises(EXPECTED[name], match="here"):
        raise getattr(errors, name)("here")


def test_the_drawing_shows_the_real_parents() -> None:
    assert errors.__doc__ is not None
    path: list[str] = ["WdsError"]
    drawn = re.findall(r"^((?:[│ ]   )*)[├└]── (\w+)", errors.__doc__, re.MULTILINE)
    assert len(drawn) == len(CLASSES) - 1
    for indent, name in drawn:
        depth = len(indent) // 4  # the drawing itself is indented once
        path[depth:] = [name]
        assert issubclass(getattr(errors, name), getattr(errors, path[depth - 1])), (name, path)


def test_attributes_survive_pickling() -> None:
    error = errors.TransferError("text")
    error.__dict__["note"] = 3
    assert vars(pickle.loads(pickle.dumps(error)))["note"] == 3
