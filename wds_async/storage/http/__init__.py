"""Web servers."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="http",
    schemes=("http", "https"),
    backend="wds_async.storage.http.backend:HttpBackend",
    sink="wds_async.storage.upload:HttpSink",
    guarded=True,
    deadlines=True,
    routable=True,
    has_query=True,
    percent_encoded=True,
    variables=("NETRC",),
)
