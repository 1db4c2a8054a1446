"""The messages of a request (ASGI) on their way through the guard: from the client, and back to it."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from serve.errors import CODES, FULL, Refusal

METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
_CODE_OF_RAY_STATUS = {
    404: "not_ready",
    408: "too_late",
    429: "overloaded",
    500: "internal",
    503: "not_ready",
}


class RequestMessages:
    """What an app receives: the body that the guard has read, and then what the client still sends."""

    def __init__(self, body: bytes | None, receive: Receive) -> None:
        """`body`: None: the method has none."""
        self._body, self._receive = body, receive
        self._is_body_sent = body is None
        self.has_client_left = False

    async def receive(self) -> Message:
        if not self._is_body_sent:
            self._is_body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        message = await self._receive()
        while self._body is not None and message["type"] == "http.request":
            message = await self._receive()  # the same body again: it came in the scope
        self.has_client_left = message["type"] == "http.disconnect"
        return message


class AnswerMessages:
    """Sends the answer: adds the request id, drops the body for HEAD, and in a proxy holds Ray's own errors
    back until `rewrite_rays_error`."""

    def __init__(self, send: Send, request_id: str, method: str, is_proxy: bool) -> None:
        self._send, self._request_id = send, request_id
        self._head_only, self._is_proxy = method == "HEAD", is_proxy
        self._has_body = method in METHODS_WITH_BODY
        self._ray_error: tuple[int, Headers] | None = None
        self.status = 0
        self.is_passed_on = False
        """Whether this is a proxy, and a replica gave the answer."""
        self.is_from_full_replica = False
        """See FULL."""

    @property
    def replica_died(self) -> bool:
        """Whether the replica died: then Ray's proxy answers 500 or 503 in plain text, or nothing."""
        return self.killed_replica or (self._ray_error is not None and self._ray_error[0] == 503)

    @property
    def killed_replica(self) -> bool:
        """Whether the replica died during the request, not before."""
        return not self.status or (self._ray_error is not None and self._ray_error[0] == 500)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._ray_error = None
            self.status = int(message["status"])
            headers = MutableHeaders(scope=message)
            media = headers.get("content-type", "")
            if self._is_proxy and self.status >= 400 and not media.startswith("application/json"):
                self._ray_error = self.status, headers
                return
            headers["x-request-id"] = self._request_id
            if self._is_proxy and FULL in headers:
                self.is_from_full_replica = True
                del headers[FULL]
        elif self._ray_error is not None:
            return
        elif message["type"] == "http.response.body" and self._head_only:
            message = {**message, "body": b""}
        await self._send(message)

    async def rewrite_rays_error(self) -> None:
        """Sends Ray's error, if there is one, in our format. Ray says 404 while the replicas start."""
        if self.status and self._ray_error is None:
            self.is_passed_on = True
            return
        status, headers = self._ray_error or (500, Headers())
        code = _CODE_OF_RAY_STATUS.get(status, "internal" if status >= 500 else "invalid_request")
        if code == "too_late" and not self._has_body:
            code = "not_ready"  # no replica is alive
        retry_after = headers.get("retry-after", "1")
        retry_after_s = (
            float(retry_after)
            if code in ("overloaded", "not_ready") and retry_after.isdecimal()
            else 0.0
        )
        response = Refusal(code, CODES[code].text, None, retry_after_s).response()
        response.headers["x-request-id"] = self._request_id
        self.status = response.status_code
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self._send(start)
        body = b"" if self._head_only else response.body
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
