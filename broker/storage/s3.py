"""S3 and what speaks its protocol, through `s3fs`.

Put-if-absent is a `PutObject` with `If-None-Match: *`. It is asked for by every put of a new
object, also an empty one; s3fs's own `open("xb")` leaves it out there. The client repeats requests,
so our own success can come back as "exists": whoever calls `put_new` compares what is there with
what it put.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import BotoCoreError, ClientError
from s3fs.core import S3_RETRYABLE_ERRORS

from broker.config import parse_storage_options
from broker.errors import AlreadyExists, InvalidOption, StorageError
from broker.storage import s3_errors
from broker.storage.reach import check_reachable
from broker.storage.store import Entry

Answer = TypeVar("Answer")

# Options that s3fs takes under the same names.
_ARGUMENTS = ("anon", "endpoint_url", "key", "profile", "secret", "token")
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")
_PART_BYTES = 16 << 20
# The longest that one request may take, with up to 100 MB on a slow line.
_REQUEST_SECONDS = 300.0


class S3Store:
    """One prefix of a bucket.

    Args:
        address: `s3://bucket/prefix`.
        options: those of `STORAGE_OPTIONS`; credentials that are not given are found as boto
            finds them.
    """

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(address)
        if not parts.netloc:
            raise InvalidOption(f"{address} names no bucket; write s3://bucket/prefix")
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self.root = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        given = parse_storage_options("s3", options)
        self.poll_seconds = given["poll.ms"] / 1000
        self._arguments = _arguments(given)
        self._systems: dict[int, s3fs.S3FileSystem] = {}
        self._lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """Amazon's own is; what else speaks the protocol may not heed the condition of a put."""
        return self._endpoint is None

    @property
    def _endpoint(self) -> str | None:
        """Where requests go, if not to Amazon's own: options, variables and profiles may say so."""
        url: str = self._ask("", lambda system: system.s3.meta.endpoint_url)
        host = urlsplit(url).hostname or ""
        return None if host.endswith(_AMAZON) else url

    def locate(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def get(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        if length == 0:
            return b""
        end = None if length is None else start + length
        start_or_all = start or (None if end is None else 0)

        def request(system: s3fs.S3FileSystem) -> bytes:
            # More than one request at once would ask for the size first, and list what is absent.
            return bytes(
                system.cat_file(self._full(path), start=start_or_all, end=end, max_concurrency=1)
            )

        try:
            return self._ask(path, request)
        except FileNotFoundError as error:
            if s3_errors.code(error) == "NoSuchKey":
                return None
            raise StorageError(
                f"{self.locate(path)}: what answers at {self._endpoint or 'Amazon'} does not speak "
                f"S3 ({error}); check the option endpoint_url"
            ) from error

    def put_new(self, path: str, data: bytes) -> None:
        try:
            self._tell(path, lambda system: system.pipe_file(self._full(path), data, mode="create"))
        except FileExistsError:
            raise AlreadyExists(f"{self.locate(path)} exists already") from None

    def put(self, path: str, data: bytes) -> None:
        self._tell(path, lambda system: system.pipe_file(self._full(path), data))

    def put_file(self, path: str, file: BinaryIO) -> None:
        self._tell(path, lambda system: _upload(system, self._full(path), file))

    def stat(self, path: str) -> Entry | None:
        # Not `info`, which lists where there is no such object.
        try:
            head = self._ask(
                path,
                lambda system: system.call_s3(
                    "head_object", Bucket=self._bucket, Key=self._key(path)
                ),
            )
        except FileNotFoundError:
            return None
        changed = int(head["LastModified"].timestamp() * 1000)
        return Entry(path.rpartition("/")[2], head["ContentLength"], changed, is_folder=False)

    def entries(self, path: str) -> list[Entry]:
        try:
            found = self._ask(
                path, lambda system: system.ls(self._full(path), detail=True, refresh=True)
            )
        except FileNotFoundError:
            return []
        return [_entry(one) for one in found if one["name"].rstrip("/") != self._full(path)]

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(
                path,
                lambda system: system.call_s3(
                    "delete_object", Bucket=self._bucket, Key=self._key(path)
                ),
            )

    def delete_tree(self, path: str) -> None:
        # Not `rm`, which takes a name with * or [ for a pattern, and passes over what is refused.
        next_page = {"ContinuationToken": "NextContinuationToken"}
        for page in self._pages(path, "list_objects_v2", next_page):
            self._delete_all(path, [one["Key"] for one in page.get("Contents", ())])

    def _delete_all(self, path: str, keys: list[str]) -> None:
        """Remove objects, as many as one listing gives, by one request."""
        if not keys:
            return
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._ask(
            path,
            lambda system: system.call_s3("delete_objects", Bucket=self._bucket, Delete=wanted),
        )
        for error in answer.get("Errors", ()):
            which = error["Key"].removeprefix(self._key(""))
            raise self.translate(ClientError({"Error": error}, "DeleteObjects"), which)

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        next_page = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages(path, "list_multipart_uploads", next_page):
            # By the clock of the store, which also said when they were begun.
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() * 1000 > older_than_ms:
                    self._abort(upload["Key"], upload["UploadId"])

    def _pages(
        self, path: str, operation: str, next_page: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """List what is in a folder and below, however many answers that takes.

        Args:
            next_page: for each argument that asks for the next answer, where an answer says it.
        """
        place: dict[str, str] = {}
        while True:
            page = self._ask(
                path,
                lambda system: system.call_s3(
                    operation,
                    Bucket=self._bucket,
                    Prefix=f"{self._key(path)}/",
                    **place,  # noqa: B023
                ),
            )
            yield page
            if not page.get("IsTruncated"):
                return
            place = {name: page.get(said, "") for name, said in next_page.items()}

    def _abort(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # It was finished, or aborted by another.
            self._ask(
                key,
                lambda system: system.call_s3(
                    "abort_multipart_upload", Bucket=self._bucket, Key=key, UploadId=upload_id
                ),
            )

    def begin_anew(self) -> None:
        self._lock = threading.Lock()

    def close(self) -> None:
        self._systems.clear()

    def _tell(self, path: str, request: Callable[[s3fs.S3FileSystem], object]) -> None:
        """Write something: that anything is absent is then no answer."""
        try:
            self._ask(path, request)
        except FileNotFoundError as error:
            raise self.translate(error, path) from error

    def _ask(self, path: str, request: Callable[[s3fs.S3FileSystem], Answer]) -> Answer:
        try:
            return request(self._system())
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in repr(error.__cause__) or "bucket does not exist" in str(error):
                raise StorageError(
                    f"{self.locate(path)}: there is no bucket {self._bucket!r}; create it first"
                ) from error
            if s3_errors.is_no_request(error):
                raise self.translate(error, path) from error
            raise
        except (OSError, BotoCoreError, ClientError, *S3_RETRYABLE_ERRORS) as error:
            if s3_errors.code(error) in s3_errors.TAKEN:
                # s3fs knows it only by an element of the answer that some stores leave out.
                raise FileExistsError(path) from error
            raise self.translate(error, path) from error

    def _system(self) -> s3fs.S3FileSystem:
        """Return this process's client: its threads do not survive a fork."""
        process_id = os.getpid()
        system = self._systems.get(process_id)
        if system is None:
            with self._lock:
                system = self._systems.get(process_id)
                if system is None:
                    system = self._connect()
                    self._systems = {process_id: system}
        return system

    def _connect(self) -> s3fs.S3FileSystem:
        system = s3fs.S3FileSystem(
            **self._arguments,
            # Asked again only by us: what a try was answered must not hide that one before it,
            # whose answer was lost, was carried out.
            config_kwargs={"retries": {"total_max_attempts": 1}, "http_session_cls": _AskingOnce},
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        system.retries = 1
        try:
            self._check_reachable(system.s3.meta.endpoint_url)
        except ValueError as error:
            raise InvalidOption(
                f"{self.root}: {error}; check the options endpoint_url and region"
            ) from error
        return system

    def _check_reachable(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if not parts.hostname or parts.hostname.endswith(_AMAZON):
            return  # Amazon's own.
        if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
            return  # Whom the proxy reaches, we may not.
        port = parts.port or (80 if parts.scheme == "http" else 443)
        check_reachable(self.root, parts.hostname, port, "store")

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _full(self, path: str) -> str:
        return f"{self._bucket}/{self._key(path)}".rstrip("/")

    def delta_options(self) -> dict[str, str]:
        known = {
            "key": "AWS_ACCESS_KEY_ID",
            "secret": "AWS_SECRET_ACCESS_KEY",
            "token": "AWS_SESSION_TOKEN",
        }
        options = {known[name]: text for name, text in self._arguments.items() if name in known}
        if self._endpoint is not None:
            options["AWS_ENDPOINT_URL"] = self._endpoint
        region = self._arguments.get("client_kwargs", {}).get("region_name")
        if region is not None:
            options["AWS_REGION"] = region
        if options.get("AWS_ENDPOINT_URL", "").startswith("http:"):
            options["AWS_ALLOW_HTTP"] = "true"
        return {**options, "conditional_put": "etag"}

    def translate(self, error: Exception, path: str) -> StorageError:
        return s3_errors.translate(error, self.locate(path), self._bucket)


class _AskingOnce(AIOHTTPSession):  # type: ignore[misc]
    """What carries the requests.

    By itself it would repeat one on a connection that was cut, and wait without end for a store
    that does not say that it will take what is put, or that does not take it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        given: Any = getattr(self, "_timeout")  # noqa: B009 - the driver is not typed
        self._timeout = aiohttp.ClientTimeout(
            total=_REQUEST_SECONDS, sock_connect=given.sock_connect, sock_read=given.sock_read
        )

    async def send(self, request: Any) -> Any:
        if "Expect" in request.headers:  # It is no part of what was signed.
            del request.headers["Expect"]
        return await super().send(request)

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


def _upload(system: s3fs.S3FileSystem, full_path: str, file: BinaryIO) -> None:
    """Put a file in parts; what is there under its name is replaced."""
    file.seek(0)
    upload = system.open(full_path, "wb", block_size=_PART_BYTES, autocommit=False)
    try:
        shutil.copyfileobj(file, upload, _PART_BYTES)
        upload.close()
        upload.commit()
    except BaseException:
        with contextlib.suppress(Exception):
            upload.discard()
        raise


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {name: given[name] for name in _ARGUMENTS if given[name]}
    if given["region"] is not None:
        arguments["client_kwargs"] = {"region_name": given["region"]}
    return arguments


def _entry(one: dict[str, Any]) -> Entry:
    name = one["name"].rstrip("/").rpartition("/")[2]
    changed = one.get("LastModified")
    changed_ms = 0 if changed is None else int(changed.timestamp() * 1000)
    return Entry(name, one.get("size") or 0, changed_ms, one["type"] == "directory")
