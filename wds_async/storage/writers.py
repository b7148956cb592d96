"""Who writes to a store through its filesystem of fsspec: named where writing fails, and its secrets hidden there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.storage.azure.account import account_of, parse
from wds_async.storage.hiding import Secrets

__all__ = ["Writer", "close_writer", "writer_of"]


_NO_SECRETS = frozenset({"host", "port", "user", "username"})


@dataclass(frozen=True, slots=True)
class Writer:
    """``identity`` in words, the ``kind`` of an Azure account, and the ``secrets`` that were sent."""

    identity: str = "the credentials that write"
    kind: str = ""
    secrets: Secrets = field(default_factory=Secrets)


def writer_of(name: str, url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """As whom ``filesystem`` (None where it could not be made) writes ``url``, which is of the store ``name``. Asked
    once writing has failed: it raises nothing, but may block."""
    with contextlib.suppress(Exception):  # must not hide the error that led here
        if name == "s3":
            return _amazon(filesystem)
        if name == "gs":
            return _google(options, filesystem)
        if name == "az":
            return _azure(url, options)
        if name == "hf":
            return _hub(options)
    return Writer(secrets=Secrets(*(value for option, value in options.items() if option not in _NO_SECRETS)))


def _amazon(filesystem: Any) -> Writer:
    from wds_async.storage.s3.client import key_in_words  # noqa: PLC0415 (only where it is of use)

    if filesystem.anon:
        return Writer("anonymous")
    given = filesystem.client_kwargs
    key = filesystem.key or given.get("aws_access_key_id")
    if key:
        tokens = filesystem.token, given.get("aws_session_token")
        secrets = Secrets(filesystem.secret, given.get("aws_secret_access_key"), *tokens)
        return Writer(key_in_words(str(key), None), secrets=secrets)
    found = filesystem.session._credentials
    frozen = found if not hasattr(found, "_frozen_credentials") else found._frozen_credentials or found
    secrets = Secrets(frozen.secret_key, frozen.token)
    return Writer(key_in_words(frozen.access_key, found), secrets=secrets)


def _google(options: Mapping[str, Any], filesystem: Any) -> Writer:
    from wds_async.storage.gcs.credentials import find_identity  # noqa: PLC0415 (only where it is of use)

    used = getattr(getattr(filesystem, "credentials", None), "credentials", None)
    secrets = Secrets(getattr(used, "token", None), options.get("token"))
    return Writer(find_identity({"access": "full_control", **options}).who, secrets=secrets)


def _azure(url: str, options: Mapping[str, Any]) -> Writer:
    account = account_of(url, parse(url), options)
    secrets = Secrets()
    for secret in account.secret if isinstance(account.secret, tuple) else (account.secret,):
        if isinstance(secret, str):
            secrets.add(secret)
            secrets.add_query(secret)
    return Writer(account.identity, account.kind, secrets)


def _hub(options: Mapping[str, Any]) -> Writer:
    from wds_async.storage.hub.backend import identity_of  # noqa: PLC0415 (only where it is of use)

    identity, secrets = identity_of(options), Secrets()
    secrets.add_headers(identity.headers)
    return Writer(identity.described, secrets=secrets)


def close_writer(filesystem: Any) -> None:
    """Close the client of an s3fs that only this writer has; harmless for others. It lives on fsspec's own loop, and
    closed by garbage collection it would end in the middle of it."""
    maker, loop = getattr(filesystem, "_s3creator", None), getattr(filesystem, "loop", None)
    if maker is None or loop is None or getattr(filesystem, "_s3", None) is None:
        return
    from fsspec.asyn import sync  # noqa: PLC0415 (loaded by now)

    filesystem._s3creator = filesystem._s3 = None
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[0] is filesystem:
            finalizer.detach()
    with contextlib.suppress(Exception):  # must not hide the error that led here
        sync(loop, maker.__aexit__, None, None, None, timeout=5.0)
