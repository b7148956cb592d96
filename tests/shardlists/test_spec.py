"""Specifications: every format, from every place, and errors that name the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wds_async.errors import ConfigError, ShardNotFound, UnsafeContent, UrlError, WdsError
from wds_async.indexed import index as shardindex
from wds_async.shardlists import document, spec
from wds_async.storage.listing.expand import expand_listed

README = """\
# the older README's
dataset:

  - shards: gs://b/ia1-{000000..000033}.tar
    scaleprob: 0.3

  - shards: gs://b/cdip-{000000..000022}.tar
    name: cdip
    scale: [1.0, 3.0]

  - shards:
      - gs://b/ill-{0..1}.tar
      - ais://b/gsub.tar
    extensions: nrm.jpg
    weight: 2.5
    scale: [0.3, 1.0]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to(text: str, name: str = "spec.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return to


def test_the_readmes_format(write: Any) -> None:
    found = spec.load(write(README))
    assert [source.weight for source in found.sources] == [34, 23, 2.5]
    first, second, third = found.sources
    assert first.urls[33] == "gs://b/ia1-000033.tar"
    assert first.name == "gs://b/ia1-{000000..000033}.tar"
    assert first.metadata == {"scaleprob": 0.3}
    assert (second.name, second.metadata, second.fields) == ("cdip", {"scale": [1.0, 3.0]}, None)
    assert third.urls == ("gs://b/ill-0.tar", "gs://b/ill-1.tar", "ais://b/gsub.tar")
    assert third.fields == ("nrm.jpg",)
    assert third.name == "source 2"
    assert found.nsamples is None


def test_multi_shard_sample_format(write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOST", "host")
    monkeypatch.setenv("WDS_PART", "train")
    path = write(
        """
prefix: http://$HOST/
buckets: all
datasets:
  - shards: "${PART}-{0..2}.tar"
    choose: 2
  - {name: other, shards: [x.tar, y.tar], buckets: [b/], resample: 7}
  - {shards: z.tar, buckets: [], resample: true, choose: -1}
"""
    )
    first, second, third = spec.load(path).sources
    assert first.urls == tuple(f"http://host/all/train-{i}.tar" for i in range(3))
    assert (first.name, first.choose, first.resample, first.weight) == ("@all", 2, False, 2)
    assert second.urls == ("http://host/b/x.tar", "http://host/b/y.tar")
    assert (second.name, second.choose, second.resample, second.weight) == ("other", 0, 7, 7)
    assert (third.urls, third.resample, third.weight) == (("http://host/z.tar",), True, 1)

    # Without a prefix, webdataset opens them from the working directory; the environment is the program's own.
    local = write("datasets: [{shards: x.tar}, {shards: $NO_SUCH_NAME.tar}]")
    assert [source.urls for source in spec.load(local).sources] == [("x.tar",), ("$NO_SUCH_NAME.tar",)]


WIDS = {
    "__kind__": "wids-shard-index-v1",
    "wids_version": 1,
    "name": "train",
    "shardlist": [{"url": "a.tar", "nsamples": 10, "filesize": 1}, {"url": "http://h/b.tar", "nsamples": 5}],
    "license": "MIT",
}


def indexed(path: Path) -> list[str]:
    """What the other reader of the format makes of it."""
    return [shard["url"] for shard in shardindex.load_index(path)["shardlist"]]


def test_shard_lists(write: Any, tmp_path: Path) -> None:
    found = spec.load(write(json.dumps(WIDS), "index.json"))
    (source,) = found.sources
    assert source.urls == (str(tmp_path / "a.tar"), "http://h/b.tar")
    assert (found.name, source.name, source.nsamples, found.nsamples) == ("train", "train", 15, 15)
    assert source.metadata == {"license": "MIT"}

    (elsewhere,) = spec.load(write(json.dumps({**WIDS, "base": "gs://b/d"}), "index.json")).sources
    assert elsewhere.urls == ("gs://b/d/a.tar", "http://h/b.tar") == tuple(indexed(tmp_path / "index.json"))
    assert elsewhere.metadata == {"license": "MIT"}

    (plain,) = spec.load(write(json.dumps(WIDS["shardlist"]), "list.json")).sources
    assert (plain.urls, plain.nsamples) == (source.urls, 15)
    (names,) = spec.load(write('["a.tar", {"url": "http://h/b.tar", "nsamples": 5}]', "names.json")).sources
    assert (names.urls, names.nsamples) == (source.urls, None)
    (same,) = spec.load(write("- a.tar\n- http://h/b.tar\n", "names.yml")).sources
    assert same.urls == source.urls
    assert len(spec.load(write('[{"shards": "a.tar"}, {"shards": "b.tar"}]', "sources.json")).sources) == 2


def test_dicts(tmp_path: Path) -> None:
    found = spec.load(
        {
            "name": "mix",
            "dataset": [
                {"shards": "x-{0..3}.tar", "nsamples": 7, "extensions": [".JPG", "json"], "name": 3},
                {"shards": [tmp_path / "y.tar"], "nsamples": 5, "weight": 1e-3},
                {"shards": "z.tar", "weight": 0},
            ],
        }
    )
    assert found.sources[0].urls == ("x-0.tar", "x-1.tar", "x-2.tar", "x-3.tar")
    assert (found.sources[0].fields, found.sources[0].name) == (("jpg", "json"), "3")
    assert found.sources[1].urls == (str(tmp_path / "y.tar"),)
    assert (found.name, found.nsamples) == ("mix", 12)
    assert spec.load(found) is found
    assert spec.load({"shards": "pipe:cat x.tar"}).sources[0].urls == ("pipe:cat x.tar",)
    assert spec.load({"dataset": [{"shards": "x.tar", "nsamples": 3, "choose": 1}]}).nsamples is None


def test_local_names_are_beside_the_specification(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g1.tar", "g2.tar"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("WDS_DATA", "/data")
    path = write('dataset: [{shards: ["x-{0..1}.tar::y.tar", /abs/x.tar, "${DATA}/x.tar", "g*.tar", ../up.tar]}]')
    monkeypatch.chdir(tmp_path / "sub")
    assert spec.load(path).sources[0].urls == (
        *(f"{tmp_path}/{name}" for name in ("x-0.tar", "x-1.tar", "y.tar")),
        "/abs/x.tar",
        "/data/x.tar",
        f"{tmp_path}/g1.tar",
        f"{tmp_path}/g2.tar",
        f"{tmp_path}/../up.tar",
    )
    assert spec.load(Path("../spec.yaml")).sources[0].urls[0] == "../x-0.tar"


def test_fetched(origin: Any) -> None:
    url = origin.add("a/b/spec.yaml", b"dataset: [{shards: [x.tar, ./y.tar, ../z.tar, gs://b/w.tar, x?a=b/../c.tar]}]")
    found = spec.load(url + "?token=secret#part")
    assert found.sources[0].urls == (
        f"{origin.base}/a/b/x.tar",
        f"{origin.base}/a/b/y.tar",
        f"{origin.base}/a/z.tar",
        "gs://b/w.tar",
        f"{origin.base}/a/b/x?a=b/../c.tar",
    )
    index = origin.add("top.json", json.dumps(WIDS).encode())
    assert spec.load(index).sources[0].urls == (f"{origin.base}/a.tar", "http://h/b.tar")
    multi = origin.add("m.yaml", b"datasets: [{shards: x.tar}, {shards: ../../../../y.tar}]")
    assert [s.urls[0] for s in spec.load(multi).sources] == [f"{origin.base}/x.tar", f"{origin.base}/y.tar"]
    with pytest.raises(ShardNotFound):
        spec.load(f"{origin.base}/none.yaml")


@pytest.mark.parametrize(
    "shards",
    [
        "pipe:cat /etc/passwd",
        "PIPE:id",
        "/etc/passwd",
        "~/x.tar",
        "file:///etc/passwd",
        "-",
        "http://h/x.tar::/etc/passwd",
        "http://h/{x,y}:\\\\:pipe:id",
        "simplecache::file:///etc/passwd",
        "local:///etc/passwd",
        "http://h/${HOME}.tar",
        "http://h/{$,a}\\\\{HOME\\\\}",
        "http://h/{0..999999999999}.tar",
        "{pipe:id,x}",
    ],
)
@pytest.mark.parametrize("key", ["dataset", "datasets"])
def test_fetched_content_names_no_commands_files_or_variables(origin: Any, shards: str, key: str) -> None:
    url = origin.add("spec.yaml", f'name: x\n{key}:\n- shards: "{shards}"\n'.encode())
    if shards == "{pipe:id,x}":  # a relative name: it stays beside the specification
        assert spec.load(url).sources[0].urls == (f"{origin.base}/pipe:id", f"{origin.base}/x")
        return
    with pytest.raises(UnsafeContent, match=r"spec\.yaml, line 3, column 3 "):
        spec.load(url)


def test_fetched_prefixes_and_lists_are_no_way_around(origin: Any, write: Any) -> None:
    for text in (
        'prefix: "pipe:cat "\ndatasets: [{shards: x.tar}]',
        "buckets: /etc\ndatasets: [{shards: x.tar}]",
        '[{"url": "/etc/passwd"}]',
        '{"wids_version": 1, "shardlist": [{"url": "pipe:id"}]}',
    ):
        with pytest.raises(UnsafeContent):
            spec.load(origin.add("spec.yaml", text.encode()))
        assert spec.load(write(text)).sources  # the same from this machine's own file


def test_a_rewritten_name_is_not_trusted(origin: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    origin.add("spec.yaml", b"dataset: [{shards: 'pipe:id'}]")
    monkeypatch.setenv("WDS_REWRITE", f"/specs/={origin.base}/")
    with pytest.raises(UnsafeContent):
        spec.load("/specs/spec.yaml")


def test_secure_mode_reads_no_local_specification(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(README)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent):
        spec.load(path)


BAD: dict[str, tuple[str, str]] = {
    "syntax": ("dataset:\n  - shards: [x.tar\n  - shards: y.tar\n", r"line 3, column \d+: not valid YAML"),
    "tab": ("dataset:\n\t- shards: x.tar\n", r"line 2, column 1: not valid YAML"),
    "tag": ("dataset:\n- shards: !!python/object/apply:os.system [id]\n", r"line 2, column 11: not valid YAML"),
    "doubled": ("dataset:\n- shards: x.tar\n  shards: y.tar\n", r"line 3, column 3: a second 'shards'"),
    "unknown": ("models:\n  - a\n", r"line 1, column 1: no specification that is known \(keys models\)"),
    "text": ("just text", r"no specification that is known"),
    "empty": ("", r"no specification that is known"),
    "empty list": ("[]", r"no specification that is known"),
    "version": ("wids_version: 2\nshardlist: [x.tar]", r"line 1, column 1 \(wids_version\): 2: version 1"),
    "top key": ("dataset: [{shards: x.tar}]\nbucket: b\n", r"line 2, column 1 \(bucket\): 'bucket' means nothing"),
    "no list": ("dataset:\n  shards: x.tar\n", r"line 1, column 1 \(dataset\): .* is not a list of sources"),
    "no sources": ("x: &a\n", r"no specification"),
    "none": ("dataset: []\n", r"line 1, column 1 \(dataset\): \[\] is not a list of sources"),
    "a source": ("dataset:\n- x.tar\n", r"line 2, column 3 \(dataset\[0\]\): 'x.tar' is not a source"),
    "no shards": ("dataset:\n- shards: x.tar\n- name: b\n", r"line 3, column 3 \(dataset\[1\]\): a source without"),
    "empty shards": ("dataset:\n- name: a\n  shards: []\n", r"line 3, column 3 .*: an empty list of shards"),
    "shards' type": ("dataset:\n- shards:\n  - x.tar\n  - 17\n", r"line 4, column 5 .*: 17 is not the name"),
    "blank": ("dataset:\n- shards: ' '\n", r"line 2, column 3 .* is not the name of a shard"),
    "braces": ("dataset:\n- shards: x-{0..3.tar\n", r"line 2, column 3 .*unbalanced braces"),
    "variable": ("dataset:\n- shards: ${NOT_SET_ANYWHERE}/x.tar\n", r"line 2, column 3 .*WDS_NOT_SET_ANYWHERE"),
    "glob": ("dataset:\n- shards: none-*.tar\n", r"line 2, column 3 .*no file matches"),
    "weight": ("dataset:\n- shards: x.tar\n  weight: -1\n", r"line 3, column 3 \(dataset\[0\]\.weight\): -1 is not"),
    "weight's type": ("dataset:\n- shards: x.tar\n  weight: much\n", r"line 3, column 3 .*'much' is not a weight"),
    "NaN": ("dataset:\n- shards: x.tar\n  weight: .nan\n", r"line 3, column 3 .*nan is not a weight"),
    "no float": (f"dataset:\n- shards: x.tar\n  weight: 1{'0' * 400}\n", r"line 3, column 3 .*1000* is not a weight"),
    "no weight": ("dataset:\n- shards: x.tar\n  weight: 0\n", r"line 1, column 1 .*every weight is 0"),
    "extensions": ("dataset:\n- shards: x.tar\n  extensions: 3\n", r"line 3, column 3 .*3 names no fields"),
    "choose": ("datasets:\n- shards: x.tar\n  choose: 2\n", r"line 3, column 3 .*2 of 1 shards"),
    "both": ("datasets:\n- {shards: x.tar, choose: 1, resample: 1}\n", r"line 2, column 19 .*not both"),
    "resample": ("datasets:\n- shards: x.tar\n  resample: often\n", r"line 3, column 3 .*'often' is not a count"),
    "nsamples": ("dataset:\n- shards: x.tar\n  nsamples: 1.5\n", r"line 3, column 3 .*1.5 is not a count"),
    "buckets": ("datasets:\n- shards: x.tar\n  buckets: [a, b]\n", r"line 3, column 3 .*is not one bucket"),
    "merged": ("a: &a {weight: -1}\n", r"no specification"),
    "name": ("dataset:\n- shards: x.tar\n  name: [a]\n", r"line 3, column 3 .* is not text"),
    "url": ('[\n {"url": "x.tar"},\n {"nsamples": 3}\n]', r"line 3, column 2 \(\[1\]\): a shard without `url`"),
    "url's type": ('{"shardlist": [\n {"url": 3}]}', r"line 2, column 3 \(shardlist\[0\]\.url\): 3 is not the name"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_line(write: Any, case: str) -> None:
    text, message = BAD[case]
    with pytest.raises((ConfigError, UrlError), match=message) as caught:
        spec.load(write(text))
    assert "spec.yaml" in str(caught.value)


def test_errors_in_a_dict_name_the_place() -> None:
    with pytest.raises(ConfigError, match=r"the specification \(dataset\[1\]\.weight\): 'x' is not a weight"):
        spec.load({"dataset": [{"shards": "x.tar"}, {"shards": "y.tar", "weight": "x"}]})
    with pytest.raises(ConfigError, match=r"no specification that is known \(\{\}\)"):
        spec.load({})


def test_a_merged_source_that_is_wrong(write: Any) -> None:
    text = "dataset:\n- &a {shards: x.tar, weight: 1}\n- {<<: *a, name: b}\n- {<<: *a, shards: 3}\n"
    with pytest.raises(ConfigError, match=r"line 4, column 12 \(dataset\[2\]\.shards\)"):
        spec.load(write(text))
    assert spec.load(write(text.replace("shards: 3", "name: c"))).sources[2].urls[0].endswith("x.tar")


def test_secrets_stay_out_of_messages_and_names() -> None:
    url = "http://user:hunter2@h/x-{0..1}.tar"
    source = spec.load({"dataset": [{"shards": url}]}).sources[0]
    assert "hunter2" not in source.name
    assert "hunter2" in source.urls[0]


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ({}, True),
        ("spec.yaml", True),
        ("a/spec.YML", True),
        (Path("spec.json"), True),
        ("https://h/spec.yaml?token=x", True),
        ("gs://b/spec.json", True),
        ("package.module:function", True),
        ("module:function", True),
        ("x.tar", False),
        ("a:b.tar", False),
        ("pipe:cat", False),
        ("file:x", False),
        ("C:x", False),
        ("x-{0..9}.tar", False),
        (["spec.yaml"], False),
        (b"spec.yaml", False),
        (None, False),
    ],
)
def test_is_specification(urls: Any, expected: bool) -> None:
    assert spec.is_specification(urls) is expected


def test_a_file_of_a_functions_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec.is_function("module:function")
    Path("module:function").touch()
    assert not spec.is_function("module:function")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "spec_made_here.py").write_text(
        "def good():\n    return [{'a': 1}]\n\n"
        "ready = [1, 2]\n\n"
        "def text():\n    return 'x.tar'\n\n"
        "def nothing():\n    pass\n"
    )
    (tmp_path / "spec_broken_import.py").write_text("import spec_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "spec_made_here"
    sys.modules.pop("spec_made_here", None)


def test_functions(module: str) -> None:
    assert list(spec.call(f"{module}:good")) == [{"a": 1}]
    assert spec.call(f"{module}:ready") == [1, 2]
    for name, message in {
        "text": "returned a str",
        "nothing": "returned a NoneType",
        "missing": "has no 'missing'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            spec.call(f"{module}:{name}")
    with pytest.raises(ConfigError, match="no module 'spec_no_such_module'"):
        spec.call("spec_no_such_module:f")
    with pytest.raises(ModuleNotFoundError, match="spec_no_such_module") as caught:
        spec.call("spec_broken_import:f")
    assert not isinstance(caught.value, WdsError)
    with pytest.raises(ConfigError, match="is a function"):
        spec.load(f"{module}:good")


def test_too_large(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("dataset: [{shards: x.tar}]")
    monkeypatch.setattr(document, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 0 MiB"):
        spec.load(path)


def test_a_hundred_thousand_shards_take_a_moment(write: Any) -> None:
    shards = [{"url": f"http://h/x-{i}.tar", "nsamples": i} for i in range(100_000)]
    found = spec.load(write(json.dumps({"wids_version": 1, "shardlist": shards}), "index.json"))
    assert found.nsamples == sum(range(100_000))


def test_a_misspelt_key_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "wds_async"):
        found = spec.load({"dataset": [{"shards": "x.tar", "wieght": 3, "scale": 2}]})
    assert found.sources[0].metadata == {"wieght": 3, "scale": 2}
    (record,) = caplog.records
    assert "'wieght' means nothing; did you mean 'weight'?" in record.getMessage()


@pytest.mark.parametrize("pattern", ["/no-such-folder/**/*.tar", "no-such-*.tar", "~/no-such-*.tar"])
def test_what_was_fetched_has_no_local_files_looked_for(pattern: str) -> None:
    """A pattern would take minutes over a whole disk, and tell whether a file is there."""
    fetched = document.Document("https://host/x.yaml", [{"shards": pattern}], base="", trusted=False)
    with pytest.raises(UnsafeContent):
        spec._spec(fetched)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("s3://bucket/a-b/x-000001.tar", True), ("https://host.org/d/x_0.tar", True), ("hf://datasets/o/n@1/x.tar", True),
     ("s3://bucket/x-{0..1}.tar", False), ("gs://b/x-*.tar", False), ("gs://b/x?.tar", False), ("s3://b/dir/", False),
     ("gs://b/${X}.tar", False), ("s3://b/x.tar::s3://b/y.tar", False), ("FILE:///tmp/x", False), ("/tmp/x", False),
     ("https://h/x.tar?sig=1", False), ("s3://b/a b.tar", False), ("zip://x.tar::s3://b/y.zip", False)],
)  # fmt: skip
def test_a_url_that_stands_for_itself_is_not_expanded(text: str, plain: bool) -> None:
    assert (spec._PLAIN.fullmatch(text) is not None) is plain
    if plain:
        assert expand_listed(text) == [text]


def test_a_folder_of_this_machine_is_listed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x.tar").write_bytes(b"")
    for name in (f"{tmp_path}/d", f"file://{tmp_path}/d"):
        assert [Path(url).name for url in spec.load({"dataset": [{"shards": name}]}).sources[0].urls] == ["x.tar"]
