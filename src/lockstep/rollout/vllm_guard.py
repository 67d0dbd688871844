"""A vLLM server's requests in; those that carry its token, and questions after its health, through.

vLLM's own --api-key guards /v1 and a few more, and leaves out /collective_rpc, /pause and the other routes that replace
weights (vllm/entrypoints/serve/middleware/authenticate.py in 0.32). Given to vLLM with --middleware; standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_ENV = "VLLM_API_KEY"
"""Where vLLM itself looks for its key: not the command line, which every user of the host can read."""
_OPEN_PATHS = ("/health",)
_Message = MutableMapping[str, Any]


class RequireToken:
    """ASGI middleware: 401 for any request without "Authorization: Bearer <token>"."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        """Raises `RuntimeError` where no token is set: a guard that lets everybody through is none."""
        token = os.environ.get(TOKEN_ENV, "")
        if not token:
            raise RuntimeError(f"lockstep's guard needs the token in {TOKEN_ENV}, which is not set")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(
        self,
        scope: _Message,
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                return await _refuse(scope["type"], send)
        await self._app(scope, receive, send)


async def _refuse(kind: str, send: Callable[[_Message], Awaitable[None]]) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
