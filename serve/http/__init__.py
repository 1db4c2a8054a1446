"""The service over HTTP, without Ray: routes, others' formats, errors, and the checks before them."""
