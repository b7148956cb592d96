"""Secrets that a server repeats."""

from __future__ import annotations

import pytest

from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.secrets import Secrets, code_shown


def test_what_was_sent_is_hidden_in_every_form() -> None:
    secrets = Secrets("a+b/c=", None, "abc", 12)
    secrets.add_headers(
        [("Authorization", "Bearer tok-en"), ("X-Amz-Security-Token", "session"), ("Range", "bytes=0-1")]
    )
    secrets.add_query("sv=1&sig=x%2Fyz")
    said = "a+b/c= a%2Bb%2Fc%3D tok-en session x/yz x%2Fyz bytes=0-1 abc"
    assert secrets.hidden(said) == "*** *** *** *** *** *** bytes=0-1 abc"
    assert "tok-en" not in repr(secrets)


def test_answers_and_faults() -> None:
    secrets = Secrets("hush-hush")
    answer = secrets.of_answer(Answer(403, {"x": "no hush-hush"}, b"\xff hush-hush"))
    assert answer == Answer(403, {"x": "no ***"}, b"\xff ***")
    assert secrets.of_fault(Fault(Verdict.DENIED, "hush-hush", "not hush-hush")) == Fault(
        Verdict.DENIED, "***", "not ***"
    )


def test_only_the_newest_are_kept() -> None:
    secrets = Secrets("old-one")
    for number in range(300):
        secrets.add(f"value-{number}")
    assert secrets.hidden("old-one value-299 value-250") == "old-one *** ***"


@pytest.mark.parametrize("code", ["", "a b", "x" * 81, "?sig=abc", "é"])
def test_a_code_that_is_none(code: str) -> None:
    assert code_shown(code) == ""
    assert code_shown("Auth.Failed-1_2") == "Auth.Failed-1_2"
