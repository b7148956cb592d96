"""What may be read: decided after rewriting, the same whatever spelling a place is given, and by address."""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.errors import AccessDenied, ConfigError, UrlError
from wds_async.service import allowlist
from wds_async.service.allowlist import Allowed, dotted, is_literal, kind_of_address, url_prefix
from wds_async.service.config import ServiceConfig
from wds_async.service.names import ObjectName, name_of
from wds_async.service.refusals import Refusal


def covers(entry: str, url: str) -> bool:
    return url_prefix(entry).covers(url_prefix(url))


@pytest.mark.parametrize(
    ("entry", "url"),
    [("gs://bucket/", "gs://bucket/a/b"), ("gs://bucket", "gs://bucket/a"), ("GS://bucket/", "gcs://bucket/a"),
     ("s3://bucket/", "s3a://bucket//a"), ("gs://bucket/data", "gs://bucket/data"),
     ("gs://bucket/data", "gs://bucket/data/x"), ("gs://bucket/data/", "gs://bucket/data/"),
     ("gs://bucket/data/", "gs://bucket/data/x"), ("https://host/", "HTTPS://HOST/x"),
     ("https://host", "https://host:443/x"), ("https://host./data/", "https://host/data/x"),
     ("https://host/data/", "https://host/d%61ta/x?q=../.."), ("https://host/", "https://host/a%2Fb"),
     ("http://[::1]:8080/", "http://[::1]:8080/x"), ("hf://datasets/owner/", "hf://datasets/owner/name@main/x"),
     ("hf://datasets/owner/name/", "hf://datasets/owner/name@refs%2Fpr%2F1/x"),
     ("hf://owner/name", "hf://models/owner/name/x"), ("ais://@#ns/bucket/", "ais://@#ns/bucket/x")],
)  # fmt: skip
def test_covered(entry: str, url: str) -> None:
    assert covers(entry, url)


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("gs://bucket", "gs://bucket-evil/a"),
        ("gs://bucket/", "gs://Bucket/a"),
        ("gs://bucket/", "s3://bucket/a"),
        ("gs://bucket/data", "gs://bucket/database"),
        ("gs://bucket/data/", "gs://bucket/data"),
        ("gs://bucket/data/", "gs://bucket//data/x"),
        ("gs://bucket/data/", "gs://bucket/%64ata/x"),  # in a store's key that is another name
        ("https://host/data", "https://host/database"),
        ("https://host/data/", "https://host/data%2Fx"),
        ("https://host/data/", "https://host/data/%2Fx"),
        ("https://host/data/", "https://host/data/%252Fx"),
        ("https://host/data/", "https://host/data/a%5Cb"),
        ("https://host/", "https://host.evil/"),
        ("https://host/", "https://host@evil/"),
        ("https://host/", "https://evil#@host/"),
        ("https://host/", "https://evil?@host/"),
        ("https://host/", "http://host/"),
        ("https://host/", "https://host:8443/"),
        ("hf://datasets/owner/name@main/", "hf://datasets/owner/name@other/x"),
        ("hf://datasets/owner/name/", "hf://datasets/owner/name2@main/x"),
    ],
)
def test_not_covered(entry: str, url: str) -> None:
    assert not covers(entry, url)


@pytest.mark.parametrize(
    "url",
    ["https://ho\\st/", "https://h\u00f6st/", "https://host:0/", "https:///x", "https://ho_st%2f/", "https://a b/",
     "zip://x::s3://b/y", "/data/x", "https://[::1/"],
)  # fmt: skip
def test_what_cannot_be_taken_apart(url: str) -> None:
    with pytest.raises(UrlError):
        url_prefix(url)


@pytest.mark.parametrize(
    "url",
    ["https://h/a/../b", "https://h/..", "https://h/a/./b", "https://h/%2e%2e/b", "https://h/a/%2E./b",
     "https://h/a/%252e%252e/b", "https://h/a%2f..%2fb", "https://h/a\\..\\b", "https://h/..;x/b", "https://h/a/..%3bx",
     "/data/../etc", "/data/x://../y", "az://c/a/../b", "s3://b/a?/../x"],
)  # fmt: skip
def test_dots_in_every_spelling(url: str) -> None:
    assert dotted(url)


@pytest.mark.parametrize(
    "url", ["https://h/a..b/...", "https://h/.hidden/x", "https://h/x?y=/../z", "/data/..x", "https://h/a/b.#/../c"]
)
def test_what_only_looks_like_dots(url: str) -> None:
    assert not dotted(url)


