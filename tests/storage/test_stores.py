"""The specs of the stores: what they name exists, and no two say the same of one scheme."""

from __future__ import annotations

import importlib
import inspect

import pytest

from wds_async.storage.http import SPEC as HTTP
from wds_async.storage.spec import StoreSpec
from wds_async.storage.stores import BY_SCHEME, STORES, load, spec_of, usual_scheme, web_store

HOOKS = (
    "backend", "sink", "fsspec_options", "fsspec_class", "write_options", "writer", "explain_write", "router",
    "has_origin", "origin",
)  # fmt: skip
KINDS = [*STORES, *map(spec_of, ("local", "pipe", "stdin", "opener", "generic"))]


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind)
def test_what_a_spec_names_can_be_called(spec: StoreSpec) -> None:
    for module in spec.imports:
        try:
            importlib.import_module(module)
        except ImportError:
            pytest.skip(f"{module} is not installed")
    for hook in HOOKS:
        if name := getattr(spec, hook):
            assert callable(load(name)), hook
    backend = inspect.signature(load(spec.backend)).parameters
    assert "call" in backend
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in backend.values())
    assert passes_on or ("direct" in backend) is bool(spec.schemes)
    assert ("guard" in backend) is spec.guarded


def test_a_scheme_is_of_one_store() -> None:
    names = [name for spec in STORES for name in (*spec.schemes, *spec.aliases)]
    assert len(names) == len(set(names)) == len(BY_SCHEME)
    assert all(spec.schemes and spec.kind for spec in STORES)


def test_aliases_and_kinds() -> None:
    assert [usual_scheme(name) for name in ("s3a", "gcs", "abfss", "https", "ftp")] == [
        "s3",
        "gs",
        "az",
        "https",
        "ftp",
    ]
    plugin = spec_of("plugin:mine")
    assert (plugin.schemes, plugin.has_server, plugin.deadlines, plugin.buckets) == (("mine",), True, True, False)
    assert web_store("https://host/x.tar") is HTTP
