"""wds_async.rewrite: rules, quoting, the environment."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_async.errors import ConfigError, UnsafeContent, UrlError
from wds_async.rewrite import parse_rules, rewrite, rule_for, rules_from_env


def rewritten(url: str, rules: str) -> str:
    return rewrite(url, parse_rules(rules))


def test_the_first_rule_that_matches_wins() -> None:
    rules = "gs://a/=/local/a/;gs://=/all/;/all/=/never/"
    assert rewritten("gs://a/x.tar", rules) == "/local/a/x.tar"
    assert rewritten("gs://b/x.tar", rules) == "/all/b/x.tar"
    assert rewritten("s3://b/x.tar", rules) == "s3://b/x.tar"


def test_rules_are_anchored_at_the_start() -> None:
    assert rewritten("http://h/gs://b", "gs://=/x/") == "http://h/gs://b"


def test_groups_and_escapes() -> None:
    assert rewritten("s3://bkt/k.tar", r"s3://([^/]+)/=http://\1.h/") == "http://bkt.h/k.tar"
    assert rewritten("s3://bkt/k.tar", r"s3://(?P<b>\w+)=az://\g<b>-x") == "az://bkt-x/k.tar"
    assert rewritten("s3://bkt/k.tar", r"s3://(\w+)=pipe:get \g<1> ") == "pipe:get bkt /k.tar"
    assert rewritten("x=1;y", r"x\=1\;=z:") == "z:y"
    assert rewritten("gs://b/k", r"gs://=http://h/?path=") == "http://h/?path=b/k"
    assert rewritten("a/b", r"a=x\;y\=z") == "x;y=z/b"


def test_blank_rules_and_layout() -> None:
    assert rewritten("b/x", "a=1; b=2;") == "2/x"
    assert parse_rules("") == parse_rules(" ; ") == ()


def test_a_folder_instead_of_a_bucket() -> None:
    assert rewritten("gs://b/dir/x.tar", "gs://=/shared/data/") == "/shared/data/b/dir/x.tar"


def test_a_replacement_keeps_its_last_space() -> None:
    assert rewritten("gs://b/x.tar", "gs://=pipe:ssh host gsutil cat ") == "pipe:ssh host gsutil cat b/x.tar"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("nothing", 1),
        ("a=b;(=c", 2),
        ("a=b;c=d;=e", 3),
        (r"a=\1", 1),
        (r"a=\g<x>", 1),
        ("[=x", 1),
        (r"a=\q", 1),
        (r"a=\033", 1),
        (r"a=\0", 1),
        (r"a=\123", 1),
    ],
)
def test_a_malformed_rule_is_named(text: str, number: int) -> None:
    with pytest.raises(UrlError, match=re.escape(f"rewrite rule {number}, {text.rpartition(';')[2]!r}"[:-1])):
        parse_rules(text)


@given(st.text(max_size=40))
def test_no_rule_is_identity(url: str) -> None:
    assert rewrite(url, ()) == url


_PLAIN = st.text("abcxyz:/.-_0123", min_size=1, max_size=12)


@given(_PLAIN, _PLAIN, _PLAIN)
def test_a_literal_prefix_is_replaced(prefix: str, replacement: str, rest: str) -> None:
    rule = f"{re.escape(prefix)}={replacement}"
    if replacement.startswith("pipe:"):
        return
    assert rewritten(prefix + rest, rule) == replacement + rest


def _arguments(command: str) -> list[str]:
    """What the shell really makes of a command that begins with ``printf '%s\\n'``."""
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.removesuffix("\n").split("\n")


def test_a_command_gets_the_rest_quoted() -> None:
    made = rewritten("gs://b/o x.tar", "gs://=pipe:gsutil cat gs://")
    assert made == "pipe:gsutil cat gs://'b/o x.tar'"
    assert shlex.split(made) == ["pipe:gsutil", "cat", "gs://b/o x.tar"]
    assert rewritten("gs://b/o.tar", "gs://=pipe:gsutil cat gs://") == "pipe:gsutil cat gs://b/o.tar"


def test_a_command_through_ssh_gets_the_rest_quoted_for_both_shells() -> None:
    rule = "gs://=pipe:ssh proxyhost gsutil cat gs://"
    assert rewritten("gs://b/o.tar", rule) == "pipe:ssh proxyhost gsutil cat gs://b/o.tar"
    _, _, *words = shlex.split(rewritten("gs://b/o x.tar", rule))
    assert shlex.split(" ".join(words)) == ["gsutil", "cat", "gs://b/o x.tar"]


@settings(max_examples=40, deadline=None)
@given(st.text("ab '\"$`\\;&|(){}*?~#!<>", min_size=1, max_size=10))
def test_no_name_can_run_a_command(name: str) -> None:
    for replacement in (r"printf '%s\\n' ", r"printf '%s\\n' \1", r"printf '%s\\n' '\1'", r'printf "%s\\n" "\1"'):
        pattern = r"gs://(.*)" if "1" in replacement else r"gs://"
        made = rewritten(f"gs://{name}", f"{pattern}=pipe:{replacement}")
        assert _arguments(made.removeprefix("pipe:")) == [name]


@settings(max_examples=40, deadline=None)
@given(st.text("ab '\"$`\\;&|(){}*?~#!<>", min_size=1, max_size=10))
def test_no_name_can_run_a_command_behind_ssh(name: str) -> None:
    """What ssh does: join its words, and give them to a shell."""
    remote = 'ssh() { shift; /bin/sh -c "$*"; }; '
    for replacement in (
        r"ssh host printf %s ",
        r"ssh host printf %s \1",
        r"ssh host 'printf %s \1'",
        r'ssh host "printf %s \1"',
        r"""ssh host "printf %s '\1'" """,
        r"""ssh host 'printf %s "\1"' """,
    ):
        pattern = r"gs://(.*)" if "1" in replacement else r"gs://"
        made = rewritten(f"gs://{name}", f"{pattern}=pipe:{replacement}")
        assert _arguments(remote + made.removeprefix("pipe:")) == [name], replacement


def test_a_command_that_was_one_before_is_not_quoted() -> None:
    assert rewritten("pipe:cat a | gunzip", "pipe:cat =pipe:zcat ") == "pipe:zcat a | gunzip"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("gs://b/o", "/data/b/o"),
        ("gcs://b/o", "/data/b/o"),
        ("GCS://b/o", "/data/b/o"),
        ("s3a://b/o", "http://b.h/o"),
        ("s3n://b/o", "http://b.h/o"),
        ("abfs://c/o", "/az/c/o"),
        ("abfss://c/o", "/az/c/o"),
        ("hf://b/o", "hf://b/o"),
        ("gcs:b", "gcs:b"),
        ("gcs", "gcs"),
    ],
)
def test_other_names_follow_their_scheme(url: str, target: str) -> None:
    assert rewritten(url, r"gs://=/data/;s3://([^/]+)/=http://\1.h/;az://=/az/") == target


def test_a_rule_for_the_name_as_written_wins_wherever_it_stands() -> None:
    rules = "gs://=/scheme/;gcs://a/=/written/"
    assert rewritten("gcs://a/o", rules) == "/written/o"
    assert rewritten("gcs://b/o", rules) == "/scheme/b/o"
    assert rewritten("gs://a/o", rules) == "/scheme/a/o"  # the scheme does not follow its other names
    assert rewritten("gcs://b/o", "s3://=/x/") == "gcs://b/o"  # and what no rule matches stays as it is


def test_quoting_holds_for_other_names_too() -> None:
    assert rewritten("gcs://b/o x", "gs://=pipe:gsutil cat gs://") == "pipe:gsutil cat gs://'b/o x'"


def test_the_rule_that_is_applied_can_be_asked_for() -> None:
    rules = parse_rules("s3://=/s3/;gs://=/gs/")
    assert rule_for("gcs://b/o", rules) is rules[1]
    assert rule_for("s3://b/o", rules) is rules[0]
    assert rule_for("http://h/o", rules) is None


def test_rules_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE"):
        monkeypatch.delenv(name, raising=False)
    assert rules_from_env() == ()
    monkeypatch.setenv("GOPEN_REWRITE", "a=old")
    assert rewrite("a", rules_from_env()) == "old"
    monkeypatch.setenv("WDS_REWRITE", "a=new")
    assert rewrite("a", rules_from_env()) == "new"
    assert rules_from_env() is rules_from_env()
    monkeypatch.setenv("WDS_REWRITE", "bad")
    with pytest.raises(UrlError, match="rewrite rule 1, 'bad'"):
        rules_from_env()


def test_secure_mode_refuses_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOPEN_REWRITE", raising=False)
    monkeypatch.setenv("WDS_SECURE", "1")
    monkeypatch.setenv("WDS_REWRITE", "a=b")
    text = "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables"
    with pytest.raises(UnsafeContent, match=text):
        rules_from_env()
    monkeypatch.delenv("WDS_REWRITE")
    assert rules_from_env() == ()
    monkeypatch.setenv("WDS_SECURE", "perhaps")
    with pytest.raises(ConfigError, match="WDS_SECURE"):
        rules_from_env()
