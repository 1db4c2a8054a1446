"""Which failures another try may mend, and trying again; unwraps exceptions of other machines from Ray's
wrappers."""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from safetensors import SafetensorError

from pipeline.config import BadInput, Stopped

ResultT = TypeVar("ResultT")
ErrorT = TypeVar("ErrorT", bound=BaseException)

# What the same code does again with the same input. Other errors (a lost node, a full disk, a broken
# connection, CUDA) may be a machine's fault. NotImplementedError is a RuntimeError, as CUDA's errors are.
DETERMINISTIC = (
    BadInput, Stopped, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
    NameError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip

# A disk is full or over its quota, a place is not to be written to, or a file or a name is too long for it.
_STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG,
    errno.EIO, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip

# Permanent errors of the object store, with an explanation for the user. obstore has its own words before the
# store's code.
_STORE_REFUSALS = {
    "RequestTimeTooSkewed":
        "this machine's clock and the object store's differ by too much",
    "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|AuthenticationFailed|"
    "valid authentication credentials|401 Unauthorized":
        "the object store does not accept the credentials",
    "Account must be specified":
        "allowed: abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/…, or AZURE_STORAGE_ACCOUNT_NAME in the "
        "environment",
    # Of the service that gives a node its credentials. Elsewhere there is none.
    "performing token request(?=.*(error sending request|status code: 4))":
        "no credentials in the environment, and this machine has no role that gives some",
    r"AccessDenied|Generic \w+ error(?=.*403 Forbidden)|lacked the necessary privileges":
        "the object store refuses access: no credentials, or a role without this right",
    "400 Bad Request(?!.*RequestTimeout).*":
        "the object store does not take the request",
}  # fmt: skip

_OUT_OF_REACH = "NETWORK_CONNECTION|error sending request|Could not connect to server"
# Of obstore. A path of a store may not be there for a moment after it was written.
_OF_A_STORE = r"Generic \w+ error|Object at location .* not found"

_WRAPPED = (
    "cause", "controller_failure", "health_check_failure", "_base_exc", "__cause__", "__context__",
)  # fmt: skip

DELAYS_S = (1.0, 4.0, 16.0)
"""Before the second, third and fourth try: an object store that is overloaded, or a network that is away
for a moment. The store's client has tried several times itself before it raises."""


def cause_of(error: BaseException, *kinds: type[ErrorT]) -> ErrorT | None:
    """The innermost exception of one of the `kinds` that a task or a worker raised; None: there is
    none."""
    pending, visited_ids = [error], set[int]()
    while pending:
        exception = pending.pop()
        if id(exception) in visited_ids:
            continue
        visited_ids.add(id(exception))
        causes = [getattr(exception, name, None) for name in _WRAPPED]
        failures = getattr(exception, "worker_failures", None)
        causes += list(failures.values()) if isinstance(failures, dict) else []
        # Ray makes a class that is both its own error and the cause's: the cause itself says more.
        if isinstance(exception, kinds) and not isinstance(
            getattr(exception, "cause", None), kinds
        ):
            return exception
        pending += [cause for cause in causes if isinstance(cause, BaseException)]
    return None


def storage_failure(error: BaseException) -> BaseException | None:
    """The error of the storage of a task, a worker or this process; None: the cause is another one."""
    failure = cause_of(error, OSError, SafetensorError)
    if isinstance(failure, OSError):
        return failure if failure.errno in _STORAGE_ERRORS else None
    return failure if "I/O error" in str(failure) else None  # safetensors gives no errno


def store_failure(error: BaseException) -> str | None:
    """How an object store has failed after all retries, in one line; None: the cause is another one."""
    text = " ".join(str(cause_of(error, OSError) or "").split())
    if re.search(_OUT_OF_REACH, text):
        return f"the object store cannot be reached: {text[:300]}"
    return f"the object store fails: {text[:300]}" if re.search(_OF_A_STORE, text) else None


def store_refusal(error: BaseException) -> str | None:
    """Why an object store refuses a request for good, in one line; None: the cause is another one."""
    failure = cause_of(error, OSError)
    text = " ".join(str(failure).split())
    for codes, meaning in _STORE_REFUSALS.items():
        if failure is not None and (match := re.search(codes, text)):
            shown = " ".join(re.sub("<.*?>", " ", match[0]).split())
            return f"{text.partition(': ')[0]}: {meaning} ({shown[:200]})"
    return None


def is_transient(error: BaseException) -> bool:
    """Whether it is an I/O error that may be gone in a moment: no full disk, no file or bucket that is not
    there."""
    permanent = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    return (
        isinstance(error, OSError)
        and not isinstance(error, permanent)
        and storage_failure(error) is None
        and store_refusal(error) is None
    )


def with_retries(action: Callable[[], ResultT], delays_s: Sequence[float] = DELAYS_S) -> ResultT:
    """Returns the result of `action`, and tries again after transient errors, with each delay once.

    Each delay is drawn from its half to its whole, so that a thousand tasks do not come back at once.
    """
    for delay in delays_s:
        try:
            return action()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(delay * random.uniform(0.5, 1.0))
    return action()