def addresses(*named: str, private: bool = False) -> Callable[[str, str], str]:
    """The judge of addresses where web servers are ``named``."""
    return lambda host, address: allowlist.why_not(host, address, frozenset(named), private=private)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16", "192.0.0.192",
     "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe",
     "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::1", "::169.254.169.254", "64:ff9b:1::a9fe:a9fe",
     "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "no address", "", "2130706433"],
)  # fmt: skip
def test_never(address: str) -> None:
    assert kind_of_address(address) == "never"
    assert addresses(private=True)("host", address)
    assert addresses("169.254.169.254")(address, address), "not even where it is named"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1",
     "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "64:ff9b::10.0.0.1", "2002:7f00:1::", "::127.0.0.1"],
)  # fmt: skip
def test_private(address: str) -> None:
    assert kind_of_address(address) == "private"
    named = addresses("data.example")
    assert "private" in named("data.example", address)
    assert addresses("data.example", private=True)("data.example", address) == ""
    assert named("minio", address) == "", "an endpoint that the operator set"


@pytest.mark.parametrize("address", ["1.1.1.1", "142.250.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"])
def test_public(address: str) -> None:
    assert kind_of_address(address) == "public"
    assert addresses("data.example")("data.example", address) == ""


def test_an_address_that_is_named_is_meant() -> None:
    named = addresses("10.0.0.5", "localhost")
    assert named("10.0.0.5", "10.0.0.5") == ""
    assert named("localhost", "127.0.0.1") == ""
    assert is_literal("[::1]")
    assert is_literal("LOCALHOST.")
    assert not is_literal("localhost.evil.com")
    assert not is_literal("127.0.0.1.nip.io")


def rules(*allow: str, **more: object) -> Allowed:
    return Allowed(ServiceConfig(allow=allow, **more))  # type: ignore[arg-type]


def by_url(url: str) -> ObjectName:
    return ObjectName(url, "ht", "", "", "url")


def by_name(url: str) -> ObjectName:
    return ObjectName(url, "", "", "", "short")


def refused(allowed: Allowed, named: ObjectName) -> Refusal:
    with pytest.raises(Refusal) as caught:
        allowed.locate(named)
    assert caught.value.status in (400, 403)
    assert not allowed.known(named)
    return caught.value


def lets(allowed: Allowed, named: ObjectName) -> bool:
    try:
        allowed.locate(named)
    except Refusal:
        return False
    return True


def test_what_is_allowed_is_known_from_then_on() -> None:
    allowed, named = rules("gs://bucket/data/"), by_name("gs://bucket/data/x.tar")
    assert not allowed.known(named)
    place = allowed.locate(named)
    assert (place.kind, place.target) == ("gcs", "gs://bucket/data/x.tar")
    assert allowed.known(named)
    assert not allowed.known(by_url(named.url)), "by /url it was not asked for yet"


@pytest.mark.parametrize(
    "url",
    ["https://allowed@evil/x", "https://allowed.evil/x", "https://allowed:443@evil/x",
     "https://evil/https://allowed/x", "https://allowed:8443/x", "http://allowed/x", "https://allowed\\@evil/x",
     "https://evil\\.allowed/x", "https://allowed/../x", "https://allowed/a/%2e%2e/%2e%2e/x",
     "https://allowed/a/%252e%252e/x", "https://allowed/..%2fx", "https://allowed/a/..;x/b"],
)  # fmt: skip
def test_tricks_with_hosts_and_paths(url: str) -> None:
    refused(rules("https://allowed/"), by_url(url))


_SPELLED = st.sampled_from("/.%\\;ab2eEfF5cC?#@:")


@given(st.text(_SPELLED, max_size=24))
def test_no_spelling_leads_out_of_a_folder(path: str) -> None:
    """However a server decodes and joins the path that was let pass, it stays below the folder."""
    url = "https://host/data/" + path
    if not lets(ALLOWED_FOLDER, by_url(url)):
        return
    seen = urllib.parse.urlsplit(url).path
    for _ in range(4):
        steps: list[str] = []
        for step in seen.replace("\\", "/").split("/"):
            plain = step.partition(";")[0]
            if plain == "..":
                del steps[-1:]
            elif plain not in ("", "."):
                steps.append(plain)
        assert steps[:1] == ["data"], (url, seen)
        seen = urllib.parse.unquote(seen, errors="surrogateescape")


ALLOWED_FOLDER = rules("https://host/data/")


@given(st.sampled_from(["https://host/data/x", "https://host/other/x", "https://evil/data/x"]), st.data())
def test_spellings_of_one_url_are_judged_alike(url: str, data: st.DataObject) -> None:
    plain = lets(ALLOWED_FOLDER, by_url(url))
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    letters = st.sampled_from([str.upper, str.lower])
    scheme = "".join(data.draw(letters)(c) for c in scheme)
    host = "".join(data.draw(letters)(c) for c in host) + data.draw(st.sampled_from(["", ".", ":443", ":0443"]))
    path = "".join(f"%{ord(c):02x}" if c != "/" and data.draw(st.booleans()) else c for c in path)
    assert lets(ALLOWED_FOLDER, by_url(f"{scheme}://{host}/{path}")) == plain


