"""Finds the handler of a method and path; an unknown path or method is an error that names what there is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from penstock.errors import closest
from penstock.tasks import TaskName
from penstock_runtime.errors import MethodNotAllowed, UnsupportedRoute
from penstock_runtime.http.transport.message import Request, Route


class Router:
    """All routes of one endpoint. Those of other tasks are known by name, so that a 404 can say why."""

    def __init__(self, routes: Iterable[Route], task: TaskName) -> None:
        self.task = task
        every = tuple(routes)
        self.routes = tuple(route for route in every if route.tasks is None or task in route.tasks)
        self._elsewhere = {
            route.path: route.tasks for route in every if route.tasks is not None and task not in route.tasks
        }
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            if "{" in path:
                pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
                self._patterns.append((re.compile(pattern), methods))
            else:
                self._exact[path] = methods

    def methods(self, path: str) -> tuple[dict[str, Route], dict[str, str]]:
        """Routes by method for this path, with the path's parameters; both empty when there is none."""
        found = self._exact.get(path)
        if found is not None:
            return found, {}
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return methods, {name: unquote(value) for name, value in match.groupdict().items()}
        if len(path) > 1 and path.endswith("/"):
            return self.methods(path.rstrip("/") or "/")
        return {}, {}

    def resolve(self, request: Request) -> None:
        """Set the request's route and parameters.

        UnsupportedRoute (404) names what this endpoint has; MethodNotAllowed (405) names the methods.
        """
        methods, request.parameters = self.methods(request.path)
        if not methods:
            raise self._missing(request.path)
        route = methods.get(request.method)
        if route is None and request.method == "HEAD":
            route = methods.get("GET")
        if route is None:
            allow = allowed(methods)
            raise MethodNotAllowed(f"{request.path} does not take {request.method}", allow=allow)
        request.route = route

    def _missing(self, path: str) -> UnsupportedRoute:
        posts = sorted({route.path for route in self.routes if route.method == "POST" and "{" not in route.path})
        remedy = f"POST to {', '.join(posts)}; /docs describes them"
        tasks = self._elsewhere.get(path)
        if tasks is not None:
            wanted = " or ".join(sorted(tasks))
            return UnsupportedRoute(f"{path} is for {wanted}, and this endpoint does {self.task.value}", remedy=remedy)
        close = closest(path, (route.path for route in self.routes), cutoff=0.75)
        hint = f"; did you mean {close}?" if close else ""
        shown = path if len(path) <= 100 else path[:100] + "…"
        return UnsupportedRoute(f"there is no {shown}{hint}", remedy=remedy)


def allowed(methods: Mapping[str, Route]) -> tuple[str, ...]:
    """The value of an Allow header."""
    names = {*methods, "OPTIONS"}
    if "GET" in names:
        names.add("HEAD")
    return tuple(sorted(names))
