"""`aioengine serve`: a model behind OpenAI's HTTP API, with a status page."""

from __future__ import annotations

import argparse
import math
import os
import sys
from importlib import import_module
from typing import Any

from aioengine import AsyncEngine
from aioengine.cli.loading import new_engine, new_runner, started
from aioengine.cli.options import Commands, add_engine_flags, new_parser, parse_bytes
from aioengine.errors import EngineDeadError, InvalidRequestError
from aioengine.types import EngineState

__all__ = ["add_parser", "run"]

API_KEY = "AIOENGINE_API_KEY"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
LOOPBACK = ("127.", "localhost", "::1")


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands,
        "serve",
        "serve a model over HTTP",
        "OpenAI's API is below /v1, a status page at /. SIGTERM or Ctrl-C lets requests finish; a "
        "second one does not.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="0: a free one (default: 8000)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"asked of clients; better set as {API_KEY}, which lists of processes do not show",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="by which clients ask for the model; may be given again (default: the model's own)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=parse_bytes,
        default=64 << 20,
        metavar="SIZE",
        help="of one request (default: 64MiB)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for requests to finish in, once the server is told to stop (default: 30)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: info)")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    asgi, server = _import("aioengine.asgi"), _import("aioengine.cli.server")
    engine, api_key = new_engine(options), _api_key(options)
    with server.bind(options.host, options.port) as bound, new_runner() as runner:
        runner.run(_serve(options, engine, asgi, server, api_key, bound))
    return 0


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aioengine"):
            raise
        raise InvalidRequestError(
            f'serve needs {error.name}: pip install "aioengine[serve]"', parameter="serve"
        ) from error


def _api_key(options: argparse.Namespace) -> str | None:
    key: str | None = options.api_key
    if key is None:
        key = os.environ.get(API_KEY)
    if key is not None and not key.strip():
        raise InvalidRequestError(
            f"the API key is empty; leave out --api-key, and unset {API_KEY}, to serve without one",
            parameter="api_key",
        )
    return key


async def _serve(
    options: argparse.Namespace,
    engine: AsyncEngine,
    asgi: Any,
    server: Any,
    api_key: str | None,
    bound: Any,
) -> None:
    app = asgi.service_app(  # before the engine starts: its status page shows all there was
        engine,
        model_names=options.served_model_name,
        api_key=api_key,
        max_body_bytes=options.max_body_bytes,
    )

    def announce() -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{bound.getsockname()[1]}"
        sys.stdout.write(f"API          {url}/v1\nstatus page  {url}/\n")
        sys.stdout.flush()
        if api_key is None and not options.host.startswith(LOOPBACK):
            sys.stderr.write(f"Whoever can reach this address can use it: {API_KEY} is not set.\n")

    async with started(engine):
        await server.DrainingServer(
            app,
            engine,
            drain_timeout_s=options.drain_timeout,
            log_level=options.log_level,
            announce=announce,
        ).serve([bound])
        if engine.state is EngineState.DEAD:
            raise EngineDeadError("the engine has died; start the server anew")
