"""wds_async.service.config: files, options, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from wds_async.errors import ConfigError
from wds_async.service.config import Quota, ServiceConfig, cache_limit, load_config

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
    assert config.quotas == (Quota("text", 0.25), Quota("vision", 0.5))
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
    [
        ({"colour": 1}, "'colour' is no setting of the service; its settings are ahead_bytes, "),
        ({"port": "many"}, "port: 'many' does not parse"),
        ({"port": 70000}, "port: 70000 is none"),
        ({"log": "xml"}, "write human or json"),
        ({"certificate": "a.pem"}, "give both or neither"),
        ({"client_ca": "a.pem"}, "client_ca needs a certificate"),
        ({"allow": ["bucket"]}, "'bucket' is no URL's beginning"),
        ({"memory_bytes": "much"}, "memory_bytes: 'much' does not parse"),
        ({"clients": 0}, "clients: 0 must be more than 0"),
        ({"quotas": {"a": 0.8, "b": 0.5}}, "1 together at most"),
        ({"urls": "yes"}, "urls: 'yes' does not parse: write true or false"),
    ],
)
def test_what_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(**wrong)


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
