"""The scripts that make shells ask :mod:`messaging.cli.completion`, and their installation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from messaging.cli.user_folders import base_directory
from messaging.errors import ArgumentError

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
