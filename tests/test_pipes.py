"""wds_async.rewrite: commands that read an object are known, everything else is left to the shell."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.rewrite import native_pipe

READ = [
    ("pipe:curl -s -L http://h/x.tar || true", "http://h/x.tar"),
    ("pipe:curl -L -s https://h/x.tar", "https://h/x.tar"),
    ("curl -sSfL 'https://h/x.tar?a=1&b=2'", "https://h/x.tar?a=1&b=2"),
    ("curl --retry 3 --retry-delay=2 --fail http://h/x.tar?a=1 ||  true ", "http://h/x.tar?a=1"),
    ("pipe:gsutil cat gs://b/o.tar || true", "gs://b/o.tar"),
    ("pipe:gsutil -m -q cat 'gs://b/o x.tar'", "gs://b/o x.tar"),
    ("pipe:gcloud storage cat gs://b/o.tar", "gs://b/o.tar"),
    ("pipe:aws s3 cp s3://b/k.tar -", "s3://b/k.tar"),
    ("pipe:aws s3 cp --quiet s3://b/k.tar - || true", "s3://b/k.tar"),
    ("pipe:az storage blob download --container-name c --name d/n.tar", "az://c/d/n.tar"),
    (
        "pipe:az storage blob download --container-name c --name 'd/n 1.tar' --account-name a --file /dev/stdout",
        "https://a.blob.core.windows.net/c/d/n%201.tar",
    ),
    ("az storage blob download -c c -n n -f /dev/stdout --no-progress -o none", "az://c/n"),
    ("az storage blob download -c c -n n --account-name=a", "https://a.blob.core.windows.net/c/n"),
    ("pipe:cat x.tar", "x.tar"),
    ("cat '/a b/x.tar' || true", "/a b/x.tar"),
    ('cat "x y.tar"', "x y.tar"),
    ("cat -- x.tar", "x.tar"),
    ("cat s3://b/x.tar", "./s3://b/x.tar"),
]
LEFT_TO_THE_SHELL = [
    'curl --silent --location "https://h/x y.tar"', "curl -s -L http://h/x.tar?a=1&b=2",
    "curl http://h/x.tar http://h/y.tar", "curl -H 'A: b' http://h/x.tar", "curl -u a:b http://h/x.tar",
    "curl http://a:b@h/x.tar", "curl -X POST http://h/x.tar", "curl --range 0-5 http://h/x.tar",
    "curl -k https://h/x.tar", "curl --compressed https://h/x.tar", "curl -o out https://h/x.tar",
    "curl 'http://h/x-[1-3].tar'", "curl http://h/x.tar#f", "curl http://h/../x.tar", "curl h/x.tar", "curl -s",
    "curl -s http://h/x.tar --retry", "gsutil cat -r 0-5 gs://b/o.tar", "gsutil -u project cat gs://b/o.tar",
    "gsutil cat 'gs://b/*.tar'", "gsutil cat gs://b/a gs://b/b", "gsutil cp gs://b/a -",
    "gcloud storage cat --range=0-5 gs://b/o.tar", "gcloud storage ls gs://b/o.tar", "aws s3 cp s3://b/k.tar out",
    "aws s3 cp s3://b/k.tar - --profile p", "aws --endpoint-url http://h s3 cp s3://b/k.tar -",
    "aws s3 cp s3://b/k.tar - --no-sign-request", "az storage blob download -c c -n n --account-name a.b/c",
    "az storage blob download -c c -n n --file out", "az storage blob download -c c -n n --account-key k",
    "az storage blob download -c c", "az storage blob download -c c -n n -n m", "cat a b", "cat -n a", "cat -", "cat",
    "cat ''", "cat *.tar", "cat x?.tar", "cat ~/x.tar", "cat {a,b}.tar", "cat $X", 'cat "$X"', "cat `ls`",
    "cat $(ls)", "cat a | gunzip", "cat a > b", "cat a; rm b", "cat a && true", "cat a || false", "cat a\nrm b",
    "cat a\\ b", "cat 'a", "cat a # b", "X=1 cat a", "/bin/cat a", "ssh host cat a", "dd if=a", "", "pipe:",
]  # fmt: skip


@pytest.mark.parametrize(("command", "url"), [*READ, *((command, None) for command in LEFT_TO_THE_SHELL)])
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
