"""AIStore."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="ais",
    schemes=("ais",),
    backend="wds_async.storage.ais.backend:AisBackend",
    sink="wds_async.storage.ais.put:AisSink",
    deadlines=True,
    announced=True,
    batches=True,
    buckets=True,
    object_store=True,
    has_query=True,
    router="wds_async.storage.ais.urls:routes",
    router_variables=("AIS_ENDPOINT", "USE_AIS_FOR"),
    has_origin="wds_async.storage.ais.urls:has_own_store",
    variables=("AIS_",),
)
