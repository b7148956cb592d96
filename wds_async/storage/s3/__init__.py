"""S3, and what speaks its protocol."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="s3",
    schemes=("s3",),
    aliases=("s3a", "s3n"),
    replaced=("s3n",),
    backend="wds_async.storage.s3.backend:S3Backend",
    imports=("s3fs",),
    extra="s3",
    fsspec_options="wds_async.storage.s3.options:s3fs_options",
    publish="commit",
    writer="wds_async.storage.s3.client:writer",
    explain_write="wds_async.storage.s3.errors:explain_foreign_s3",
    deadlines=True,
    routable=True,
    buckets=True,
    object_store=True,
    lists_versions=True,
    dotted_keys="open",
    variables=(
        "AWS_",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_ENDPOINT_URL",
        "AWS_ROLE_ARN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ),
)
