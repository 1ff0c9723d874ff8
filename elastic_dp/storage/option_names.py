"""What options are called: by s3fs, gcsfs, adlfs, boto, obstore and the environment's variables.

Each name is known by the scheme's kind of store, or it is refused with the name that is probably
meant. A wrong name would otherwise reach a library that ignores it, and the store would be asked
without credentials. Names may be in upper case, as those of variables are (deltalake takes them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from elastic_dp.errors import StorageError

KIND = {
    **{"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"},
    **{"az": "az", "abfs": "az", "abfss": "az"},
}
# How files are buffered, listed and retried by fsspec, which means nothing to obstore.
IGNORED = {
    *("default_block_size", "default_fill_cache", "default_cache_type", "use_listings_cache"),
    *("listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "cache_regions"),
    *("max_concurrency", "project", "consistency", "timeout", "block_size", "cache_timeout"),
}
# deltalake and Polars need it for an endpoint by http, which works here without it.
_MEANINGLESS = {"allow_http", "aws_allow_http"}
# Each name in obstore's words.
S3 = {
    **dict.fromkeys(("key", "access_key_id", "access_key", "aws_access_key_id"), "access_key_id"),
    **dict.fromkeys(("username",), "access_key_id"),
    **dict.fromkeys(("secret", "secret_access_key", "secret_key"), "secret_access_key"),
    **dict.fromkeys(("aws_secret_access_key", "password"), "secret_access_key"),
    **dict.fromkeys(("token", "session_token", "aws_session_token"), "session_token"),
    **dict.fromkeys(("endpoint_url", "endpoint", "aws_endpoint_url", "aws_endpoint"), "endpoint"),
    **dict.fromkeys(("region_name", "region", "aws_region", "aws_default_region"), "region"),
    **dict.fromkeys(("anon", "skip_signature", "aws_skip_signature"), "skip_signature"),
    **dict.fromkeys(("requester_pays", "request_payer"), "request_payer"),
}
AZURE = {
    **dict.fromkeys(("account_name", "azure_storage_account_name"), "account_name"),
    **dict.fromkeys(("account_key", "access_key", "azure_storage_account_key"), "account_key"),
    **dict.fromkeys(("sas_token", "azure_storage_sas_token"), "sas_key"),
    **dict.fromkeys(("sas_key", "azure_storage_sas_key"), "sas_key"),
    **dict.fromkeys(("tenant_id", "azure_tenant_id"), "tenant_id"),
    **dict.fromkeys(("client_id", "azure_client_id"), "client_id"),
    **dict.fromkeys(("client_secret", "azure_client_secret"), "client_secret"),
    **dict.fromkeys(("endpoint", "account_url"), "endpoint"),
    **dict.fromkeys(("anon", "skip_signature"), "skip_signature"),
}
GOOGLE = {
    **dict.fromkeys(("service_account", "service_account_path"), "service_account"),
    **dict.fromkeys(("google_service_account", "google_service_account_path"), "service_account"),
    **dict.fromkeys(("application_credentials",), "application_credentials"),
    **dict.fromkeys(("google_application_credentials",), "application_credentials"),
    **dict.fromkeys(("service_account_key", "google_service_account_key"), "service_account_key"),
    **dict.fromkeys(("anon", "skip_signature", "google_skip_signature"), "skip_signature"),
}
WORDS = {"s3": S3, "gs": GOOGLE, "az": AZURE}
# Only the scheme's fsspec file system has these; a test compares them with its signature.
_FSSPEC_ONLY = {
    "s3": {
        *("profile", "client_kwargs", "config_kwargs", "s3_additional_kwargs", "session", "loop"),
        *(
            "use_ssl",
            "default_fill_cache",
            "version_aware",
            "fixed_upload_size",
            "local_expiry_check",
        ),
    },
    "gs": {
        *("token", "access", "secure_serialize", "check_connection", "requests_timeout"),
        *("requester_pays", "session_kwargs", "loop", "endpoint_url", "default_location"),
        *("version_aware", "on_google", "finalize_on_close", "mrd_pool_cache_size"),
        *("max_mrd_pool_cache_queue_size", "experimental_zonal_hns_support"),
    },
    "az": {
        *("connection_string", "credential", "request_session", "socket_timeout", "blocksize"),
        *("location_mode", "loop", "version_aware", "assume_container_exists", "account_host"),
        *("connection_timeout", "read_timeout", "exclude_managed_identity_credential"),
    },
}
# obstore's words, in those of the fsspec file system; a pair is an entry of a dict.
_TO_FSSPEC = {
    "s3": {
        **{"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"},
        **{"endpoint": "endpoint_url", "skip_signature": "anon", "request_payer": "requester_pays"},
    },
    "gs": {"service_account": "token", "application_credentials": "token"},
    "az": {"sas_key": "sas_token", "skip_signature": "anon"},
}
# Names of other tools that are spelt like another option than the one that is meant.
_MEANT = {
    "s3": {"anonymous": "anon", "no_sign_request": "anon", "verify": "client_kwargs"},
    "gs": {"anonymous": "anon", "credentials": "token", "key": "token", "keyfile": "token"},
    "az": {"anonymous": "anon", "account": "account_name", "key": "account_key"},
}


def known_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` by names that are known here. Raises StorageError for a name that no library
    of this kind of store has."""
    kind = KIND.get(scheme)
    if kind is None:
        return dict(options)
    known = sorted({*WORDS[kind], *_FSSPEC_ONLY[kind], *IGNORED})
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = str(given).lower()
        if name in known:
            found[name] = value
        elif name not in _MEANINGLESS:
            near = get_close_matches(name, known, n=1)
            right = _MEANT[kind].get(name) or (near[0] if near else None)
            meant = f"did you mean {right!r}?" if right else f"known are {', '.join(known)}"
            raise StorageError(
                f"storage_options has {given!r}, which {scheme}:// does not know; {meant}"
            )
    return found