def test_dots_are_names_only_where_everybody_takes_them_so() -> None:
    assert lets(rules("gs://bucket/data/"), by_name("gs://bucket/data/../x"))  # escaped whole on the wire
    for scheme in ("s3", "az", "ais"):
        assert not lets(rules(f"{scheme}://bucket/data/"), by_name(f"{scheme}://bucket/data/../x"))
    assert not lets(rules("hf://datasets/o/n/"), by_name("hf://datasets/o/n/../x"))
    assert lets(rules(), by_name("s3://bucket/a/../x")), "all buckets may be read: nothing to break out of"
    assert not lets(rules(), by_name("az://bucket/../x"))


def test_without_allow_clouds_only() -> None:
    allowed = rules()
    for url in ("s3://b/x", "gs://b/x", "az://b/x"):
        assert lets(allowed, by_name(url))
    for url in ("https://host/x", "/etc/passwd", "file:///etc/passwd", "pipe:cat x", "-", "zip://x::https://host/y"):
        assert not lets(allowed, by_name(url)), url
    assert "off" in refused(allowed, by_url("s3://b/x")).message
    refused(rules("s3://b/", urls=False), by_url("s3://b/x"))
    assert lets(rules("s3://b/"), by_url("s3://b/x"))


def test_rules_apply_to_what_rewriting_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"")
    monkeypatch.setenv("WDS_REWRITE", f"gs://web/=https://mirror/data/;gs://disk/={tmp_path}/;gs://cmd/=pipe:cat /d/")
    for bucket in ("web", "disk", "cmd"):
        refused(rules("gs://web/", "gs://disk/", "gs://cmd/"), by_name(f"gs://{bucket}/x.tar"))
    web, disk = rules("https://mirror/data/"), rules(f"{tmp_path}/")
    assert web.locate(by_name("gs://web/x.tar")).target == "https://mirror/data/x.tar"
    refused(web, by_name("gs://web/../../x"))
    assert disk.locate(by_name("gs://disk/x.tar")).kind == "local"
    refused(disk, by_name("gs://disk/../x"))
    # Without allow, the operator's rule says where: but not to files and commands.
    assert rules().locate(by_name("gs://web/x.tar")).kind == "http"
    refused(rules(), by_name("gs://disk/x.tar"))
    refused(rules(), by_name("gs://cmd/x.tar"))


def test_commands_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "gs://near/=pipe:fetch s3://data/;gs://far/=pipe:ssh host fetch s3://data/")
    for allowed in (rules(), rules("s3://data/", "gs://near/", "gs://far/")):
        for name in ("gs://near/x.tar", "gs://far/x.tar", "pipe:fetch s3://data/x.tar", "-"):
            refused(allowed, by_name(name))


def test_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "shards", tmp_path / "shards-evil"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "x.tar").write_bytes(b"x")
    (inside / "out").symlink_to(outside)
    (inside / "in").symlink_to(inside / "x.tar")
    (tmp_path / "door").symlink_to(inside)
    allowed = rules(f"{inside}/")
    assert allowed.locate(by_name(f"{inside}/x.tar")).kind == "local"
    assert allowed.locate(by_name(f"file://{inside}/x.tar")).kind == "local"
    assert lets(allowed, by_name(f"{inside}/in"))
    assert lets(allowed, by_name(f"{inside}/not there.tar"))
    assert lets(allowed, by_name(f"{tmp_path}/door/x.tar")), "another way to the same file"
    assert lets(rules(f"{tmp_path}/door/"), by_name(f"{inside}/x.tar"))
    assert lets(rules(f"{inside}/x.tar"), by_name(f"{inside}/x.tar"))
    for path in (
        f"{outside}/x.tar",
        f"{inside}/out/x.tar",
        f"{inside}/../shards-evil/x.tar",
        f"{inside}",
        f"file://{inside}/%2e%2e/shards-evil/x.tar",
        f"file://{inside}/..%2fshards-evil/x.tar",
        f"{inside}/a\\..\\..\\shards-evil/x.tar",
        "shards/x.tar",
        "./x.tar",
    ):
        assert not lets(allowed, by_name(path)), path
    assert not lets(allowed, by_url(f"{inside}/x.tar"))
    assert not allowed.known(by_name(f"{inside}/x.tar")), "links may change: the disk is asked each time"


def test_relative_folders_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(rules(f"{tmp_path}/"), by_name("x.tar"))
    os.mkfifo(tmp_path / "fifo")
    assert lets(rules(f"{tmp_path}/"), by_name(f"{tmp_path}/fifo"))


