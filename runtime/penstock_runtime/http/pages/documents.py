"""Pages for browsers: the playground, the reference page, and the OpenAPI document.

The pages are files in this folder and load nothing from other hosts, so that they work offline. They contain nothing
about the endpoint (they fetch it with the user's token), so they are public. They share `head.html`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources

from penstock.tasks import TaskName
from penstock_runtime.http.api.core.bodies import dumps
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.pages.openapi import document
from penstock_runtime.http.transport.message import Request, Response, Route

TAG = "Pages"
HTML = b"text/html; charset=utf-8"


class StaticPage:
    """One page, read once, with a content security policy that allows only its own scripts and styles."""

    def __init__(self, name: str) -> None:
        folder = resources.files("penstock_runtime.http.pages")
        head, page = (folder.joinpath(one).read_text(encoding="utf-8") for one in ("head.html", name))
        text = page.replace("<!-- head.html -->\n", head)
        self._body = text.encode()
        self._etag = b'"%b"' % hashlib.sha256(self._body).hexdigest()[:16].encode()
        policy = "; ".join(
            (
                "default-src 'none'",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
                f"script-src {_hashes(text, 'script')}",
                f"style-src {_hashes(text, 'style')}",
            )
        )
        self._headers = (
            b"etag: %b\r\ncache-control: no-cache\r\ncontent-security-policy: %b\r\nx-content-type-options: nosniff\r\n"
            b"referrer-policy: no-referrer\r\n" % (self._etag, policy.encode())
        )

    def __call__(self, request: Request) -> Response:
        """The page, or 304 if the browser has it."""
        if request.headers.get(b"if-none-match") == self._etag:
            return Response(status=304, headers=self._headers)
        return Response(self._body, content_type=HTML, headers=self._headers)


def _hashes(text: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


class Documents:
    """The handlers."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self.routes: Sequence[Route] = ()
        """The routes of the document; set when all routes are known."""
        self._document: bytes | None = None
        is_chat = service.status.task is TaskName.TEXT_GENERATION
        self.playground = StaticPage("chat.html" if is_chat else "playground.html")
        self.reference = StaticPage("reference.html")

    def openapi(self, _: Request) -> Response:
        """`/openapi.json`; made on the first request."""
        if self._document is None:
            status = self._service.status
            wants_token = self._service.settings.access.wants_token
            self._document = dumps(document(self.routes, name=status.name, task=status.task, wants_token=wants_token))
        return Response(self._document)

    def table(self) -> tuple[Route, ...]:
        """The routes."""
        plain = {"type": "string"}
        return (
            Route(
                "GET", "/openapi.json", self.openapi, "This document", "Operation", response={"type": "object"},
            ),
            Route(
                "GET", "/", self.playground, "The playground", TAG, public=True, content_type="text/html",
                response=plain,
            ),
            Route(
                "GET", "/docs", self.reference, "The reference", TAG, public=True, content_type="text/html",
                response=plain,
            ),
        )  # fmt: skip
