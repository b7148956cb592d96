"""``storage_options=``: options of the stores' clients, over those of their own environment."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wds_async.errors import ConfigError
from wds_async.storage.stores import BY_SCHEME, installed_stores, known_protocol
from wds_async.urls import links, scheme

__all__ = ["NOTHING_GIVEN", "NO_OPTIONS", "Options", "StorageOptions", "check_names"]
_PLACES = ("endpoint_url", "endpoint", "account_host", "account_name", "connection_string", "host", "port")
_SECRETS = re.compile(r"(?:AccountKey|SharedAccessSignature)=[^;]*;?|(?<=://)[^/@]*@", re.IGNORECASE)
_DIGEST_DIGITS = 16


class Options(Mapping[str, Any]):
    """The options of one store: frozen, hashable, and shown by their names only."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._key = repr(sorted(self._given.items(), key=lambda item: item[0]))

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key

    @property
    def place(self) -> str:
        """A digest of the endpoint and account among these options, "" where they name none: one URL may mean different
        objects there."""
        options = (
            {**(self.get("client_kwargs") or {}), **self} if isinstance(self.get("client_kwargs"), Mapping) else self
        )
        named = [(name, _SECRETS.sub("", str(options[name]))) for name in _PLACES if options.get(name)]
        return hashlib.sha256(repr(named).encode()).hexdigest()[:_DIGEST_DIGITS] if named else ""

    def __repr__(self) -> str:
        return f"<options: {', '.join(sorted(self._given)) or 'none'}>"


NO_OPTIONS = Options({})


class StorageOptions:
    """Options of the program: by scheme, ``{"s3": {"key": …}, "gs": {…}}``, or one store's without a scheme,
    ``{"key": …, "secret": …}``, which are then those of every URL that is read. Names are those of the fsspec
    filesystem (s3fs, gcsfs, adlfs, …); for HTTP and AIStore see `http` and `ais`. ConfigError for what is neither.
    """

    def __init__(self, given: Mapping[str, Any] | StorageOptions | None = None) -> None:
        self._all: Options | None = None
        self._by_scheme: dict[str, Options] = {}
        if isinstance(given, StorageOptions):
            self._all, self._by_scheme = given._all, given._by_scheme
            return
        given = {} if given is None else given
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"storage_options: a dict of options, or of such dicts by scheme, not {type(given).__name__}"
            )
        schemes = {name for name in given if _is_scheme(name)}
        if any(isinstance(given[name], Mapping) or name.lower().removesuffix("://") in BY_SCHEME for name in schemes):
            if wrong := sorted(name for name in given if name not in schemes or not isinstance(given[name], Mapping)):
                raise ConfigError(
                    f"storage_options: {', '.join(map(repr, wrong))}: beside the options of a scheme stand those of "
                    'other schemes only, each a dict: {"s3": {…}, "gs": {…}}'
                )
            self._by_scheme = {_canonical(name): Options(value) for name, value in given.items()}
        elif given:
            self._all = Options(given)

    def of(self, url: str) -> Options:
        """Return the options for ``url`` (rewritten). Those of a chain are by link, as fsspec takes them."""
        if self._all is not None:
            return self._all
        if len(chain := links(url)) > 1 and self._by_scheme:
            by_link = {protocol: self.of(f"{protocol}://") for protocol in (link.partition("://")[0] for link in chain)}
            return Options({protocol: dict(options) for protocol, options in by_link.items() if options})
        return self._by_scheme.get(_canonical(scheme(url)), NO_OPTIONS) if self._by_scheme else NO_OPTIONS

    def named(self, name: str) -> Options:
        """Return the options for the scheme ``name`` alone, without those for every store."""
        return self._by_scheme.get(_canonical(name), NO_OPTIONS)

    def __bool__(self) -> bool:
        return self._all is not None or bool(self._by_scheme)

    def __repr__(self) -> str:
        return repr(self._all) if self._all is not None else f"<options of {', '.join(sorted(self._by_scheme))}>"


def check_names(scheme: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError, without any value, for a name in ``options`` that is not ``known`` (usual ones first)."""
    if unknown := sorted(name for name in options if name not in known):
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known[:6])}"
        raise ConfigError(f"storage_options for {scheme}: {', '.join(unknown)} means nothing here; {meant}")


NOTHING_GIVEN = StorageOptions()


def _canonical(name: str) -> str:
    name = name.lower().removesuffix("://")
    return BY_SCHEME[name].schemes[0] if name in BY_SCHEME else name


def _is_scheme(name: str) -> bool:
    name = name.lower().removesuffix("://")
    return name == "file" or name in BY_SCHEME or known_protocol(name) or name in installed_stores()
