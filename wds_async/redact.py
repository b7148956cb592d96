"""Secrets in URLs and commands, hidden before they are shown.

Every message, log line and state of the project shows URLs through `redact`. It errs on the side of hiding:
a harmless parameter whose name holds ``key`` or ``sig`` is hidden too.
"""

from __future__ import annotations

import re

__all__ = ["redact"]

_HIDDEN = "***"
# Most names are like this, and a job has a million of them: nothing in it can be a secret.
_HARMLESS = re.compile(r"(?:[a-z0-9+.\-]+://)?[\w./\-]*", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SECRET = r"(?:key|token|secret|sig|passw|pwd|credential|session|bearer|jwt)"

# scheme://user:password@host. The user stays, because adlfs puts the container there and ssh the account.
_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.\-]{0,40}://[^\s/?#@:'\"]*):[^\s/?#'\"]*@", re.IGNORECASE)
# https://TOKEN@host, as code hosts write it.
_LONE_USER = re.compile(r"\b(https?://)[^\s/?#@:'\"]+@", re.IGNORECASE)
# name=value in a query (also after ;), and NAME=value at the start of a shell word.
_PARAMETER = re.compile(
    rf"((?:^|[?&;\s'\"]|\bpipe:)(?=[\w.%\-]*{_SECRET})[\w.%\-]++=)(?:'[^']*'|\"[^\"]*\"|[^&#\s'\"])*", re.IGNORECASE
)
_HEADER_NAME = r"(?:proxy-)?authorization|(?:set-)?cookie|[\w\-]*-(?:auth|key|token|secret|signature)"
_QUOTED_HEADER = re.compile(rf"(['\"])({_HEADER_NAME})\s*:.*?\1", re.IGNORECASE | re.DOTALL)
_BARE_HEADER = re.compile(
    rf"(?<![\w\-])({_HEADER_NAME})(:(?:\\?\s)*)(?:(?:basic|bearer|digest|token)(?:\\?\s)+)?[^\s'\"]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer(?:\\?\s)+)[^\s'\"]+", re.IGNORECASE)
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+"
# --account-key X, --sas-token=X, --oauth2-bearer X; a plain --key is an object's name to aws s3api.
_OPTION = re.compile(
    rf"((?<!\S)--?(?:[\w\-]+-(?:key|bearer)|[\w\-]*(?:token|secret|passw(?:or)?d|connection-string))(?:\s+|=)){_VALUE}",
    re.IGNORECASE,
)
_OPTION_USER = re.compile(r"((?<!\S)(?:-u|-U|--user|--proxy-user)(?:\s*|=)['\"]?[^\s:'\"]+):[^\s'\"]+")


def redact(url: str) -> str:
    """Return ``url`` (or a ``pipe:`` command) with every secret replaced by ``***``. Idempotent.

    Hidden are passwords in ``user:password@``, a lone user of ``http(s)://``, the values of parameters whose name
    tells of a key, token, secret, signature, password or credential (``X-Amz-Signature``, ``sig``,
    ``AWSAccessKeyId``, …), and in commands ``Authorization:`` and similar headers, ``-u user:password``, and
    options such as ``--account-key``. Hosts, buckets, object names and other parameters stay readable. Control
    characters, which a terminal would obey, become escapes.
    """
    if _HARMLESS.fullmatch(url):
        return url
    text = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), url)
    text = _PASSWORD.sub(rf"\1:{_HIDDEN}@", text)
    text = _LONE_USER.sub(rf"\1{_HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\1{_HIDDEN}", text)
    text = _QUOTED_HEADER.sub(rf"\1\2: {_HIDDEN}\1", text)
    text = _BARE_HEADER.sub(rf"\1\2{_HIDDEN}", text)
    text = _BEARER.sub(rf"\1{_HIDDEN}", text)
    text = _OPTION.sub(rf"\1{_HIDDEN}", text)
    return _OPTION_USER.sub(rf"\1:{_HIDDEN}", text)
