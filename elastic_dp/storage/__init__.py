"""Objects at a URL: listed, read by ranges, written, on whatever store they lie.

`Store` is all that the rest of the package knows of storage.

    URL                  bytes move through            proven against
    file, plain paths    the operating system          a local disk
    s3://, s3a://        obstore                       moto's S3 server
    gs://, gcs://        obstore                       fake-gcs-server
    az://, abfs(s)://    obstore                       Azurite, Microsoft's emulator
    http://, https://    obstore                       a small HTTP server; one file, no listing
    memory://            obstore, in this process      itself
    chained, others      their fsspec file system      untested

- A read returns exactly the bytes asked for, of the version asked for, or raises.
- Faults that may pass are retried here and nowhere below, so that they are counted and end within a
  known time.
- No option's value and no credential of a URL is in an error, a repr or a log line.
"""

from fsspec.utils import glob_translate as glob_translate

from elastic_dp.storage.backend import Entry as Entry
from elastic_dp.storage.backend import FolderListing as FolderListing
from elastic_dp.storage.error_classes import ObjectMissing as ObjectMissing
from elastic_dp.storage.error_classes import ObjectRewritten as ObjectRewritten
from elastic_dp.storage.redact import redact as redact
from elastic_dp.storage.store import Store as Store
from elastic_dp.storage.store import StoreCounts as StoreCounts
from elastic_dp.urls import StorageURL as StorageURL
from elastic_dp.urls import redact_url as redact_url
