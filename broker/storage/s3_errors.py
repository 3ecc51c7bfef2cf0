"""What S3's client says went wrong, as our errors: to be tried again, or not."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    InvalidConfigError,
    InvalidRegionError,
    NoAuthTokenError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    RefreshWithMFAUnsupportedError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)

from broker.errors import StorageError, StoreUnavailable

_REFUSED = (
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "401",
    "403",
)
# Of all that is said to be the request's fault, codes with these in them mean: later, or once more.
_AGAIN = (
    "BadDigest",
    "IncompleteBody",
    "LimitExceeded",
    "RequestTimeout",
    "SHA256Mismatch",
    "SlowDown",
    "Throttl",
    "TooManyRequests",
)
_AGAIN_STATUS = (408, 425, 429)
# Another place, or nowhere: no other try will do.
_MOVED, _NOT_IMPLEMENTED = 301, 501
# What the driver finds wrong before it asks the store.
_NO_REQUEST = (
    ConfigParseError,
    InvalidConfigError,
    InvalidRegionError,
    NoAuthTokenError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    RefreshWithMFAUnsupportedError,
    SSOError,
    TokenRetrievalError,
)
# Of all that can go wrong with TLS, what another try does not mend.
_NO_TLS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
# The condition of a put does not hold: the name is taken.
TAKEN = ("PreconditionFailed", "412")
# Two puts met; which of them was carried out, if any, is seen by asking again.
_MET = ("ConditionalRequestConflict", "OperationAborted", "409")


def translate(error: Exception, address: str, bucket: str) -> StorageError:
    """Turn the client's error into ours: what, where, and what to do."""
    said = code(error)
    text = " ".join(str(error).split())
    if isinstance(error, NoCredentialsError) or "Unable to locate credentials" in text:
        return StorageError(
            f"{address}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a "
            "profile, or the options storage.key and storage.secret"
        )
    if isinstance(error, PermissionError) or said in _REFUSED:
        return StorageError(
            f"not allowed to write or read {address}: {text}; check the credentials"
        )
    if said == "NoSuchBucket":
        return StorageError(f"{address}: there is no bucket {bucket!r}; create it first")
    if said in _MET:
        return StoreUnavailable(f"{address}: others wrote at the same time: {text}")
    if is_no_request(error):
        return StorageError(
            f"{address}: {text}; check the options of the store, or what the driver finds in "
            "AWS_ variables and profiles"
        )
    if _is_refusal(error):
        return StorageError(
            f"{address}: the store refuses the request: {text}; check the bucket, the region "
            "and the endpoint"
        )
    return StoreUnavailable(f"{address}: the store does not answer: {text}")


def code(error: Exception) -> str:
    """Return the store's own word for what went wrong; none if it did not answer."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    """Return the status of the store's answer; 0 if it did not answer."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _answer(error: Exception) -> dict[str, Any]:
    cause = error if isinstance(error, ClientError) else error.__cause__
    return dict(cause.response) if isinstance(cause, ClientError) else {}


def _is_refusal(error: Exception) -> bool:
    """Tell whether the store has answered that it will not, now or later."""
    said, status = code(error), _status(error)
    if status in _AGAIN_STATUS or any(sign in said for sign in _AGAIN):
        return False
    return 400 <= status < 500 or status in (_MOVED, _NOT_IMPLEMENTED)


def is_no_request(error: Exception) -> bool:
    """Tell whether the store was not asked, nor would be if we tried again."""
    if isinstance(error, FileNotFoundError):
        # A file of this machine, which the driver needs; of an object there is no number.
        return error.errno is not None and not _answer(error)
    one = error if isinstance(error, BotoCoreError) else error.__cause__
    if isinstance(one, SSLError):
        return any(word in str(one) for word in _NO_TLS)
    return isinstance(one, _NO_REQUEST)
