"""The Hugging Face hub."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="hf",
    schemes=("hf",),
    backend="wds_async.storage.hub.backend:HuggingFaceBackend",
    extra="hf",
    writer="wds_async.storage.hub.backend:writer",
    deadlines=True,
    routable=True,
    buckets=True,
    has_query=True,
    repositories=("models", "datasets", "spaces", "kernels", "buckets"),
    variables=("HF_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME"),
    origin="wds_async.storage.hub.backend:origin_of",
)
