"""The program: its global options, and the exit code of each error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Final

import typer

from messaging.cli import options
from messaging.cli.commands import Commands
from messaging.cli.completion import SCRIPTS, check_shell, current_shell, install
from messaging.cli.options import flag, option
from messaging.cli.output import PROGRAM, ExitCode, ReaderGoneError, diagnostics, report, write
from messaging.errors import ArgumentError, CodecError, ConfigurationError, MessagingError, UnsupportedFeatureError

#: the error of typer for a wrong command line; its module depends on the version of typer
_CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

#: errors of the input, not of the broker, the network or the clock
_BAD_INPUT: Final = (ConfigurationError, ArgumentError, UnsupportedFeatureError, CodecError)

#: options of other clients -> the hint for their users
_IN_URL: Final = "part of the URL: host and port as in mqtt://localhost:1883, user and password before the host"
_ELSEWHERE: Final = "the password is part of the URL, or in MESSAGING_PASSWORD or MESSAGING_PASSWORD_FILE"
_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("-h", "--host", "-p", "--port", "--username", "-U"), _IN_URL),
    **dict.fromkeys(("-P", "--pw", "--password"), _ELSEWHERE),
}

logger = logging.getLogger(__name__)

app = options.group(
    PROGRAM,
    cls=Commands,
    context_settings={"max_content_width": 100},
    epilog=(
        "Exit codes: 0 done; 1 failed at run time: no connection, refused, not confirmed, an error of the responder, "
        "or messages that bench lost; 2 the command line or the input is wrong; 3 the timeout passed before --count "
        "messages or the reply arrived; 130 interrupted by SIGINT or SIGTERM."
    ),
)


def _version(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:
        write(f"{PROGRAM} {version('rx-messaging')}\n".encode())
        raise typer.Exit


def _show_completion(context: typer.Context, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        write(SCRIPTS[check_shell(shell)].encode())
        raise typer.Exit


def _install_completion(context: typer.Context, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        script, start = install(check_shell(shell))
        loaded = f", which {start} loads" if start is not None else ""
        logger.info("completion for %s is in %s%s: it works in new shells", shell, script, loaded)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    _: Annotated[bool, flag("--version", "Show the version and exit.", callback=_version, is_eager=True)] = False,
    _install: Annotated[
        str | None,
        option(
            "--install-completion",
            "[SHELL]",
            "Install completion for bash, zsh or fish; default: the shell that runs this.",
            callback=_install_completion,
            autocompletion=lambda: SCRIPTS,
            is_eager=True,
        ),
    ] = None,
    _show: Annotated[
        str | None,
        option(
            "--show-completion",
            "[SHELL]",
            "Write the completion script to stdout instead.",
            callback=_show_completion,
            autocompletion=lambda: SCRIPTS,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Publish, subscribe, request and reply from the command line, over MQTT, AMQP and every other adapter.

    Only data goes to stdout; diagnostics go to stderr.
    """
    if context.invoked_subcommand is None:
        write(f"{context.get_help()}\n".encode())
        raise typer.Exit(ExitCode.USAGE)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; see ``messaging.cli.main``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with diagnostics():
        try:
            if given in (["--install-completion"], ["--show-completion"]):
                given.append(current_shell())
            code = app(args=given, prog_name=PROGRAM, standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return ExitCode.INTERRUPTED
        except ReaderGoneError:
            return ExitCode.OK
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # rich exits so when the reader of the help is gone
                return ExitCode.OK
            raise
        except _CommandLineError as error:
            if given[-1] != "-h" or getattr(error, "option_name", "") != "-h":  # with a value it is the host of others
                report(_explained(error))
                return ExitCode.USAGE
            return run([*given[:-1], "--help"])
        except MessagingError as error:
            report(error)
            return ExitCode.USAGE if isinstance(error, _BAD_INPUT) else ExitCode.FAILED
        except OSError as error:
            name = f"{error.filename}: " if error.filename is not None else ""
            report(f"{name}{error.strerror or type(error).__name__}")
            return ExitCode.FAILED
    return int(code or ExitCode.OK)


def _explained(error: Exception) -> str:
    text = str(getattr(error, "format_message", error.__str__)())
    hint = _HINTS.get(getattr(error, "option_name", ""))
    return f"{text} ({hint})" if hint else text
