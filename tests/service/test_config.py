"""wds_async.service.config: files, options, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from wds_async.errors import ConfigError
from wds_async.service.config import ServiceConfig, cache_limit, kept_free, load_config

_FILE = """
host: 0.0.0.0
port: 0
folder: /var/cache/wds
cache_size: 500G
allow: ["gs://bucket/", "s3://other/prefix/"]
buckets: {imagenet: "https://host/imagenet/"}
memory_bytes: 64M
client_bytes_per_s: 1G
freshness_s: .inf
quotas: {vision: 0.5, text: 0.25}
"""


def test_a_file_and_options_that_win(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(_FILE)
    config = load_config(path, port=8080, host=None)
    assert (config.host, config.port, config.allow) == ("0.0.0.0", 8080, ("gs://bucket/", "s3://other/prefix/"))
    assert (config.memory_bytes, config.client_bytes_per_s) == (64 << 20, 1 << 30)
    assert config.buckets == (("imagenet", "https://host/imagenet/"),)
    assert config.quotas == (("text", 0.25), ("vision", 0.5))
    assert config.freshness_s == float("inf")
    assert cache_limit(config) == 500 << 30


def test_a_share_of_the_disk(tmp_path: Path) -> None:
    whole = cache_limit(load_config(folder=str(tmp_path), cache_size="100%"))
    assert cache_limit(load_config(folder=str(tmp_path), cache_size="50%")) == pytest.approx(whole / 2, abs=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.8", "::1", "localhost"])
def test_loopback_needs_no_list(host: str) -> None:
    assert ServiceConfig(host=host).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "node.example"])
def test_elsewhere_a_list_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="allow must say what may be read"):
        ServiceConfig(host=host)
    assert not ServiceConfig(host=host, allow=("gs://bucket/",)).loopback


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"colour": 1}, "'colour' is no setting of the service; its settings are address_connections, ahead_bytes, "),
     ({"port": "many"}, "port: 'many' does not parse"), ({"port": 70000}, "port: 70000 is none"),
     ({"log": "xml"}, "write human or json"), ({"certificate": "a.pem"}, "give both or neither"),
     ({"client_ca": "a.pem"}, "client_ca needs a certificate"),
     ({"allow": ["bucket"]}, "allow: 'bucket' is no URL's beginning"),
     ({"allow": ["-"]}, "allow: '-' is no URL's beginning"),
     ({"allow": ["pipe:cat /data/"]}, "allow: 'pipe:cat /data/' is a command; this service runs none"),
     ({"allow": ["PIPE:gsutil cat gs://b/"]}, "is a command"),
     ({"buckets": {"b": "pipe:gsutil cat gs://b/"}}, "buckets: b: 'pipe:gsutil cat gs://b/' is a command"),
     ({"buckets": {"b": "cmd://x/"}}, "is a command"),
     ({"allow": ["https://me:SECRET@host/data/"]}, r"allow: 'https://me:\*\*\*@host/data/' holds credentials"),
     ({"allow": ["https://SECRET@host/data/"]}, "holds credentials"),
     ({"buckets": {"b": "sftp://me:SECRET@host/data/"}}, "buckets: b: .* holds credentials"),
     ({"buckets": {"b": "https://host/data/?sig=SECRET"}}, "holds credentials"),
     ({"allow": ["gz://bucket/"]}, r"allow: 'gz://bucket/': unknown scheme 'gz'; did you mean gs://\?"),
     ({"allow": ["s4://bucket/"]}, r"unknown scheme 's4'; did you mean s3://\?"),
     ({"buckets": {"b": "mine://bucket/"}}, "buckets: b: 'mine://bucket/': unknown scheme 'mine'; write gs://bucket/"),
     ({"memory_bytes": "much"}, "memory_bytes: 'much' does not parse"),
     ({"clients": 0}, "clients: 0 must be more than 0"),
     ({"cost_limit_per": "week"}, "cost_limit_per: 'week'; write total or day"),
     ({"stale_if_error_s": -1}, "stale_if_error_s: -1.0 must be 0 or more"),
     ({"quotas": {"a": 0.8, "b": 0.5}}, "1 together at most"),
     ({"urls": "yes"}, "urls: 'yes' does not parse: write true or false")],
)  # fmt: skip
def test_what_is_refused(wrong: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "cmd://=pipe:cat /")
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(**wrong)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "place",
    ["gs://b/", "gcs://b", "s3://b/x/", "s3a://b/", "az://c@a.dfs.core.windows.net/",
     "abfss://c@a.dfs.core.windows.net/x/", "hf://datasets/o/n@main/", "ais://b/", "https://host:8443/x/",
     "http://[::1]:9000/", "sftp://user@host/x/", "ftp://host/", "/data/shards/", "file:///data/"],
)  # fmt: skip
def test_places_that_are_some(place: str) -> None:
    assert load_config(allow=[place]).allow == (place,)
    assert load_config(buckets={"b": place}).buckets == (("b", place),)


def test_a_bucket_may_be_what_rewriting_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "mine://=gs://")
    assert load_config(buckets={"b": "mine://bucket/"}).buckets == (("b", "mine://bucket/"),)
    with pytest.raises(ConfigError, match="unknown scheme"):
        load_config(allow=["mine://bucket/"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("clients: 1")
    (tmp_path / "secrets.txt").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot be read: .*\. Did you mean .*/serve\.yaml\? --config .* must name a YAML"
    ):
        load_config(tmp_path / "server.yml")
    with pytest.raises(ConfigError, match=r"Did you mean .*/serve\.yaml\?"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"No such file or directory\. --config"):
        load_config(tmp_path / "other.txt")
    with pytest.raises(ConfigError, match=r"There is no folder .*/missing\. --config"):
        load_config(tmp_path / "missing" / "serve.yaml")


def test_a_misspelt_setting() -> None:
    with pytest.raises(ConfigError, match=r"'cache_sise' is no setting of the service; did you mean 'cache_size'\?"):
        load_config(cache_sise="1G")
    with pytest.raises(ConfigError, match=r"'zzz' is no setting of the service; its settings are .*allow, buckets"):
        load_config(zzz=1)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_config(path)
    path.write_text("- a\n- b")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_config(path)
    path.write_text("")
    assert load_config(path) == ServiceConfig()


@pytest.mark.parametrize("size", ["half", "0%", "120%"])
def test_sizes_that_are_none(size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_size"):
        cache_limit(load_config(folder=str(tmp_path), cache_size=size))


@pytest.mark.parametrize(("size", "expected"), [("0", 0), ("0%", 0), ("3G", 3 << 30)])
def test_bytes_to_be_kept_free(tmp_path: Path, size: str, expected: int) -> None:
    assert kept_free(load_config(folder=str(tmp_path), keep_free=size)) == expected
    assert kept_free(load_config(folder=str(tmp_path))) == cache_limit(
        load_config(folder=str(tmp_path), cache_size="2%")
    )
    for wrong in ("101%", "-1%", "much"):
        with pytest.raises(ConfigError, match="keep_free"):
            kept_free(load_config(folder=str(tmp_path), keep_free=wrong))
