"""`walmere dashboard`, and the options of `run` and `receive` that serve a page or metrics."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import walmere
from walmere.cli import output
from walmere.cli.options import DEFAULT, AsJson
from walmere.errors import ConfigError

if TYPE_CHECKING:
    from walmere.api import Subscription
    from walmere.dashboard.pages import Dashboard
    from walmere.metrics.families import RunCounters
    from walmere.serving.access import Access, Address
    from walmere.serving.server import PageServer, Route

TOKEN_VARIABLE: Final = "WALMERE_DASHBOARD_TOKEN"  # noqa: S105  its name
ADDRESS: Final = "127.0.0.1:8432"
"""Where the page is, by default."""

OnProgress = Callable[[Mapping[str, Any]], None]

Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="The address of the page.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="A host name under which the page is opened. Repeatable."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"A file with the token for access from other machines, or {TOKEN_VARIABLE}."),
]
Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve /metrics for Prometheus at this address.")
]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Where to listen, and who may ask."""

    listen: str = ADDRESS
    allow_host: Sequence[str] = ()
    token_file: Path | None = None


def dashboard(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="The configuration file, or a directory of them.", show_default=True)
    ] = DEFAULT,
    listen: Listen = ADDRESS,
    allow_host: AllowHost = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show a live page about one or several subscriptions.

    It needs no running subscription, and goes on until stopped. Beyond this machine, a token is needed.
    """
    from walmere.dashboard.pages import Dashboard, subscriptions_of

    found = subscriptions_of(config, walmere.Subscription)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with page(Dashboard(found), ServingOptions(listen, allow_host or (), token_file)) as server:
        if json:
            output.print_json({"url": server.url})
            sys.stdout.flush()
        else:
            announce(server.url)
        stopping.wait()


def announce(url: str) -> None:
    """Print the address of the page."""
    print(f"walmere: the dashboard is at {url}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def page(shown: Dashboard, options: ServingOptions) -> Iterator[PageServer]:
    """Serve the page while the context is open."""
    from walmere.serving.access import access_for

    address = _address(options.listen, "--listen")
    access = access_for(address, options.allow_host, _token(options.token_file), socket.gethostname())
    with _served(address, access, shown.routes(access)) as server, shown:
        yield server


@dataclass(frozen=True, slots=True)
class ServedBesideRun:
    """What `walmere run` serves: a page, or metrics, or both."""

    page: ServingOptions | None = None
    metrics: ServingOptions | None = None
    announce: Callable[[str], None] = lambda _: None  # is called with the address of the page

    @contextlib.contextmanager
    def opened(self, subscription: Subscription) -> Iterator[RunCounters | None]:
        """Serve while the context is open. Yields what counts for the metrics; None if there are none."""
        if self.page is None and self.metrics is None:
            yield None
            return
        from walmere.dashboard.pages import Dashboard
        from walmere.metrics.families import RunCounters

        counters = RunCounters(subscription.config.subscription.name)
        shown = Dashboard([subscription], counters.add_to)
        with contextlib.ExitStack() as open_:
            if self.metrics is not None:
                open_.enter_context(_metrics_server(self.metrics, shown.metrics))
            if self.page is None:
                open_.enter_context(shown)
            else:
                self.announce(open_.enter_context(page(shown, self.page)).url)
            yield counters


@contextlib.contextmanager
def metrics_of_receiver(subscription: Subscription, options: ServingOptions) -> Iterator[PageServer]:
    """Serve `/metrics` of a receiver while the context is open. It does not ask the source."""
    from walmere.metrics.families import CONTENT_TYPE, Samples, exposition
    from walmere.metrics.receiver import add_receiver_alone, receiver_report
    from walmere.serving.server import Request, Response

    name = subscription.config.subscription.name

    def fill(samples: Samples) -> None:
        add_receiver_alone(samples, name, receiver_report(subscription.directory))

    def metrics(_: Request) -> Response:
        return Response(exposition(fill), CONTENT_TYPE)

    with _metrics_server(options, metrics) as server:
        yield server


@contextlib.contextmanager
def _metrics_server(options: ServingOptions, metrics: Route) -> Iterator[PageServer]:
    """A server of `/metrics` alone, which needs a token only if one is given: it changes nothing."""
    from walmere.serving.access import access_for

    address = _address(options.listen, "--metrics")
    token = _token(options.token_file)
    access = access_for(address, options.allow_host, token, socket.gethostname(), make_token=False)
    with _served(address, access, {("GET", "/metrics"): metrics}) as server:
        yield server


def _served(address: Address, access: Access, routes: Mapping[tuple[str, str], Route]) -> PageServer:
    from walmere.serving.server import PageServer

    return PageServer(address, access, routes)


def _address(text: str, option: str) -> Address:
    from walmere.serving.access import Address

    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"reading {option}", str(error)) from None


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading the token from {file}", str(error)) from None


def together(callbacks: Sequence[OnProgress]) -> OnProgress | None:
    """One callback that calls all of these; None if there is none."""

    def call(now: Mapping[str, Any]) -> None:
        for each in callbacks:
            each(now)

    return call if callbacks else None
