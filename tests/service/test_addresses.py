"""Addresses: what kind each is, however it is written, and who may go there."""

from __future__ import annotations

import pytest

from wds_async.service.allowlist import Addresses, is_literal, kind_of_address


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16", "192.0.0.192",
     "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe",
     "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::1", "::169.254.169.254", "64:ff9b:1::a9fe:a9fe",
     "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "no address", "", "2130706433"],
)  # fmt: skip
def test_never(address: str) -> None:
    assert kind_of_address(address) == "never"
    assert Addresses([], private=True).why_not("host", address)
    assert Addresses(["169.254.169.254"]).why_not(address, address), "not even where it is named"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1",
     "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "64:ff9b::10.0.0.1", "2002:7f00:1::", "::127.0.0.1"],
)  # fmt: skip
def test_private(address: str) -> None:
    assert kind_of_address(address) == "private"
    named = Addresses(["Data.Example."])
    assert "private" in named.why_not("data.example", address)
    assert Addresses(["data.example"], private=True).why_not("data.example", address) == ""
    assert named.why_not("minio", address) == "", "an endpoint that the operator set"


@pytest.mark.parametrize("address", ["1.1.1.1", "142.250.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"])
def test_public(address: str) -> None:
    assert kind_of_address(address) == "public"
    assert Addresses(["data.example"]).why_not("data.example", address) == ""


def test_an_address_that_is_named_is_meant() -> None:
    named = Addresses(["10.0.0.5", "localhost"])
    assert named.why_not("10.0.0.5", "10.0.0.5") == ""
    assert named.why_not("localhost", "127.0.0.1") == ""
    assert is_literal("[::1]")
    assert is_literal("LOCALHOST.")
    assert not is_literal("localhost.evil.com")
    assert not is_literal("127.0.0.1.nip.io")
