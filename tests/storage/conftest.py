"""The stores that the contract is held against: each a kind of URL, and a way to put objects
there."""

import itertools
import json
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import obstore
import pytest

from elastic_dp.storage import Store
from elastic_dp.storage.obstore_backend import memory_store
from tests.patience import PATIENCE_S
from tests.storage.servers import AZURE_KEY, azure_options, gcs_options, http_server, s3_options

_numbers = itertools.count()


@dataclass
class Place:
    """`plant(name, content)` puts an object below `url` without the code under test, which needs no
    writes."""

    url: str
    options: dict[str, Any]
    backend: str
    plant: Callable[[str, bytes], None]
    lists: bool = True
    stores: list[Store] = field(default_factory=list)

    def open(self, name="", **limits):
        store = Store(f"{self.url}{name}{self.suffix}", self.options, **limits)
        assert type(store._backend).__name__ == self.backend
        return store

    suffix: str = ""


@pytest.fixture
def bucket(moto):
    """(endpoint, name) of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    send("PUT", f"{moto}/{name}")
    return moto, name


def send(method, url, content=None):
    # Without these moto takes the content for a form, and the sender for a stranger.
    headers = {
        "Content-Type": "application/octet-stream",
        "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request",
    }
    request = urllib.request.Request(url, content, headers, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read()


def s3_place(endpoint, bucket):
    def plant(name, content):
        send("PUT", f"{endpoint}/{bucket}/folder/{urllib.request.quote(name)}", content)

    return Place(f"s3://{bucket}/folder/", s3_options(endpoint), "ObstoreBackend", plant)


@pytest.fixture
def container(azure):
    """(endpoint, name) of a new container."""
    name = f"container-{next(_numbers)}"
    with blobs(azure) as client:
        client.create_container(name)
    return azure, name


def blobs(endpoint):
    from azure.storage.blob import BlobServiceClient  # which takes a third of a second

    return BlobServiceClient(endpoint, credential=AZURE_KEY)


def azure_place(endpoint, container, options):
    def plant(name, content):
        with blobs(endpoint) as client:
            blob = client.get_blob_client(container, f"folder/{name}")
            blob.upload_blob(content, overwrite=True)

    return Place(f"az://{container}/folder/", options, "ObstoreBackend", plant)


@pytest.fixture
def gs_bucket(gcs):
    """(endpoint, name) of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    send("POST", f"{gcs}/storage/v1/b?project=tests", json.dumps({"name": name}).encode())
    return gcs, name


def gs_place(endpoint, bucket, options, **more):
    def plant(name, content):
        key = urllib.request.quote(f"folder/{name}", safe="")
        send(
            "POST",
            f"{endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={key}",
            content,
        )

    return Place(f"gs://{bucket}/folder/", options, "ObstoreBackend", plant, **more)


def _plant_file(folder):
    def plant(name, content):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.stat().st_mtime_ns if file.exists() else 0
        file.write_bytes(content)
        if file.stat().st_mtime_ns == before:  # the clock of files is coarse
            os.utime(file, ns=(before + 1000, before + 1000))

    return plant


KINDS = ["file", "memory", "s3", "az", "gs", "http", "http-presigned"]


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    kind = request.param
    if kind == "file":
        yield Place(f"file://{tmp_path}/", {}, "LocalBackend", _plant_file(tmp_path))
    elif kind == "memory":
        root = f"contract-{next(_numbers)}/"
        yield Place(
            f"memory://{root}",
            {},
            "ObstoreBackend",
            lambda name, content: obstore.put(memory_store(), root + name, content),
        )
    elif kind == "s3":
        endpoint, bucket = request.getfixturevalue("bucket")
        yield s3_place(endpoint, bucket)
    elif kind == "az":
        endpoint, container = request.getfixturevalue("container")
        yield azure_place(endpoint, container, azure_options(endpoint))
    elif kind == "gs":
        endpoint, bucket = request.getfixturevalue("gs_bucket")
        yield gs_place(endpoint, bucket, gcs_options(endpoint))
    else:
        with http_server(tmp_path) as url:
            suffix = "?token=canary" if kind == "http-presigned" else ""
            plant = _plant_file(tmp_path)
            yield Place(f"{url}/", {}, "ObstoreBackend", plant, lists=False, suffix=suffix)
