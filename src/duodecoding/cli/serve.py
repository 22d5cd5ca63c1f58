"""`duo serve`: an OpenAI-compatible server, and a page where both processors can be watched."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from duodecoding.cli.flags import (
    FLAT,
    NO_SERVED_ENGINE_FLAGS,
    NO_SERVED_SAMPLING_FLAGS,
    NO_SERVER_FLAGS,
    ServedEngineFlags,
    ServedSamplingFlags,
    ServerFlags,
    settings,
)
from duodecoding.errors import BackendMissing
from duodecoding.types import EngineConfig, SamplingParams, ServerConfig

if TYPE_CHECKING:
    from duodecoding.llm import LLM

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    *,
    options: Annotated[ServerFlags, FLAT] = NO_SERVER_FLAGS,
    sampling: Annotated[ServedSamplingFlags, FLAT] = NO_SERVED_SAMPLING_FLAGS,
    engine_flags: Annotated[ServedEngineFlags, FLAT] = NO_SERVED_ENGINE_FLAGS,
) -> int:
    """Serve a model to OpenAI's clients and to browsers. Ends with Ctrl-C: running answers get 5 s, with a second one nothing."""
    chosen, defaults = settings(ServerConfig, options), settings(SamplingParams, sampling)
    config = settings(EngineConfig, engine_flags)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise BackendMissing("cannot serve", f"{', '.join(missing)} not installed", "Run: pip install 'duodecoding[server]'")
    from duodecoding.cli.terminal import Terminal
    from duodecoding.server import run

    terminal = Terminal()
    if not chosen.api_key and not _local(chosen.host):
        terminal.warn(f"Everyone who can reach {chosen.host} can use this server. Set an API key (DUO_API_KEY) to prevent that.")

    def load() -> LLM:
        from duodecoding.llm import LLM

        llm = LLM.from_config(config)
        terminal.note(
            f"{chosen.alias or llm.model_name} is ready · draft {llm.draft_name or 'none'} · speculation {llm.speculation}"
        )
        return llm

    with run.listen(chosen) as sock:
        host, port = sock.getsockname()[:2]

        def listening() -> None:
            terminal.note(f"Loading {config.model}. The page is at the address below, the API at /v1.")
            terminal.print(f"http://{f'[{host}]' if ':' in host else host}:{port}")

        run.serve(load, chosen, defaults, sock, listening)
    return 0


def _local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
