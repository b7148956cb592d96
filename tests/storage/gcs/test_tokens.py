"""Tokens: on a thread, in time, once for all, and never shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from google.auth import compute_engine
from google.auth.exceptions import RefreshError, TransportError
from google.oauth2.credentials import Credentials

from tests.servers.fakegcs import clean_google
from tests.servers.gcemetadata import GceMetadata, gce_metadata
from wds_async.storage.gcs.credentials import AuthFailed, GoogleTokens, translated

__all__ = ["clean_google", "gce_metadata"]

T = TypeVar("T")


def run(credentials: Any, use: Callable[[GoogleTokens], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        return await use(GoogleTokens(asyncio.to_thread, credentials))

    return asyncio.run(main())


def metadata() -> Any:
    return compute_engine.Credentials()  # type: ignore[no-untyped-call]


def test_nobody_sends_nothing() -> None:
    async def use(tokens: GoogleTokens) -> None:
        assert await tokens.headers() == ((), float("inf"))
        assert not tokens.refreshable
        assert tokens.bearer == "anon"

    run(None, use)


def test_an_access_token_is_used_as_it_is() -> None:
    async def use(tokens: GoogleTokens) -> None:
        tokens.refuse()
        headers, until = await tokens.headers()
        assert headers == (("authorization", "Bearer ya29.x"),)
        assert until == float("inf")
        tokens.refuse()
        assert (await tokens.headers())[0] == headers
        assert not tokens.refreshable

    run(Credentials("ya29.x"), use)  # type: ignore[no-untyped-call]


def test_once_for_all_and_four_minutes_before_its_end(gce_metadata: GceMetadata) -> None:
    async def use(tokens: GoogleTokens) -> None:
        found = await asyncio.gather(*(tokens.headers() for _ in range(20)))
        assert len(set(found)) == 1
        assert gce_metadata.token_requests == 1
        assert 3600 - 245 < found[0][1] - time.monotonic() < 3600 - 235
        assert tokens.bearer.token == gce_metadata.handed_out[0]

    run(metadata(), use)


def test_a_refused_one_is_replaced_for_all(gce_metadata: GceMetadata) -> None:
    async def use(tokens: GoogleTokens) -> None:
        await tokens.headers()
        bearer = tokens.bearer
        gce_metadata.expire()
        tokens.refuse()
        found = await asyncio.gather(*(tokens.headers() for _ in range(20)))
        assert {headers[0][1] for headers, _ in found} == {f"Bearer {gce_metadata.handed_out[1]}"}
        assert gce_metadata.token_requests == 2
        assert bearer.token == gce_metadata.handed_out[1]  # gcsfs holds this object

    run(metadata(), use)


def test_short_ones_are_not_asked_for_without_end(gce_metadata: GceMetadata) -> None:
    gce_metadata.lifetime_s = 0.01

    async def use(tokens: GoogleTokens) -> None:
        _, until = await tokens.headers()
        assert until > time.monotonic() + 0.3

    run(metadata(), use)


class Failing(Credentials):
    """Hands out a token once, and then what it is told to raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.error = error
        self._refresh_token = "marked-secret"

    def refresh(self, request: Any) -> None:
        import datetime

        if self.token is not None:
            raise self.error
        self.token = "ya29.first"
        self.expiry = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=200)


def test_the_old_one_is_kept_while_no_new_one_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(tokens: GoogleTokens) -> None:
        first, until = await tokens.headers()
        assert 140 < until - time.monotonic() < 155  # three quarters of 200 s
        now = time.monotonic()
        monkeypatch.setattr("wds_async.storage.gcs.credentials.time.monotonic", lambda: now + 160)
        again, later = await tokens.headers()
        assert again == first
        assert later > now + 160
        tokens.refuse()  # but not one that was refused
        with pytest.raises(AuthFailed) as caught:
            await tokens.headers()
        assert caught.value.retryable

    run(Failing(TransportError("down")), use)


@pytest.mark.parametrize(
    ("error", "retryable", "words"),
    [
        (
            RefreshError("invalid_grant: gone", {"access_token": "marked-secret"}),
            False,
            "RefreshError: invalid_grant: gone",
        ),
        (RefreshError('{"id_token": "marked-secret"}'), False, '{"id_token": "***"}'),
        (RefreshError("busy", retryable=True), True, "busy"),
        (RefreshError(TransportError("no route")), True, "no route"),
        (TransportError("no route"), True, "no route"),
        (KeyError("refresh_token"), False, "refresh_token is missing"),
        (ValueError(), False, "ValueError"),
    ],
)
def test_only_words_leave(error: Exception, retryable: bool, words: str) -> None:
    with pytest.raises(AuthFailed) as caught, translated("why"):
        raise error
    assert caught.value.retryable is retryable
    assert words in str(caught.value)
    assert "marked-secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
