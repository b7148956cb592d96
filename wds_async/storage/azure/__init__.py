"""Azure Blob Storage."""

from wds_async.storage.spec import StoreSpec

__all__ = ["SPEC"]

SPEC = StoreSpec(
    kind="azure",
    schemes=("az",),
    aliases=("abfs", "abfss"),
    web_services=("blob.core.windows.net", "blob.core.chinacloudapi.cn", "blob.core.usgovcloudapi.net"),
    web_signature="sig",
    backend="wds_async.storage.azure.backend:AzureBackend",
    imports=("azure.storage.blob.aio", "azure.identity.aio"),
    extra="azure",
    protocols=("adl",),
    configuration=("abfs", "az"),
    publish="close",
    write_options="wds_async.storage.azure.account:write_options",
    writer="wds_async.storage.azure.account:writer",
    explain_write="wds_async.storage.azure.errors:explain_writing",
    quotes_answers=True,
    deadlines=True,
    routable=True,
    buckets=True,
    object_store=True,
    lists_versions=True,
    sends_checksum=True,
    account_hosts=True,
    variables=(
        "AZURE_",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_TENANT_ID",
        "AZURE_STORAGE_ANON",
        "AZURE_CLIENT_ID",
        "AZURE_TENANT_ID",
    ),
    origin="wds_async.storage.azure.account:origin_of",
)
