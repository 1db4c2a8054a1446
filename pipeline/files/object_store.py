"""The one thing that pyarrow's file systems lack: a file that only one of many can make.

obstore asks the store itself (S3: `If-None-Match: *`, GCS and Azure: their preconditions), which answers
one writer with success and all others with a refusal. Everything else goes through pyarrow, whose clients
know more ways to credentials.
"""

from __future__ import annotations

import configparser
import functools
import os
from pathlib import Path
from typing import Any

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")


def create(root: str, key: str, data: bytes, region: str = "") -> bool:
    """Writes the object `key` below `root`, such as s3://bucket; False where it is there already.

    Raises OSError where the store cannot be reached or does not allow it.
    """
    from obstore import put
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        put(_store(root, region), key, data, mode="create", use_multipart=False)
    except (AlreadyExistsError, PreconditionError):
        return False
    except (BaseError, OSError) as error:  # some of obstore's are both
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"{root}/{key}: {first_line}") from None
    return True


@functools.cache
def _store(root: str, region: str) -> Any:
    from obstore.store import from_url

    if not root.startswith("s3:"):
        return from_url(root)
    config: dict[str, Any] = {"region": region} if region else {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint:
        config["endpoint"] = endpoint
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        config |= _keys_of_profile()
    options: Any = {"allow_http": endpoint.startswith("http://")}
    return from_url(root, config=config, client_options=options)  # type: ignore[call-overload]


def _keys_of_profile() -> dict[str, str]:
    """The keys of AWS_PROFILE, which obstore does not read. Empty: obstore asks for the node's role."""
    profile = os.environ.get("AWS_PROFILE", "default")
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    profiles = configparser.ConfigParser()
    profiles.read(Path(file).expanduser())
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
             "aws_session_token": "session_token"}  # fmt: skip
    if not profiles.has_section(profile):
        return {}
    section = profiles[profile]
    return {name: section[key] for key, name in names.items() if key in section}
