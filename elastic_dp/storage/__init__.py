"""Objects at a URL: listed, read by ranges, written, on whatever store they lie.

`Store` is all that the rest of the package knows of storage. Any fsspec URL opens one, with the
options that the scheme's fsspec file system takes; where obstore serves the scheme faster, the
bytes go through it.

    URL                  bytes move through            proven against
    file, plain paths    the operating system          a local disk
    memory://            fsspec                        itself
    s3://, s3a://        obstore, else s3fs            moto's S3 server, both ways
    http://, https://    obstore, else fsspec+aiohttp  a small HTTP server, both ways; one file, no
                         listing
    gs://, gcs://        obstore, else gcsfs           fake-gcs-server, both ways
    az://, abfs(s)://    obstore, else adlfs           Azurite, Microsoft's emulator
    chained, others      their fsspec file system      untested

"Else" is: obstore is not installed, the options hold one that it has no word for (`profile`, a
credential object), the credentials are in a file that only botocore reads, or an http URL carries
its credentials in itself.

- A read returns exactly the bytes asked for, of the version asked for, or raises.
- Faults that may pass are retried here and nowhere below, so that they are counted and end within a
  known time.
- No option's value and no credential of a URL is in an error, a repr or a log line.
"""

from fsspec.utils import glob_translate

from elastic_dp.storage.backend import Entry, FolderListing
from elastic_dp.storage.disk_cache import DiskCache
from elastic_dp.storage.error_classes import ObjectMissing, ObjectRewritten
from elastic_dp.storage.file_systems import is_local, list_folder, look_up, open_file_system
from elastic_dp.storage.fsspec_backend import entry_of
from elastic_dp.storage.redact import redact
from elastic_dp.storage.store import Store, StoreCounts
from elastic_dp.urls import StorageURL, redact_url

__all__ = [
    "DiskCache",
    "Entry",
    "FolderListing",
    "ObjectMissing",
    "ObjectRewritten",
    "StorageURL",
    "Store",
    "StoreCounts",
    "entry_of",
    "glob_translate",
    "is_local",
    "list_folder",
    "look_up",
    "open_file_system",
    "redact",
    "redact_url",
]
