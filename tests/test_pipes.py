"""wds_async.rewrite: commands that read an object are known, everything else is left to the shell."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.rewrite import native_pipe


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("pipe:curl -s -L http://h/x.tar || true", "http://h/x.tar"),
        ("pipe:curl -L -s https://h/x.tar", "https://h/x.tar"),
        ("curl -sSfL 'https://h/x.tar?a=1&b=2'", "https://h/x.tar?a=1&b=2"),
        ('curl --silent --location "https://h/x y.tar"', None),
        ("curl --retry 3 --retry-delay=2 --fail http://h/x.tar?a=1 ||  true ", "http://h/x.tar?a=1"),
        ("curl -s -L http://h/x.tar?a=1&b=2", None),
        ("curl http://h/x.tar http://h/y.tar", None),
        ("curl -H 'A: b' http://h/x.tar", None),
        ("curl -u a:b http://h/x.tar", None),
        ("curl http://a:b@h/x.tar", None),
        ("curl -X POST http://h/x.tar", None),
        ("curl --range 0-5 http://h/x.tar", None),
        ("curl -k https://h/x.tar", None),
        ("curl --compressed https://h/x.tar", None),
        ("curl -o out https://h/x.tar", None),
        ("curl 'http://h/x-[1-3].tar'", None),
        ("curl http://h/x.tar#f", None),
        ("curl http://h/../x.tar", None),
        ("curl h/x.tar", None),
        ("curl -s", None),
        ("curl -s http://h/x.tar --retry", None),
        ("pipe:gsutil cat gs://b/o.tar || true", "gs://b/o.tar"),
        ("pipe:gsutil -m -q cat 'gs://b/o x.tar'", "gs://b/o x.tar"),
        ("gsutil cat -r 0-5 gs://b/o.tar", None),
        ("gsutil -u project cat gs://b/o.tar", None),
        ("gsutil cat 'gs://b/*.tar'", None),
        ("gsutil cat gs://b/a gs://b/b", None),
        ("gsutil cp gs://b/a -", None),
        ("pipe:gcloud storage cat gs://b/o.tar", "gs://b/o.tar"),
        ("gcloud storage cat --range=0-5 gs://b/o.tar", None),
        ("gcloud storage ls gs://b/o.tar", None),
        ("pipe:aws s3 cp s3://b/k.tar -", "s3://b/k.tar"),
        ("pipe:aws s3 cp --quiet s3://b/k.tar - || true", "s3://b/k.tar"),
        ("aws s3 cp s3://b/k.tar out", None),
        ("aws s3 cp s3://b/k.tar - --profile p", None),
        ("aws --endpoint-url http://h s3 cp s3://b/k.tar -", None),
        ("aws s3 cp s3://b/k.tar - --no-sign-request", None),
        ("pipe:az storage blob download --container-name c --name d/n.tar", "az://c/d/n.tar"),
        (
            "pipe:az storage blob download --container-name c --name 'd/n 1.tar' --account-name a --file /dev/stdout",
            "https://a.blob.core.windows.net/c/d/n%201.tar",
        ),
        ("az storage blob download -c c -n n -f /dev/stdout --no-progress -o none", "az://c/n"),
        ("az storage blob download -c c -n n --account-name=a", "https://a.blob.core.windows.net/c/n"),
        ("az storage blob download -c c -n n --account-name a.b/c", None),
        ("az storage blob download -c c -n n --file out", None),
        ("az storage blob download -c c -n n --account-key k", None),
        ("az storage blob download -c c", None),
        ("az storage blob download -c c -n n -n m", None),
        ("pipe:cat x.tar", "x.tar"),
        ("cat '/a b/x.tar' || true", "/a b/x.tar"),
        ('cat "x y.tar"', "x y.tar"),
        ("cat -- x.tar", "x.tar"),
        ("cat s3://b/x.tar", "./s3://b/x.tar"),
        ("cat a b", None),
        ("cat -n a", None),
        ("cat -", None),
        ("cat", None),
        ("cat ''", None),
        ("cat *.tar", None),
        ("cat x?.tar", None),
        ("cat ~/x.tar", None),
        ("cat {a,b}.tar", None),
        ("cat $X", None),
        ('cat "$X"', None),
        ("cat `ls`", None),
        ("cat $(ls)", None),
        ("cat a | gunzip", None),
        ("cat a > b", None),
        ("cat a; rm b", None),
        ("cat a && true", None),
        ("cat a || false", None),
        ("cat a\nrm b", None),
        ("cat a\\ b", None),
        ("cat 'a", None),
        ("cat a # b", None),
        ("X=1 cat a", None),
        ("/bin/cat a", None),
        ("ssh host cat a", None),
        ("dd if=a", None),
        ("", None),
        ("pipe:", None),
    ],
)
def test_commands(command: str, url: str | None) -> None:
    assert native_pipe(command) == url


@given(st.text(st.characters(exclude_characters="\n\0", codec="utf-8"), min_size=1, max_size=12))
def test_a_quoted_file_name_is_read_back_or_refused(name: str) -> None:
    found = native_pipe("pipe:cat " + shlex.quote(name))
    assert found in (None, name, f"./{name}")


@given(st.text("abc/.-_ '\"$;|&<>`\\*?[]{}~#!=:", max_size=16))
def test_what_the_shell_would_split_otherwise_is_never_read(text: str) -> None:
    found = native_pipe(f"pipe:cat {text}")
    if found is not None:
        words = shlex.split(text)
        assert found.removeprefix("./") == [w for w in words if w != "--"][-1].removeprefix("./")


def test_plain_names_are_always_known() -> None:
    for name in ("x.tar", "/data/x-000.tar", "a/b_c/d-1.tar.gz", "données.tar"):
        assert native_pipe(f"cat {shlex.quote(name)}") == name
