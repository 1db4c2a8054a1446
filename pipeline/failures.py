"""Exceptions of other machines, out of Ray's wrappers; and which of them a retry cannot mend."""

from __future__ import annotations

import errno
import re
from typing import TypeVar

from safetensors import SafetensorError

from pipeline.config import BadInput, Stopped

ErrorT = TypeVar("ErrorT", bound=BaseException)

# What the same code does again with the same input. Other errors (a lost node, a full disk, a broken
# connection, CUDA) may be a machine's fault. NotImplementedError is a RuntimeError, as CUDA's errors are.
DETERMINISTIC = (
    BadInput, Stopped, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
    NameError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip

# A disk is full or over its quota, a place is not to be written to, or a file is too large for it.
_STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG,
    errno.EIO,
}  # fmt: skip

# What stores call it, and what a person should know. Another try mends none of them.
_STORE_REFUSALS = {
    "NO_SUCH_BUCKET|NoSuchBucket":
        "there is no such bucket",
    r"ACCESS_DENIED|AccessDenied|PERMISSION_DENIED|Generic \w+ error(?=.*403 Forbidden)":
        "the object store refuses access: no credentials, or a role without this right",
    "INVALID_ACCESS_KEY_ID|InvalidAccessKeyId|UNRECOGNIZED_CLIENT|SIGNATURE_DOES_NOT_MATCH|"
    "SignatureDoesNotMatch|INVALID_CLIENT_TOKEN_ID|EXPIRED_TOKEN|ExpiredToken":
        "the object store does not accept the credentials",
}  # fmt: skip

_OUT_OF_REACH = "NETWORK_CONNECTION|error sending request|Could not connect to server"

_WRAPPED = ("cause", "controller_failure", "_base_exc", "__cause__", "__context__")


def cause_of(error: BaseException, *kinds: type[ErrorT]) -> ErrorT | None:
    """The innermost exception of one of the `kinds` that a task or a worker raised; None: there is
    none."""
    waiting, seen = [error], set[int]()
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        inner = [getattr(at, name, None) for name in _WRAPPED]
        failures = getattr(at, "worker_failures", None)
        inner += list(failures.values()) if isinstance(failures, dict) else []
        # Ray makes a class that is both its own error and the cause's: the cause itself says more.
        if isinstance(at, kinds) and not isinstance(getattr(at, "cause", None), kinds):
            return at
        waiting += [found for found in inner if isinstance(found, BaseException)]
    return None


def storage_failure(error: BaseException) -> BaseException | None:
    """What the storage of a task, a worker or this process refused; None: it was something else."""
    failure = cause_of(error, OSError, SafetensorError)
    if isinstance(failure, OSError):
        return failure if failure.errno in _STORAGE_ERRORS else None
    return failure if "I/O error" in str(failure) else None  # safetensors gives no errno


def store_out_of_reach(error: BaseException) -> str | None:
    """What an object store says that could not be reached, all retries later; None: it was something else."""
    text = " ".join(str(cause_of(error, OSError) or "").split())
    return text[:300] if re.search(_OUT_OF_REACH, text) else None


def store_refusal(error: BaseException) -> str | None:
    """Why an object store will never do what it was asked, in one line; None: it was something else."""
    failure = cause_of(error, OSError)
    text = " ".join(str(failure).split())
    for codes, meaning in _STORE_REFUSALS.items():
        if failure is not None and (found := re.search(codes, text)):
            place = re.search(r"(?:for|with) key '(.*?)' in bucket '(.*?)'", text)
            where = f"{place[2]}/{place[1]}" if place else text.partition(": ")[0]
            return f"{where}: {meaning} ({found[0]})"
    return None
