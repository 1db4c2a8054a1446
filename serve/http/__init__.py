"""The service over HTTP, without Ray: routes, others' formats, errors, and the checks before them.

guard, bearer_tokens   what comes before every route
api, wire              polyrank's own routes, and those of other services
bodies, json_answers   requests and answers
errors                 the format of every error
"""
