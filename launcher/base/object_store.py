"""Objects below a URL `s3://bucket/prefix` or `gs://bucket/prefix`, by the clouds' own libraries.

boto3 and google-cloud-storage are the pair that does all of this: conditional writes, ranges, the
version of an object, every kind of credentials, and other servers (AWS_ENDPOINT_URL,
STORAGE_EMULATOR_HOST). TensorStore cannot tell an object's size, and obstore speaks a dialect of
Google's that no emulator knows. Repeating is done here: neither library heeds Retry-After.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from launcher.base.libraries import lacking

T = TypeVar("T")
SCHEMES = ("s3", "gs")
PART = 64 << 20  # bytes of a large object in memory at a time
PATIENCE = 120.0  # seconds in which a request is repeated
_FIRST_WAIT, _MOST_WAIT = 0.5, 30.0  # seconds
_TIMEOUTS = (3.0, 30.0)  # seconds to connect, and between bytes of an answer
_CONNECTIONS = 32  # that are kept open
_BUSY = (408, 409, 429, 500, 502, 503, 504)  # 409: another conditional request is under way
# A machine without a metadata server must not cost more than a second.
_SHORT = {"GCE_METADATA_TIMEOUT": "1", "GCE_METADATA_DETECT_RETRIES": "1"}
_TRIED_AWS = (
    "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, the files ~/.aws/credentials and ~/.aws/config "
    "(AWS_PROFILE), AWS_WEB_IDENTITY_TOKEN_FILE, a container's role, the metadata server"
)
_TRIED_GOOGLE = (
    "GOOGLE_APPLICATION_CREDENTIALS, the file of `gcloud auth application-default login`, "
    "the metadata server"
)


def is_stored(path: str) -> bool:
    """Return whether a path is the URL of something in a store."""
    return path.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


class StoreError(Exception):
    """A store refused a request; the text is one line without secrets."""


class MissingCredentialsError(StoreError):
    """There are no credentials, or half of them."""


class ExpiredError(StoreError):
    """The credentials were valid once."""


class ForbiddenError(StoreError):
    """The credentials do not allow it, or are wrong."""


class NotFoundError(StoreError):
    """There is no such object or bucket."""


class ChangedError(StoreError):
    """An object is there already, or is not the version that was asked for."""


class UnavailableError(StoreError):
    """The store was out of reach or busy, for as long as it was asked.

    Args:
        text: the message.
        retry_after: how many seconds it asks to wait.
    """

    def __init__(self, text: str, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Stat(NamedTuple):
    """An object's size in bytes, and its version: another one, after it is written again.

    Last comes the time of that, in seconds since 1970.
    """

    size: int
    version: str
    modified: float = 0.0


class Store:
    """The objects below a URL; its methods may be called from several threads.

    A request that meets a busy store, a reset or a cut answer is repeated with growing pauses, or
    as the store's Retry-After says. Every method raises StoreError.

    Args:
        url: `s3://bucket/prefix` or `gs://bucket/prefix`.
        patience: for how many seconds a request is repeated.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.url, self.patience = url.rstrip("/"), patience
        scheme, _, path = self.url.partition("://")
        bucket, _, self._prefix = path.partition("/")
        module = "boto3" if scheme == "s3" else "google.cloud.storage"
        if (command := lacking(module)) is not None:
            raise StoreError(f"{url} needs {module}; {command}")
        self._kind = _S3 if scheme == "s3" else _Google
        try:
            self._bucket: _Bucket = self._explained(lambda: self._kind(bucket))
        except ValueError:  # its text repeats the address, with a password in it
            raise StoreError(f"{url}: AWS_ENDPOINT_URL or ~/.aws/config is no address") from None

    def get(
        self, name: str, start: int = 0, stop: int | None = None, version: str | None = None
    ) -> bytes:
        """Return an object's bytes from `start` up to `stop`, which it has, or to its end.

        Raises:
            ChangedError: it is another version than `version`.
        """
        if stop is not None and stop <= start:
            return b""

        def call() -> bytes:
            content = self._bucket.get(self._key(name), start, stop, version)
            if stop is not None and len(content) != stop - start:
                size = f"{len(content):,} bytes of {stop - start:,}"
                raise UnavailableError(f"{self.url}/{name} arrives cut short, {size}")
            return content

        return self._persist(call, name)

    def stat(self, name: str) -> Stat:
        """Return an object's size and version."""
        return self._persist(lambda: self._bucket.stat(self._key(name)), name)

    def objects(self, begin: str = "") -> Iterator[tuple[str, Stat]]:
        """Yield the objects whose names begin so, by name."""
        after = ""
        while True:
            call = functools.partial(self._bucket.page, self._key(begin), after)
            found, after = self._persist(call, begin)
            for key, stat in found:
                yield key.removeprefix(self._key("")), stat
            if not after:
                return

    def put(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all."""
        self._persist(lambda: self._bucket.put(self._key(name), data, absent=False), name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object that is not there; return whether it now holds these bytes."""
        try:
            self._persist(lambda: self._bucket.put(self._key(name), data, absent=True), name)
        except ChangedError:  # also by a request before, whose answer was lost
            return self.get(name) == data
        return True

    def put_file(self, name: str, file: BinaryIO, sent: Callable[[int], None]) -> None:
        """Write an object with a file's contents, whole or not at all.

        Args:
            name: the object.
            file: a file open for reading.
            sent: called with the number of bytes that have arrived since the last call.
        """
        size = os.fstat(file.fileno()).st_size
        if size <= PART:
            self.put(name, os.pread(file.fileno(), size, 0))
            sent(size)
        else:
            # The library repeats a part; a whole upload is the next one's.
            large = functools.partial(self._bucket.put_large, self._key(name), file, sent)
            self._explained(large, name)

    def download(self, name: str, path: Path, got: Callable[[int], None]) -> None:
        """Write an object's bytes to a new file; raise OSError, too.

        Args:
            name: the object.
            path: the file.
            got: called with the number of bytes of each part.
        """
        size, version, _ = self.stat(name)
        with open(path, "xb") as file:
            while (start := file.tell()) < size:
                part = self.get(name, start, min(start + PART, size), version)
                file.write(part)
                got(len(part))
            os.fsync(file.fileno())

    def delete(self, name: str) -> None:
        """Delete an object that may not be there."""
        with suppress(NotFoundError):
            self._persist(lambda: self._bucket.delete(self._key(name)), name)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _explained(self, call: Callable[[], T], name: str = "") -> T:
        try:
            return call()
        except Exception as error:
            if (problem := self._kind.explain(error, f"{self.url}/{name}".rstrip("/"))) is None:
                raise
            raise problem from None

    def _persist(self, call: Callable[[], T], name: str) -> T:
        deadline, wait = time.monotonic() + self.patience, _FIRST_WAIT
        while True:
            try:
                return self._explained(call, name)
            except UnavailableError as error:
                pause = max(error.retry_after, wait * random.uniform(0.5, 1.0))
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                wait = min(2 * wait, _MOST_WAIT)


class _S3:
    """A bucket of S3's; each method sends a request, and once."""

    def __init__(self, bucket: str) -> None:
        from boto3.session import Session
        from botocore.client import Config

        own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        connect, read = _TIMEOUTS
        config = Config(
            connect_timeout=connect,
            read_timeout=read,
            retries={"total_max_attempts": 1},
            max_pool_connections=_CONNECTIONS,
            s3={"addressing_style": "path"} if own else {},
        )
        # Not the session of the module: files with credentials are read anew.
        self._session, self._config = Session(), config
        self._client = self._session.client("s3", config=config)
        self._bucket = bucket

    def get(self, key: str, start: int, stop: int | None, version: str | None) -> bytes:
        last = "" if stop is None else f"{stop - 1}"
        bounds = {"Range": f"bytes={start}-{last}"} if start or last else {}
        match = {"IfMatch": version} if version else {}
        answer = self._client.get_object(Bucket=self._bucket, Key=key, **bounds, **match)
        content: bytes = answer["Body"].read()
        return content

    def stat(self, key: str) -> Stat:
        answer = self._client.head_object(Bucket=self._bucket, Key=key)
        modified = answer["LastModified"].timestamp()
        return Stat(answer["ContentLength"], answer["ETag"], modified)

    def page(self, begin: str, after: str) -> tuple[list[tuple[str, Stat]], str]:
        more = {"ContinuationToken": after} if after else {}
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=begin, **more)
        if "IsTruncated" not in answer:  # one that was cut reads as if there were none
            raise UnavailableError(f"s3://{self._bucket}/{begin} cannot be listed whole")
        found = [
            (one["Key"], Stat(one["Size"], one["ETag"], one["LastModified"].timestamp()))
            for one in answer.get("Contents", ())
        ]
        return found, answer.get("NextContinuationToken", "")

    def put(self, key: str, data: bytes, absent: bool) -> None:
        condition = {"IfNoneMatch": "*"} if absent else {}
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data, **condition)

    def put_large(self, key: str, file: BinaryIO, sent: Callable[[int], None]) -> None:
        from boto3.s3.transfer import TransferConfig
        from botocore.client import Config

        by_parts = Config(retries={"mode": "standard", "total_max_attempts": 8})
        client = self._session.client("s3", config=self._config.merge(by_parts))
        parts = TransferConfig(
            multipart_threshold=PART, multipart_chunksize=PART, use_threads=False
        )
        with open(os.dup(file.fileno()), "rb") as copy:  # the library closes it
            copy.seek(0)
            client.upload_fileobj(copy, self._bucket, key, Callback=sent, Config=parts)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=key)

    @staticmethod
    def explain(error: Exception, what: str) -> StoreError | None:
        from botocore import exceptions as aws
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        if isinstance(error, aws.ClientError):
            about, code = error.response["ResponseMetadata"], error.response["Error"]["Code"]
            headers, status = about.get("HTTPHeaders", {}), about.get("HTTPStatusCode", 0)
            if "Expired" in code or code == "TokenRefreshRequired":
                return ExpiredError(f"{what}: the credentials have expired ({code})")
            if code in ("SlowDown", "RequestTimeout"):
                status = 503
            return _of_status(status, code, headers, what)
        if isinstance(error, aws.UnauthorizedSSOTokenError | aws.TokenRetrievalError):
            return ExpiredError(f"{what}: the credentials have expired; run: aws sso login")
        useless = aws.PartialCredentialsError | aws.CredentialRetrievalError | aws.ProfileNotFound
        unread = FileNotFoundError | PermissionError  # of AWS_WEB_IDENTITY_TOKEN_FILE
        if isinstance(error, aws.NoCredentialsError | aws.SSOError | useless | unread):
            return MissingCredentialsError(f"{what}: no credentials; tried {_TRIED_AWS}")
        broken = aws.IncompleteReadError | aws.FlexibleChecksumError | ResponseParserError
        if isinstance(error, aws.ConnectionError | aws.HTTPClientError | HTTPError | broken):
            return UnavailableError(f"{what} cannot be reached ({type(error).__name__})")
        if isinstance(error, aws.BotoCoreError):
            return StoreError(f"{what}: {type(error).__name__}")
        return None


