"""The routes: the page and its files, the event stream, the buttons, and `/metrics`."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from walmere.dashboard.watch import Hub, Watch, broken
from walmere.errors import ConfigError, WalmereError
from walmere.metrics import names
from walmere.metrics.families import CONTENT_TYPE, Samples, add_status, exposition
from walmere.metrics.receiver import add_receiver, receiver_report
from walmere.serving.access import Access
from walmere.serving.server import Request, Response, Route, json_response

if TYPE_CHECKING:
    from walmere import Subscription

_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_STATIC: Final = "static"


@dataclass(frozen=True, slots=True)
class Broken:
    """A configuration of a directory that cannot be used. The others are shown."""

    file: Path
    error: ConfigError


def subscriptions_of(path: Path, open_file: Callable[[Path], Subscription]) -> list[Subscription | Broken]:
    """The subscription of a file, or those of all `*.toml` in a directory. Raises ConfigError if none can be used."""
    if not path.is_dir():
        return [open_file(path)]
    found: list[Subscription | Broken] = []
    for file in sorted(path.glob("*.toml")):
        try:
            found.append(open_file(file))
        except ConfigError as error:
            found.append(Broken(file, error))
    errors = [each.error for each in found if isinstance(each, Broken)]
    if not found:
        raise ConfigError(f"reading {path}", "there is no file *.toml", "name a file or a directory with -c")
    if len(errors) == len(found):
        raise errors[0]
    return found


@dataclass(slots=True)
class Dashboard:
    """Watches subscriptions while the context is open. `routes` are those of the page."""

    subscriptions: Sequence[Subscription | Broken]
    add_samples: Callable[[Samples], None] = lambda _: None  # more metrics, of the process itself
    _hub: Hub = field(default_factory=Hub)
    _watches: dict[int, Watch] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Dashboard:
        for number, each in enumerate(self.subscriptions):
            if isinstance(each, Broken):
                self._hub.publish(number, broken(number, each.file.name, each.error))
            else:
                self._watches[number] = self._open.enter_context(Watch(number, each, self._hub))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._hub.close()
        self._open.close()

    def routes(self, access: Access) -> Mapping[tuple[str, str], Route]:
        """All routes of the page."""
        return {
            ("GET", "/"): lambda _: self._page(access),
            ("GET", "/static/"): self._file,
            ("GET", "/events"): lambda _: Response(events=self._events()),
            ("GET", "/metrics"): self.metrics,
            ("POST", "/api/"): self._action,
        }

    def metrics(self, _: Request) -> Response:
        """`/metrics` of all subscriptions."""
        return Response(exposition(self._add_samples), CONTENT_TYPE)

    def _add_samples(self, samples: Samples) -> None:
        for each in self._watches.values():
            if (last := each.last_status()) is not None:
                status, age = last
                samples.add(names.STATUS_AGE, age, each.name)
                samples.add(names.RUNNING, each.subscription.running, each.name)
                add_status(samples, status)
                add_receiver(samples, each.name, receiver_report(each.subscription.directory))
        self.add_samples(samples)

    def _page(self, access: Access) -> Response:
        text = _read("page.html").decode().replace("{{page}}", html.escape(access.page))
        return Response(text.encode(), "text/html; charset=utf-8")

    def _file(self, request: Request) -> Response:
        name = request.path.removeprefix("/static/")
        suffix = Path(name).suffix
        if "/" in name or suffix not in _TYPES or name not in _names():
            return Response(b"not found\n", code=404)
        return Response(_read(name), _TYPES[suffix])

    def _events(self) -> Iterator[bytes]:
        yield b"retry: 2000\n\n"
        for each in self._watches.values():
            yield each.first_event()
        yield from self._hub.events()

    def _action(self, request: Request) -> Response:
        """A button: /api/NUMBER/pause, resume or resync; the tables to copy again are in the body."""
        number, _, action = request.path.removeprefix("/api/").partition("/")
        watch = self._watches.get(int(number)) if number.isdecimal() else None
        if watch is None:
            return Response(b"not found\n", code=404)
        subscription = watch.subscription
        match action:
            case "pause":
                subscription.pause()
            case "resume":
                subscription.resume()
            case "resync":
                subscription.resync(_tables(request.body), wait=False)
            case _:
                return Response(b"not found\n", code=404)
        return json_response({"done": action})


def _tables(body: bytes) -> list[str]:
    try:
        tables = json.loads(body)["tables"]
    except (ValueError, KeyError, TypeError):
        tables = None
    if not isinstance(tables, list) or not tables or not all(isinstance(each, str) for each in tables):
        raise WalmereError("copying tables again", "the request names no table", "reload the page")
    return tables


def _names() -> set[str]:
    return {each.name for each in resources.files(__package__).joinpath(_STATIC).iterdir()}


def _read(name: str) -> bytes:
    return resources.files(__package__).joinpath(_STATIC, name).read_bytes()
