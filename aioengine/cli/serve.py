"""`aioengine serve`: a model behind OpenAI's HTTP API, with a status page."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, EngineConfig, EngineState, demo_model
from aioengine.cli.loading import new_engine, new_runner, say, started
from aioengine.cli.options import (
    DEMO,
    Commands,
    add_engine_flags,
    checked,
    decimal,
    new_parser,
    parse_bytes,
)
from aioengine.errors import EngineDeadError, InvalidRequestError

__all__ = ["add_parser", "run"]

API_KEY = "AIOENGINE_API_KEY"
MANY: dict[str, Any] = {"action": "append", "default": []}
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
KEY_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
SWITCH_INTERVAL_S = 0.0005
"""Threads that make media ready hold the lock a tenth as long as by default, while others wait."""
QUEUED_PER_SEQ = 16
"""Completions that may wait for each that may run, where nothing else is said."""


def add_parser(commands: Commands) -> None:
    """The flags of the command."""
    parser = new_parser(
        commands,
        "serve",
        "serve a model over HTTP",
        "OpenAI's API is below /v1, a status page at /, a page to try the model at /try. SIGTERM "
        "or Ctrl-C lets requests finish; a second one does not.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=checked(decimal, lambda port: port <= 65535, "a port, 0 to 65535"),
        default=8000,
        metavar="N",
        help="0: a free one (default: 8000)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="[NAME=]KEY",
        help="asked of clients; may be given again, one for each; better set as "
        f"{API_KEY}, with spaces between several, which lists of processes do not show",
    )
    parser.add_argument(
        "--served-model-name",
        **MANY,
        metavar="NAME",
        help="by which clients ask for the model; may be given again (default: the model's own)",
    )
    bodies = ("body", 64, "one request"), ("bodies", 256, "all requests under way")
    for name, default_mib, whose in bodies:
        parser.add_argument(
            f"--max-{name}-bytes",
            type=parse_bytes,
            default=default_mib << 20,
            metavar="SIZE",
            help=f"of {whose} (default: {default_mib}MiB)",
        )
    parser.add_argument(
        "--trusted-hosts",
        **MANY,
        metavar="HOST",
        help="that requests may name in their Host header, such as api.example or *.example; may "
        "be given again (default: on a loopback address its own names, else any)",
    )
    parser.add_argument(
        "--allowed-origins",
        **MANY,
        metavar="ORIGIN",
        help="whose web pages may send requests and read answers, such as https://app.example, or "
        "*; may be given again (default: none but the server's own)",
    )
    times = (
        ("drain-timeout", 30.0, "for requests to finish in, once the server is asked to stop"),
        ("switch-interval", SWITCH_INTERVAL_S, "of sys.setswitchinterval"),
    )
    for name, default, what in times:
        parser.add_argument(
            f"--{name}",
            type=checked(float, lambda seconds: 0 <= seconds < math.inf, "a number of seconds"),
            default=default,
            metavar="SECONDS",
            help=f"{what} (default: {default:g})",
        )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: info)")
    add_engine_flags(parser, {"max_queued_requests": f"{QUEUED_PER_SEQ} x max_num_seqs"})
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    sys.setswitchinterval(min(max(options.switch_interval, 1e-6), 1))
    asgi, server = _import("aioengine.asgi"), _import("aioengine.cli.server")
    if "max_queued_requests" not in options:
        num_seqs = getattr(options, "max_num_seqs", EngineConfig.max_num_seqs)
        options.max_queued_requests = QUEUED_PER_SEQ * num_seqs
    engine, api_keys = new_engine(options), _api_keys(options)
    is_local = _import("aioengine.asgi.origins").is_loopback(options.host)
    trusted = options.trusted_hosts and ["loopback", *options.trusted_hosts]
    app = asgi.service_app(  # before the engine starts: its status page shows all there was
        engine,
        model_names=options.served_model_name or _own_names(engine),
        api_key=api_keys,
        max_body_bytes=options.max_body_bytes,
        max_bodies_bytes=options.max_bodies_bytes,
        trusted_hosts=trusted or (["loopback"] if is_local else None),
        allowed_origins=options.allowed_origins,
    )
    with server.bind(options.host, options.port) as bound, new_runner() as runner:
        is_open = api_keys is None and not is_local
        new_server = partial(
            server.DrainingServer,
            app,
            engine,
            drain_timeout_s=options.drain_timeout,
            log_level=options.log_level,
            announce=partial(_announce, options.host, bound, is_open),
            bodies=app.state.bodies,
        )
        runner.run(_serve(engine, new_server, bound, server.warnings_logged))


def _own_names(engine: AsyncEngine) -> list[str]:
    """The model's name; the word that stands for the shipped one will do for it too."""
    is_shipped = Path(engine.model) == demo_model()
    return [engine.model_name, *([DEMO] if is_shipped else [])]


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aioengine"):
            raise
        message = f'serve needs {error.name}: pip install "aioengine[serve]"'
        raise InvalidRequestError(message, parameter="serve") from error


def _api_keys(options: argparse.Namespace) -> dict[str, str] | None:
    """Name -> key; one without a name has its number for that."""
    given: list[str] | None = options.api_key
    if given is None and API_KEY in os.environ:
        given = os.environ[API_KEY].split() or [""]
    if given is None:
        return None
    keys: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        name, _, key = text.partition("=")
        if not KEY_NAME.fullmatch(name) or not key.strip("="):  # base64 may end with some
            name, key = str(number), text
        if not key.strip():
            raise InvalidRequestError(
                f"the API key is empty; leave out --api-key, and unset {API_KEY}, to serve without "
                "one",
                parameter="api_key",
            )
        if name in keys:
            message = f"two API keys have the name {name!r}; give each its own"
            raise InvalidRequestError(message, parameter="api_key")
        keys[name] = key
    return keys


def _announce(host: str, bound: Any, is_open: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{bound.getsockname()[1]}"
    say(f"API          {url}/v1\nstatus page  {url}/\ntry it       {url}/try\n")
    if is_open:
        sys.stderr.write(
            f"Anyone who can reach this address can use the model: {API_KEY} is not set.\n"
        )


async def _serve(
    engine: AsyncEngine,
    new_server: Callable[[], Any],
    bound: Any,
    warnings_logged: Callable[[], AbstractContextManager[None]],
) -> None:
    server = new_server()  # which sets up the log
    async with started(engine):
        with warnings_logged():
            await server.serve([bound])
        if engine.state is EngineState.DEAD:
            raise EngineDeadError("the engine has died; start the server anew")