class _Google:
    """The same of Google's."""

    def __init__(self, bucket: str) -> None:
        for name, value in _SHORT.items():
            os.environ.setdefault(name, value)
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud import storage
        from requests.adapters import HTTPAdapter

        if os.environ.get("STORAGE_EMULATOR_HOST"):
            credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call]
        else:
            scope = "https://www.googleapis.com/auth/devstorage.read_write"
            credentials, _ = google.auth.default(scopes=[scope])
        session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
        # The project matters to those who make buckets.
        self._bucket = storage.Client("-", credentials=credentials, _http=session).bucket(bucket)

    def get(self, key: str, start: int, stop: int | None, version: str | None) -> bytes:
        match = {"if_generation_match": int(version)} if version else {}
        content: bytes = self._bucket.blob(key).download_as_bytes(
            start=start or None if stop is None else start,
            end=None if stop is None else stop - 1,
            raw_download=True,
            **match,
            **_ONCE,
        )
        return content

    def stat(self, key: str) -> Stat:
        blob = self._bucket.blob(key)
        blob.reload(**_ONCE)
        return _stat(blob)

    def page(self, begin: str, after: str) -> tuple[list[tuple[str, Stat]], str]:
        fields = "items(name,size,generation,updated),nextPageToken"
        pages = self._bucket.list_blobs(
            prefix=begin, page_token=after or None, fields=fields, **_ONCE
        )
        found = [(blob.name, _stat(blob)) for blob in next(pages.pages, ())]
        return found, pages.next_page_token or ""

    def put(self, key: str, data: bytes, absent: bool) -> None:
        condition = {"if_generation_match": 0} if absent else {}
        self._bucket.blob(key).upload_from_string(
            data, "application/octet-stream", **condition, **_ONCE
        )

    def put_large(self, key: str, file: BinaryIO, sent: Callable[[int], None]) -> None:
        size = os.fstat(file.fileno()).st_size
        blob = self._bucket.blob(key, chunk_size=PART)  # resumable, in parts
        blob.upload_from_file(file, rewind=True, size=size, timeout=_TIMEOUTS)
        sent(size)

    def delete(self, key: str) -> None:
        self._bucket.blob(key).delete(**_ONCE)

    @staticmethod
    def explain(error: Exception, what: str) -> StoreError | None:
        import requests
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth import exceptions as auth
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
        from urllib3.exceptions import HTTPError

        if isinstance(error, GoogleAPICallError | InvalidResponse):
            answer = error.response
            status = answer.status_code if answer is not None else int(error.code or 0)
            headers = answer.headers if answer is not None else {}
            return _of_status(status, f"HTTP {status}", headers, what)
        if isinstance(error, auth.DefaultCredentialsError):
            return MissingCredentialsError(f"{what}: no credentials; tried {_TRIED_GOOGLE}")
        if isinstance(error, auth.RefreshError) and not error.retryable:
            return ExpiredError(f"{what}: the credentials have expired or were revoked")
        # An answer that was cut to nothing: the library asks its bytes for what JSON has.
        is_cut = isinstance(error, AttributeError) and error.obj == b""
        broken = requests.RequestException | DataCorruption | HTTPError
        if is_cut or isinstance(error, auth.GoogleAuthError | broken):
            return UnavailableError(f"{what} cannot be reached ({type(error).__name__})")
        return None


_Bucket = _S3 | _Google


def _stat(blob: Any) -> Stat:
    return Stat(blob.size, str(blob.generation), blob.updated.timestamp())


_ONCE: dict[str, Any] = {"retry": None, "timeout": _TIMEOUTS}


def _of_status(status: int, code: str, headers: Any, what: str) -> StoreError:
    if status == 404:
        return NotFoundError(f"{what} is not there ({code})")
    if status == 412:
        return ChangedError(f"{what} is there already, or has changed ({code})")
    if status == 401:
        return ExpiredError(f"{what}: the credentials are not accepted any more ({code})")
    if status == 403:
        return ForbiddenError(f"{what} is forbidden to these credentials ({code})")
    if status not in _BUSY and status < 500:
        return StoreError(f"{what}: the store refuses the request ({code})")
    seconds = headers.get("retry-after", "")
    pause = float(seconds) if seconds.isdigit() else 0.0
    return UnavailableError(f"{what} is not available ({code})", pause)
