"""Generator of the completion scripts from the verbs.

`python -m flyer.cli.completion` writes `completions/`; `flyer completion SHELL` prints a file.
"""

from __future__ import annotations

import sys

from flyer.cli.completion_scripts import FOLDER, NAMES
from flyer.cli.verbs import VERBS

__all__ = ["files"]

_HEADER = "# Generated from the verbs by `python -m flyer.cli.completion`.\n"


def files() -> dict[str, str]:
    """Every script by its file name."""
    verbs = _verbs()
    return {
        NAMES["bash"]: _bash(verbs),
        NAMES["zsh"]: _zsh(verbs),
        NAMES["fish"]: _fish(verbs),
    }


Verbs = dict[str, tuple[str, list[tuple[list[str], str, bool]]]]


def _verbs() -> Verbs:
    """Verb → its help, and its options (names, help, whether a value follows)."""
    verbs: Verbs = {}
    for verb in sorted(VERBS, key=lambda verb: verb.name):
        options = [
            (list(option.spellings), _first(option.about), option.takes_value)
            for option in verb.arguments
            if option.is_option
        ]
        verbs[verb.name] = (_first(verb.about), [*options, (["-h", "--help"], "Help.", False)])
    return verbs


def _first(text: str | None) -> str:
    return (text or "").strip().split("\n")[0].replace("'", "").replace("`", "").rstrip(".")


def _bash(verbs: Verbs) -> str:
    cases = "\n".join(
        f'        {name}) words="{" ".join(name for names, _, _ in options for name in names)}" ;;'
        for name, (_, options) in verbs.items()
    )
    return f"""{_HEADER}_flyer() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$previous" in
        -o|--output) words="table wide json yaml" ;;
        --state|--cluster|--kubeconfig) COMPREPLY=($(compgen -f -- "$current")); return ;;
    esac
    if [[ -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{" ".join(verbs)}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    elif [[ "${{COMP_WORDS[1]}}" == run ]]; then
        COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$current") $(compgen -d -- "$current"))
    fi
}}
complete -o filenames -F _flyer flyer
"""


def _zsh(verbs: Verbs) -> str:
    described = "\n".join(f"        '{name}:{text}'" for name, (text, _) in verbs.items())
    cases = []
    for name, (_, options) in verbs.items():
        lines = " \\\n".join(
            f"                '{item}[{_plain(text)}]{':value:_files' if value else ''}'"
            for names, text, value in options
            for item in names
        )
        cases.append(
            f"            {name}) _arguments \\\n{lines} \\\n                '*:file:_files' ;;"
        )
    joined = "\n".join(cases)
    return f"""#compdef flyer
{_HEADER}_flyer() {{
    local -a verbs
    verbs=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
    else
        local verb=$words[2]
        shift words; (( CURRENT-- ))
        case "$verb" in
{joined}
        esac
    fi
}}
_flyer "$@"
"""


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", ";")


def _fish(verbs: Verbs) -> str:
    lines = [_HEADER + "complete -c flyer -f"]
    for name, (text, options) in verbs.items():
        lines.append(f"complete -c flyer -n __fish_use_subcommand -a {name} -d '{text}'")
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        for names, words, value in options:
            flags = " ".join(
                f"-l {item[2:]}" if item.startswith("--") else f"-s {item[1:]}" for item in names
            )
            lines.append(
                f"complete -c flyer {condition} {flags}{' -r' if value else ''} -d '{words}'"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
