"""`duo draft-server`: a draft for engines on other machines."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from duodecoding.cli.flags import (
    FLAT,
    NO_DRAFT_MODEL_FLAGS,
    NO_DRAFT_SERVER_FLAGS,
    DraftModelFlags,
    DraftServerFlags,
    DraftServerOptions,
    settings,
)
from duodecoding.types import EngineConfig

DRAFT = Parameter(help="The draft: a .gguf file, a directory, owner/repo[:QUANT] from the hub, or a built-in name.")


def draft_server(
    draft: Annotated[str, DRAFT],
    /,
    *,
    options: Annotated[DraftServerFlags, FLAT] = NO_DRAFT_SERVER_FLAGS,
    engine_flags: Annotated[DraftModelFlags, FLAT] = NO_DRAFT_MODEL_FLAGS,
) -> int:
    """Guess for engines on other machines, one at a time. They use it with --draft-at HOST:PORT. Ends with Ctrl-C."""
    from duodecoding import models, worker
    from duodecoding.cli.terminal import Terminal

    chosen, config = settings(DraftServerOptions, options), settings(EngineConfig, engine_flags)
    terminal = Terminal()
    file = models.resolve(draft, offline=config.offline)

    def ready(host: str, port: int) -> None:
        terminal.note(f"{file.name} guesses for whoever asks at the address below.")
        terminal.print(f"{host}:{port}")

    worker.serve(file.path, config, host=chosen.host, port=chosen.port, secret=chosen.secret, ready=ready)
    return 0
