"""Errors of `obstore` as ours: whether to try again, and what to do. No error has a secret in its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from walmere.errors import StoreError, StoreRefused, StoreUnavailable, WalmereError

_QUERY: Final = re.compile(r"(https?://[^\s?]+)\?\S+")
"""A URL may have a signature after its question mark."""
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>", re.DOTALL)
_STATUS: Final = re.compile(r"non-2xx status code: (\d{3}[^:\n]*)")
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist|FilesystemNotFound")
_METADATA: Final = re.compile(r"169\.254\.169\.254|metadata\.google\.internal|/latest/(?:api/token|meta-data)")
_REFUSED: Final = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|AccessDenied|Malformed"
)
_RETRY: Final = "see whether the store can be reached; a run without --once or --until retries"
_ENVIRONMENT: Final = (
    "set the credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
    " GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY), or give the machine a role"
)
CREDENTIALS: Final = f"{_ENVIRONMENT}; on a cluster, executors need them, too: `walmere help cluster`"


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise what is raised inside as a StoreError. FileNotFoundError stays, unless the bucket does not exist.

    So do the two refusals of conditional puts.
    """
    from obstore import exceptions  # noqa: PLC0415  only where a store is used

    try:
        yield
    except (WalmereError, exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        if _NO_BUCKET.search(str(error)):
            raise translate(error, doing) from None
        raise FileNotFoundError(f"{doing}: {readable(error)}") from None
    except Exception as error:
        raise translate(error, doing) from None
    except BaseException as error:
        # some failures of obstore are panics of Rust, which are no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise StoreError(doing, readable(error)) from None


def translate(error: BaseException, doing: str) -> StoreError:
    """Our error for one of `obstore`."""
    from obstore import exceptions  # noqa: PLC0415

    text, wrong = str(error), readable(error)
    if _METADATA.search(text):
        return StoreRefused(doing, "there are no credentials, and the machine has no role", CREDENTIALS)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or _REFUSED.search(text):
        return StoreRefused(doing, wrong, f"{_ENVIRONMENT}; it must be allowed to read, write, list and delete there")
    if _NO_BUCKET.search(text):
        return StoreRefused(doing, wrong, "create the bucket, or correct its name")
    status = _STATUS.search(text)
    if "redirect" in text and "region" in text:
        return StoreRefused(doing, wrong, "set [storage] region to the region of the bucket")
    if isinstance(error, exceptions.NotSupportedError | NotImplementedError | exceptions.InvalidPathError):
        return StoreError(doing, wrong)
    if isinstance(error, exceptions.UnknownConfigurationKeyError | ValueError | TypeError):
        return StoreError(doing, wrong, "correct [storage]; `walmere help configuration` lists the keys")
    if status is not None and status[1][0] == "4" and status[1][:3] not in ("408", "409", "425", "429"):
        return StoreError(doing, wrong)
    return StoreUnavailable(doing, wrong, _RETRY)


def out_of_range(error: BaseException) -> bool:
    """Whether a range begins after the end of the object. The client says so itself, if the server sends no error."""
    text = str(error)
    status = _STATUS.search(text)
    return (status is not None and status[1].startswith("416")) or "Wanted range starting at" in text


def readable(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = _QUERY.sub(r"\1", str(error))
    first = text.partition("\n\nDebug source")[0]
    code, message, status = _CODE.search(first), _MESSAGE.search(first), _STATUS.search(first)
    if code is not None or message is not None:
        parts = [each[1].strip() for each in (status, code, message) if each is not None]
        return ": ".join(dict.fromkeys(part.rstrip(".") for part in parts if part))
    return " ".join(first.split())[:500] or type(error).__name__