def fsspec_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the scheme's fsspec file system names them. Raises StorageError for an
    unknown name."""
    options = known_options(scheme, options)
    kind = KIND.get(scheme)
    if kind is None:
        return options
    said: dict[str, Any] = {}
    region: dict[str, Any] = {}
    for name, value in options.items():
        word = WORDS[kind].get(name)
        if name in _FSSPEC_ONLY[kind] or word is None:
            said[name] = value
        elif kind == "s3" and word == "region":
            region = {"region_name": value}
        elif kind == "gs" and word == "skip_signature":
            said |= {"token": "anon"} if value else {}
        elif kind == "gs" and word == "service_account_key" and value is not None:
            said["token"] = _key(value)
        else:
            said[_TO_FSSPEC[kind].get(word, word)] = value
    if region:
        said["client_kwargs"] = {**region, **(said.get("client_kwargs") or {})}
    if kind == "az" and said.get("endpoint"):
        return _at_endpoint(said)
    return said


def _key(text: Any) -> dict[str, Any]:
    """A service account's key, of which gcsfs takes the content and obstore the text."""
    try:
        key = json.loads(text)
    except (TypeError, ValueError):
        key = None
    if not isinstance(key, dict):
        raise StorageError("service_account_key is not the JSON text of a service account's key")
    return key


def _at_endpoint(said: dict[str, Any]) -> dict[str, Any]:
    """adlfs takes a host by https; any other endpoint only in a connection string."""
    endpoint = str(said.pop("endpoint")).rstrip("/")
    protocol, _, host = endpoint.partition("://")
    if "connection_string" in said:
        raise StorageError(
            "storage_options has an endpoint beside a connection_string; adlfs takes one of them: "
            "put the endpoint into the connection_string as BlobEndpoint"
        )
    if protocol == "https" and "/" not in host:
        return {**said, "account_host": host}
    parts = {
        "BlobEndpoint": endpoint,
        "AccountName": said.pop("account_name", None),
        "AccountKey": said.pop("account_key", None),
        "SharedAccessSignature": str(said.pop("sas_token", None) or "").lstrip("?"),
    }
    if not parts["AccountKey"] and not parts["SharedAccessSignature"]:
        raise StorageError(
            "storage_options has an endpoint other than https://HOST; for that, adlfs needs "
            "account_key or sas_token"
        )
    text = ";".join(f"{name}={value}" for name, value in parts.items() if value)
    return {**said, "connection_string": text}
