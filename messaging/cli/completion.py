"""Shell completion: the scripts for shells, their installation, and the candidates that options have.

The script of a shell runs the program with the environment variable ``_MESSAGING_COMPLETE`` set to the name of the
shell, and the command line up to the cursor as arguments. Candidates go to stdout, one per line; zsh and fish also get
a tab and a short explanation. A candidate that ends with ``=`` or ``/`` is incomplete, so no space follows it. Without
candidates, the shells complete file names.

Typer finds the option or argument at the cursor, and asks it for its candidates. Its own scripts are not used: those
for bash split words at ``:`` and ``=``, which URLs and settings hold, and put a space after each candidate.

What the candidates need is imported where they are asked for: help and completion must be fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from typer._click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from messaging.cli.context_file import PREFIX, base_directory, get, load
from messaging.errors import ArgumentError

if TYPE_CHECKING:
    from messaging.adapter import Adapter

#: bash starts a new word after each of these characters, and replaces only the text after the last one
_BASH_BREAKS: Final = "=:"

#: a word that may replace the one at the cursor, and a short explanation
Candidate = tuple[str, str]

_BASH: Final = """\
_messaging_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(_MESSAGING_COMPLETE=bash "$1" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]]; then
        compopt -o nospace
    fi
}
complete -o default -F _messaging_completion messaging
"""

_ZSH: Final = """\
#compdef messaging
_messaging() {
    local -a values shown open open_shown
    local line value
    for line in "${(@f)$(_MESSAGING_COMPLETE=zsh messaging "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        value=${line%%$'\\t'*}
        [[ -z $value ]] && continue
        if [[ $value == *[=/] ]]; then
            open+=("$value")
            open_shown+=("${line/$'\\t'/  -- }")
        else
            values+=("$value")
            shown+=("${line/$'\\t'/  -- }")
        fi
    done
    if (( ! $#values && ! $#open )); then
        _files
        return
    fi
    (( $#values )) && compadd -l -d shown -a values
    (( $#open )) && compadd -S '' -l -d open_shown -a open
    return 0
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
compdef _messaging messaging
"""

_FISH: Final = """\
function __messaging_complete
    set -l words (commandline -opc)
    set -e words[1]
    set -lx _MESSAGING_COMPLETE fish
    set -l found (messaging $words (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command messaging --no-files --arguments '(__messaging_complete)'
"""

#: name of a shell -> its script
SCRIPTS: Final[Mapping[str, str]] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def current_shell() -> str:
    """Return the name of the shell that runs the program, otherwise of the user's login shell.

    Raises:
        ArgumentError: the shell has no script.
    """
    name = ""
    try:
        import shellingham

        name = shellingham.detect_shell()[0]
    except Exception:  # noqa: BLE001  # not installed, or no parent process is a shell
        name = Path(os.environ.get("SHELL", "")).name
    return check_shell(name)


def check_shell(name: str) -> str:
    """Return ``name`` if the shell has a script.

    Raises:
        ArgumentError: it has none.
    """
    if name not in SCRIPTS:
        raise ArgumentError(f"no completion for the shell {name!r}; name one of {', '.join(SCRIPTS)}")
    return name


def install(shell: str) -> tuple[Path, Path | None]:
    """Install the script of ``shell`` for the user, so that new shells load it.

    Idempotent: the line that loads the script is added to the start-up file of bash or zsh once. fish needs none.

    Returns:
        The script, and the start-up file that loads it, or ``None``.

    Raises:
        OSError: a file cannot be written.
    """
    home = Path.home()
    if shell == "fish":
        script = base_directory("XDG_CONFIG_HOME", home / ".config") / "fish" / "completions" / "messaging.fish"
        start = None
    else:
        script = base_directory("XDG_DATA_HOME", home / ".local" / "share") / "messaging" / f"completion.{shell}"
        start = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPTS[shell])
    if start is not None:
        line = f"[ -r '{script}' ] && . '{script}'\n"
        before = start.read_text(errors="surrogateescape") if start.exists() else ""
        if line not in before:
            with start.open("a", errors="surrogateescape") as file:
                file.write(("\n" if before and not before.endswith("\n") else "") + line)
    return script, start


# --- answers


class Completer(ShellComplete):
    """Returns the candidates in the form that the script of a shell expects.

    Args:
        app: the program.
        shell: one of :data:`SCRIPTS`.
        arguments: for bash the whole line up to the cursor; for the others its words after the program's name.
    """

    def __init__(self, app: typer.Typer, shell: str, arguments: Sequence[str]) -> None:
        program: Any = typer.main.get_command(app)
        super().__init__(program, {}, "messaging", "")
        self._is_bash = shell == "bash"
        if self._is_bash:
            line = arguments[0]
            self._words = [*split_arg_string(line)[1:], *([""] if line[-1:].isspace() else [])]
        else:
            self._words = [*arguments]
        self._incomplete = self._words.pop() if self._words else ""

    def source_vars(self) -> dict[str, Any]:
        """See the base class: the scripts have no variables."""
        return {}

    def get_completion_args(self) -> tuple[list[str], str]:
        """See the base class."""
        return self._words, self._incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """See the base class."""
        option, equals, _ = self._incomplete.partition("=")
        value = f"{option}={item.value}" if equals and option.startswith("--") else str(item.value)
        if self._is_bash:
            return value[max(map(self._incomplete.rfind, _BASH_BREAKS)) + 1 :]
        explanation = " ".join((item.help or "").split())
        return f"{value}	{explanation}" if explanation else value


# --- candidates of options and arguments


def brokers() -> Iterator[Candidate]:
    """Yield the URL schemes and the saved contexts, as ``@NAME``."""
    from importlib.metadata import entry_points

    from messaging.adapter import ENTRY_POINT_GROUP

    for scheme in sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}):
        yield f"{scheme}://", ""
    for name, url in contexts():
        yield PREFIX + name, url


def contexts() -> Iterator[Candidate]:
    """Yield the name and the URL of each saved context."""
    return ((name, each.shown_url) for name, each in sorted(load().items()))


def extensions(context: typer.Context) -> Iterator[str]:
    """Yield the extensions that a command can give to a message, or to a subscription."""
    from messaging.model import CHECKS, OVERFLOW_POLICIES, PUBLISH_ONLY, SUBSCRIBE_ONLY, boolean

    publishes = context.info_name in ("pub", "request")
    checks = {key: check for key, check in CHECKS.items() if key not in (SUBSCRIBE_ONLY if publishes else PUBLISH_ONLY)}
    adapter = _adapter(context)
    if adapter is not None:
        checks |= adapter.publish_extensions if publishes else adapter.subscribe_extensions
    for key, check in sorted(checks.items()):
        if check is boolean:
            yield f"{key}=true"
            yield f"{key}=false"
        elif key == "overflow":
            yield from (f"{key}={policy}" for policy in OVERFLOW_POLICIES)
        else:
            yield f"{key}="


def settings(context: typer.Context) -> Iterator[Candidate]:
    """Yield the settings of the broker's adapter, or the settings that all adapters have."""
    from messaging.model.settings import Settings

    adapter = _adapter(context)
    kind = Settings if adapter is None else adapter.settings_type
    for name, field in sorted(kind.model_fields.items()):
        yield f"{name}=", field.description or ""


def _adapter(context: typer.Context) -> type[Adapter] | None:
    """Return the adapter of the broker in the command line or the environment, or ``None`` without a broker."""
    from messaging.environment import URL_VARIABLE
    from messaging.instance import find_adapter

    # arguments before an option without a value are not parsed
    words = [*context.args, context.params.get("url"), context.params.get("url_option")]
    url = next((word for word in words if word and ("://" in word or word.startswith(PREFIX))), None)
    url = url or os.environ.get(URL_VARIABLE, "")
    if url.startswith(PREFIX):
        url = get(url.removeprefix(PREFIX)).url
    scheme, separator, _ = url.partition("://")
    return find_adapter(scheme.lower()) if separator else None


def content_types() -> Sequence[str]:
    """Return the content types that have a codec."""
    from messaging.codecs import content_types

    return content_types()
