"""Google Cloud Storage."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="gcs",
    schemes=("gs",),
    aliases=("gcs",),
    replaced=("htgs",),
    backend="wds_async.storage.gcs.backend:GcsBackend",
    imports=("google.auth.transport.requests", "google.oauth2.service_account"),
    extra="gcs",
    configuration=("gcs", "gs"),
    fsspec_options="wds_async.storage.gcs.credentials:gcsfs_options",
    # gcsfs's default class asks by gRPC how the bucket is laid out, and waits 60 s where that is not to be had.
    fsspec_class="gcsfs.core:GCSFileSystem",
    publish="commit",
    writer="wds_async.storage.gcs.credentials:writer",
    explain_write="wds_async.storage.gcs.errors:explain_write",
    deadlines=True,
    routable=True,
    buckets=True,
    object_store=True,
    lists_versions=True,
    sends_checksum=True,
    dotted_keys="always",
    variables=("GOOGLE_", "STORAGE_", "CLOUDSDK_CONFIG"),
)
