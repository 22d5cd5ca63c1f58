"""The command `duo`: which commands there are, and how an error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, UnusedCliTokensError

from duodecoding import __version__
from duodecoding.cli.bench import bench
from duodecoding.cli.chat import chat
from duodecoding.cli.distill import distill
from duodecoding.cli.doctor import doctor
from duodecoding.cli.draft_server import draft_server
from duodecoding.cli.flags import ENV_PREFIX, takes_value
from duodecoding.cli.interrupts import exit_code
from duodecoding.cli.models import models
from duodecoding.cli.pair import pair
from duodecoding.cli.profile import profile
from duodecoding.cli.run import STDIN, run
from duodecoding.cli.serve import serve
from duodecoding.cli.simulate import simulate
from duodecoding.cli.trace import trace
from duodecoding.errors import DuoError

SIGINT, SIGPIPE = 2, 13
USAGE = 2


app = App(
    name="duo",
    help="Speculative decoding that never changes the answer: a draft guesses ahead, the target checks.",
    version=f"duo {__version__}",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
COMMANDS: tuple[Callable[..., int], ...] = (
    run,
    chat,
    serve,
    draft_server,
    simulate,
    pair,
    distill,
    bench,
    profile,
    trace,
    models,
    doctor,
)
for place, command in enumerate(COMMANDS):
    app.command(command, sort_key=place)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    tokens = _mark_stdin(sys.argv[1:] if argv is None else argv)
    _forget_empty_variables()
    return guarded(lambda: app(tokens, exit_on_error=False, print_error=False, result_action="return_value"))


def guarded(work: Callable[[], object]) -> int:
    """The exit code of some work: its own, else 0; 1 for a failure, 2 for wrong usage, 128 + n for a signal n."""
    try:
        code = work()
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(_usage(error), USAGE)
    except DuoError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return exit_code(SIGINT)
    except BrokenPipeError:
        _close_stdout()
        return exit_code(SIGPIPE)
    except OSError as error:
        _close_stdout()
        return _fail(f"the system refused: {error.strerror or error}", 1)
    return code if isinstance(code, int) else 0


def _mark_stdin(tokens: Sequence[str]) -> list[str]:
    """A `-` that is not the value of a flag means stdin. cyclopts would take it for an option."""
    before = ["", *tokens]
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return [STDIN if t == "-" and i < end and not takes_value(before[i]) else t for i, t in enumerate(tokens)]


def _forget_empty_variables() -> None:
    # `DUO_MODE= duo run` means not set, as for most programs.
    for name in [name for name, value in os.environ.items() if name.startswith(ENV_PREFIX) and not value]:
        del os.environ[name]


def _usage(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{error.unused_tokens[0]!r} is one argument too many. Put a prompt of several words in quotes."
    line = str(error)
    return line[:1].lower() + line[1:]


def _fail(line: str, code: int) -> int:
    from duodecoding.cli.terminal import Terminal

    Terminal().error(line)
    return code


def _close_stdout() -> None:
    # The interpreter flushes stdout once more at its end, which would fail again and say so.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
