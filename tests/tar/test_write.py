"""What is written is read back, or refused, or told."""

from __future__ import annotations

import io
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.writing import read
from wds_async.tar.write import NameRules
from wds_async.writer import TarWriter


@pytest.mark.parametrize(
    "key", ["", "a/", "/", ".hidden", "a/.hidden", "a.b/.c", "nul\0", "__meta__/x", "a/b/", None, 7, b"k"]
)
def test_keys_that_would_not_be_read_back_are_refused(key: object) -> None:
    with pytest.raises(ValueError, match="key"):
        NameRules().check(key, ["jpg"])


@pytest.mark.parametrize("field", ["", "a/b", "/", "nul\0", None, 7])
def test_fields_that_would_not_be_read_back_are_refused(field: object) -> None:
    with pytest.raises(ValueError, match="a field's name"):
        NameRules().check("k", ["jpg", field])


@pytest.mark.parametrize(
    ("keys", "field", "what"),
    [
        (["1.b", "2.b"], "jpg", "the key '1.b' has a dot in its last component: it is read back as '1'"),
        (["x.y/a.b.c", "x.y/d.e"], "jpg", "read back as 'x.y/a'"),
        (["/a", "/b"], "jpg", "does not unpack"),
        (["../a", "b/../c"], "jpg", "does not unpack"),
        (["k", "l"], "JPG", "'JPG' is read back as 'jpg'"),
    ],
)
def test_what_is_read_back_changed_is_said_once(
    keys: list[str], field: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = NameRules()
    for key in keys:
        rules.check(key, [field])
    (record,) = caplog.records
    assert what in record.getMessage()


@pytest.mark.parametrize("key", ["a", "a/b", "a.b/c", "./a", "__a__", "a b", "日本", "a-1", "x/__y__"])
def test_ordinary_keys_pass_in_silence(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert NameRules().check(key, ["jpg", "seg.png", "__meta__"]) == {"jpg", "seg.png", "__meta__"}
    assert caplog.records == []


def test_fields_that_meet_in_lower_case_are_refused() -> None:
    with pytest.raises(ValueError, match="two fields are called 'jpg'"):
        NameRules().check("k", ["jpg", "JPG"])


def test_adjacent_samples_of_one_key(caplog: pytest.LogCaptureFixture) -> None:
    rules = NameRules()
    for fields in (["jpg"], ["cls"], ["json"]):
        rules.wrote("k", rules.check("k", fields))
    assert ["read back as one sample" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(ValueError, match=r"two samples in a row have the key 'k' and the fields \['jpg'\]"):
        rules.check("k", ["jpg"])
    rules.wrote("other", rules.check("other", ["jpg"]))
    rules.wrote("k", rules.check("k", ["jpg"]))
    rules.new_shard()
    rules.check("k", ["jpg"])


NAMES = st.text(alphabet=string.ascii_letters + "./_0é \0", max_size=8)


@given(st.lists(st.tuples(NAMES, st.sets(NAMES, min_size=1, max_size=3)), max_size=5))
def test_whatever_passes_in_silence_is_read_back_as_it_was(todo: list[tuple[str, set[str]]]) -> None:
    out, written = io.BytesIO(), []
    sink = TarWriter(out, encoder=False, keep_meta=True, mtime=0)
    told = sink.rules._warned._seen
    for key, fields in todo:
        if fields & {"__url__", "__key__"} or any(field.startswith("_") for field in fields):
            continue
        try:
            sink.write({"__key__": key, **dict.fromkeys(fields, b"1")})
        except ValueError:
            continue
        if told - {"path"}:
            return sink.discard()
        written.append((key, fields))
    sink.close()
    found = [(s["__key__"], {name for name in s if not name.startswith("__")}) for s in read(out.getvalue())]
    assert found == written
    return None