@pytest.mark.parametrize(
    "url",
    ["simplecache::s3://bucket/x", "filecache::s3://bucket/x", "reference::/etc/passwd", "zip://x::/etc/passwd",
     "zip://x::file:///etc/passwd", "zip://x::https://bucket/y", "zip://x::s3://other/y",
     "zip://../x::s3://bucket/y", "zip://x::simplecache::s3://bucket/y", "local:///etc/passwd",
     "git://path:/etc/passwd", "dir://x::s3://bucket/y", "sftp://host/x"],
)  # fmt: skip
def test_chains_and_side_doors(url: str) -> None:
    allowed = rules("s3://bucket/", "https://bucket/")
    assert not lets(allowed, by_name(url))
    assert not lets(allowed, by_url(url))
    assert not lets(rules(), by_url(url))


def test_an_archive_in_an_allowed_store() -> None:
    assert lets(rules("s3://bucket/data/"), by_name("zip://a/x.tar::s3://bucket/data/y.zip"))
    assert not lets(rules("s3://bucket/data/"), by_name("zip://a/x.tar::s3://bucket/other/y.zip"))


def test_other_stores_are_allowed_by_host() -> None:
    allowed = rules("sftp://host/data/")
    assert lets(allowed, by_name("sftp://host/data/x"))
    assert not lets(allowed, by_name("sftp://host/data/../x"))
    assert not lets(allowed, by_name("sftp://evil/data/x"))
    assert not lets(allowed, by_name("sftp://host@evil/data/x"))


def test_buckets_of_the_configuration_are_allowed_by_being_there(tmp_path: Path) -> None:
    config = ServiceConfig(buckets=(("web", "https://host/imagenet"), ("disk", str(tmp_path))))
    allowed = Allowed(config)
    assert lets(allowed, name_of("/ais/web/x.tar", "", config))
    assert lets(allowed, name_of("/ais/disk/x.tar", "", config))
    assert not lets(allowed, name_of("/ais/disk/../x.tar", "", config))
    assert not lets(allowed, name_of("/ais/web/%2e%2e/x.tar", "", config))


def test_secure_mode_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    assert refused(rules(f"{tmp_path}/"), by_name(f"{tmp_path}/x")).status == 403


def test_entries_that_mean_nothing() -> None:
    for entry in ("https://host/a/../b", "https://host/x?y=1", "https://ho\\st/", "s3://", "/data/../etc/"):
        with pytest.raises(ConfigError):
            rules(entry)


def test_listings_need_all_that_begins_so() -> None:
    allowed = rules("gs://bucket/data")
    for url in ("gs://bucket/data/", "gs://bucket/data/x", "gs://bucket/data/a/b"):
        asyncio.run(allowed.check(url))
    for url in ("gs://bucket/data", "gs://bucket/", "gs://bucket", "gs://bucket/da", "gs://bucket/database/"):
        with pytest.raises(Refusal):
            asyncio.run(allowed.check(url))


@pytest.mark.parametrize(
    ("start", "target"),
    [("https://host/data/x", "https://host/data/y"), ("https://host/data/x", "https://cdn/z"),
     ("http://plain/x", "https://plain/x"), ("http://plain:8080/x", "http://plain:8080/y")],
)  # fmt: skip
def test_redirects_within_what_is_allowed(start: str, target: str) -> None:
    rules("https://host/data/", "https://cdn/", "http://plain/", "http://plain:8080/").leads(start, target)


@pytest.mark.parametrize(
    "target",
    ["https://evil/data/x", "https://host/other", "https://host/data/../other", "http://host/data/x",
     "https://host:8443/data/x", "http://169.254.169.254/latest/meta-data/", "http://localhost/data/x",
     "https://host@evil/data/x", "https://ho\\st/data/x", "https://host/data/.\t./other"],
)  # fmt: skip
def test_redirects_to_elsewhere(target: str) -> None:
    with pytest.raises(AccessDenied, match="redirects"):
        rules("https://host/data/").leads("https://host/data/x", target)


def test_redirects_without_allow_stay_with_their_server() -> None:
    allowed = rules()
    allowed.leads("https://mirror/x", "https://mirror/y")
    allowed.leads("http://mirror/x", "https://mirror/y")
    for target in ("https://evil/x", "http://mirror:8080/x", "https://mirror/../x"):
        with pytest.raises(AccessDenied):
            allowed.leads("https://mirror/x", target)


def test_addresses_of_named_hosts_are_judged() -> None:
    allowed = rules("https://host/", "http://127.0.0.1:9000/", "http://[::1]:80/")
    assert allowed.why_not("host", "10.0.0.1")
    assert allowed.why_not("host", "169.254.169.254")
    assert allowed.why_not("host", "1.1.1.1") == ""
    assert allowed.why_not("127.0.0.1", "127.0.0.1") == ""
    assert allowed.why_not("::1", "::1") == ""
    assert rules("https://host/", private=True).why_not("host", "10.0.0.1") == ""
