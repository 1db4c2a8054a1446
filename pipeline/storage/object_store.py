"""The one thing that pyarrow's file systems lack: a file that only one of many can make.

obstore asks the store itself (S3: `If-None-Match: *`, GCS and Azure: their preconditions), which answers
one writer with success and all others with a refusal. Everything else goes through pyarrow. For S3 the
credentials are those that boto3 finds, and renews: it knows every kind of profile that pyarrow knows (keys,
SSO, `credential_process`). It also knows `role_arn`, which pyarrow does not.
"""

from __future__ import annotations

import functools
import os
from typing import Any
from urllib.parse import parse_qs

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")


def create(root: str, key: str, data: bytes, region: str = "", query: str = "") -> bool:
    """Writes the object `key` below `root`, such as s3://bucket; False where it is there already.

    `query`: of the URI, such as ?endpoint_override=…

    Raises OSError where the store cannot be reached or does not allow it, or where there are no credentials.
    """
    from obstore import put
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        put(_store(root, region, query), key, data, mode="create", use_multipart=False)
    except (AlreadyExistsError, PreconditionError):
        return False
    except (BaseError, OSError) as error:  # some of obstore's are both
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"{root}/{key}: {first_line}") from None
    return True


@functools.cache
def _store(root: str, region: str, query: str) -> Any:
    from obstore.store import from_url

    if not root.startswith("s3:"):
        return from_url(root)
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        credentials = Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        raise OSError(f"no credentials for S3 ({error}); allowed: those that boto3 finds") from None
    options = {name: values[0] for name, values in parse_qs(query.removeprefix("?")).items()}
    config: dict[str, Any] = {"region": region} if region else {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if override := options.get("endpoint_override"):
        endpoint = (
            override if "://" in override else f"{options.get('scheme', 'https')}://{override}"
        )
    if endpoint:
        config["endpoint"] = endpoint
    client: Any = {"allow_http": endpoint.startswith("http://")}
    return from_url(  # type: ignore[call-overload]
        root, config=config, client_options=client, credential_provider=credentials
    )
