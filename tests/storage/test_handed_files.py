"""Files that are open already; how they are asked for and read is in ``ais/test_handed.py``."""

from __future__ import annotations

import os

import pytest

from wds_async.storage.handed_files import Descriptor, HandedFile


def opened() -> int:
    one, other = os.pipe()
    os.close(other)
    return one


def test_a_descriptor_is_closed_once() -> None:
    descriptor = Descriptor(opened())
    descriptor.close()
    again = os.open("/dev/null", os.O_RDONLY)  # may well have the same number
    descriptor.close()
    del descriptor
    os.fstat(again)
    os.close(again)


def test_it_is_open_as_long_as_its_file_is_known() -> None:
    fd = opened()
    file = HandedFile("s3://b/x", 0, "e", Descriptor(fd), {}, lambda: None)
    os.fstat(fd)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
