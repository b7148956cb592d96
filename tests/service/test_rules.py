"""What the fast lane may answer: what the slow way has let pass, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.servers import Origin
from tests.service.serving import Inside, ask
from wds_async.service.door import Pass
from wds_async.service.objects import SERVER
from wds_async.service.rules import ServiceRules


def on_loop(service: Inside, function: Callable[[], Any]) -> Any:
    async def call() -> Any:
        return function()

    return service.call(call())


def test_names_pass_once_they_are_known(origin: Origin) -> None:
    url = origin.add("/d/x.tar", b"12345")
    with Inside(allow=(origin.base,), buckets={"b": f"{origin.base}/d/"}, private=True) as service:
        rules, target = ServiceRules(service.service), "/v1/objects/b/x.tar?provider=ais"
        assert on_loop(service, lambda: rules.name(target)) is None
        assert ask(service.base + target)[0] == 200
        assert on_loop(service, lambda: rules.name(target)) == Pass(url, "ais")
        assert on_loop(service, lambda: rules.name(target + "&archpath=a")) is None
        assert on_loop(service, lambda: rules.name("/v1/objects/%zz")) is None
        assert on_loop(service, lambda: rules.name("/healthz")) is None


def test_nothing_passes_where_clients_have_a_pace(origin: Origin) -> None:
    origin.add("/d/x.tar", b"12345")
    given = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    with Inside(**given, client_bytes_per_s=1e9) as service:
        assert ask(f"{service.base}/ais/b/x.tar")[0] == 200
        assert on_loop(service, lambda: ServiceRules(service.service).name("/ais/b/x.tar")) is None


def test_who_is_let_in(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("right alice\n")
    with Inside(tokens=tmp_path / "tokens") as service:
        rules = ServiceRules(service.service)

        def who(token: bytes) -> Any:
            return on_loop(service, lambda: rules.who({b"authorization": b"Bearer " + token}, "10.0.0.1", local=False))

        assert who(b"right") == ("alice@10.0.0.1", "alice")
        assert who(b"wrong") is None


def test_what_is_known_of_an_object(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("/d/x.tar", b"12345")
    given = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    with Inside(**given, folder=tmp_path / "cache") as service:
        rules = ServiceRules(service.service)
        assert on_loop(service, lambda: rules.peek(url, "")) is None
        assert ask(f"{service.base}/ais/b/x.tar")[2] == b"12345"
        held = on_loop(service, lambda: rules.peek(url, ""))
        fields = on_loop(service, lambda: rules.fields(held, "ais"))
        assert (fields["Server"], fields["ETag"]) == (SERVER, ask(url, "HEAD")[1]["etag"])
        on_loop(service, held.release)


def test_requests_are_counted_with_the_others(origin: Origin) -> None:
    with Inside(client_requests=1) as service:
        rules = ServiceRules(service.service)
        assert [on_loop(service, lambda: rules.enter("a")) for _ in range(2)] == [True, False]
        assert len(service.service.underway) == 1
        on_loop(service, lambda: rules.leave("a"))
        on_loop(service, lambda: rules.heard("a", "gs://b/x"))  # who has no plan is no trouble
