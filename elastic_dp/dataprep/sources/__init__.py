"""Source formats of `convert`, as a stream of Arrow record batches:
`open_rows(find_source(url)).batches()`.

Files are read in the order of their names, and each row once. Memory holds a few blocks of a file,
whatever its size. Anything that cannot be read raises a DataError that names the file.
"""

from elastic_dp.dataprep.sources.detect_format import (
    InputSource,
    find_source,
    open_documents,
    open_rows,
)
from elastic_dp.dataprep.sources.row_stream import Documents, Rows
from elastic_dp.dataprep.sources.source_files import Files, list_files

__all__ = [
    "Documents",
    "Files",
    "InputSource",
    "Rows",
    "find_source",
    "list_files",
    "open_documents",
    "open_rows",
]
