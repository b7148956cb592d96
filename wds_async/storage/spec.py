"""The facts of one kind of store, as data: every store's folder has one, and `stores` collects them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoreSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """One kind of store. Code is named as in an entry point, ``"module:object"``, and imported when it is first used,
    so that reading one store imports no other's client."""

    kind: str
    """`Location.kind`, also in logs and metrics."""
    schemes: tuple[str, ...] = ()
    """Schemes of its URLs, the usual one first."""
    aliases: tuple[str, ...] = ()
    """Other names of the usual scheme, which rewrite rules, ``USE_AIS_FOR`` and options follow."""
    replaced: tuple[str, ...] = ()
    """Schemes that its client does not know: the usual one takes their place in the URL."""
    web_services: tuple[str, ...] = ()
    """Hosts below which an ``https`` URL is one of this store, after an account's name and a dot."""
    web_signature: str = ""
    """The query parameter that signs such a URL, which is then read as it stands."""

    backend: str = ""
    """Its `Backend`: called with ``call``, ``options``, ``direct`` and the two timeouts."""
    imports: tuple[str, ...] = ()
    """Modules that the first read imports (0.2 to 0.4 s of CPU for the clouds), besides the backend's own."""
    extra: str = ""
    """The extra of this package that brings its client."""
    protocols: tuple[str, ...] = ()
    """Other protocols of fsspec that the same extra brings."""
    configuration: tuple[str, ...] = ()
    """Protocols whose section of fsspec's configuration goes under the options, the later over the earlier."""
    fsspec_options: str = ""
    """``f(options)``: the options for its fsspec filesystem."""
    fsspec_class: str = ""
    """The fsspec filesystem that is used in place of the registered one."""

    sink: str = "wds_async.storage.upload:fsspec_sink"
    """``f(location)``: the `Sink` that writes to it."""
    publish: str = ""
    """Call that makes an object of a written fsspec file: ``commit`` (the file obeys ``autocommit=False``), ``close``
    (parts of a file that is never closed are dropped), or "" where it is visible while it is written."""
    write_options: str = ""
    """``f(url, options)``: the URL and the options of the fsspec filesystem that writes ``url``."""
    writer: str = ""
    """``f(url, options, filesystem)``: the `Writer`, for errors of writing. May block."""
    explain_write: str = ""
    """``f(exn, identity=..., **writer.details)``: an error of its fsspec filesystem as a `Fault`, None for others."""
    quotes_answers: bool = False
    """True if its client's exceptions quote whole answers, signatures included, and so are never shown."""

    has_server: bool = True
    """True if reading needs a server: attempts, circuit breakers and origins are counted by it."""
    in_order: bool = False
    """True if it is read once, from the start on, and nothing keeps a checksum of it."""
    guarded: bool = False
    """True if its URLs name the server, which the service's guard must allow."""
    deadlines: bool = False
    """True if another package's client asks its questions, so that each of them needs a deadline."""
    routable: bool = False
    """True if ``USE_AIS_FOR`` may route it through AIStore."""
    router: str = ""
    """``f(target, options) -> bool``: whether the URL of another store is read through this one."""
    router_variables: tuple[str, ...] = ()
    """Environment variables without which, and without options, ``router`` is not asked."""
    has_origin: str = ""
    """``f(target) -> bool``: whether a routed URL can be read from its own store too."""
    announced: bool = False
    """True if its backend is told of each shard when it is queued (`Backend.expect`)."""
    batches: bool = False
    """True if its backend may read ranges of many objects by one request (`Backend.batch`)."""

    buckets: bool = False
    """True if a URL names a bucket and the configuration names the server."""
    object_store: bool = False
    """True if keys are any text ("", "." and ".." too), and listing is permitted apart from reading."""
    lists_versions: bool = False
    """True if its listings tell the versions of objects."""
    sends_checksum: bool = False
    """True if every answer brings the checksum that the store could be asked for."""
    has_query: bool = False
    """True if "?" begins a query in its URLs."""
    percent_encoded: bool = False
    """True if names are percent-encoded in its URLs."""
    dotted_keys: str = ""
    """Rule for keys with "." and ".." in the service: ``always`` (they are escaped on the wire), ``open`` (only
    where no allowlist could be evaded), "" for never."""
    repositories: tuple[str, ...] = ()
    """Kinds of repositories, one of which is the host of a URL (the first, where there is none). A repository is the
    next two parts, the second with "@" and a revision, or without."""
    account_hosts: bool = False
    """True if the host may be a container, "@" and an account's host, whose case does not count."""
    variables: tuple[str, ...] = ()
    """Environment variables that decide which account is used; ``AWS_`` stands for all of this package's with that
    prefix."""
    origin: str = ""
    """``f(target, options)``: the origin that traffic counts for, where it is not ``scheme://bucket``."""
