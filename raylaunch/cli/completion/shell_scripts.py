"""The script of each shell, which asks `raylaunch completion --words` at each press of the tab key."""

from __future__ import annotations

from raylaunch.cli.args.flags import FLAGS

_BASH = """\
# eval "$(raylaunch completion bash)"
_raylaunch() {
    local IFS=$'\\n' cur=${COMP_WORDS[COMP_CWORD]} line files
    COMPREPLY=()
    [[ $cur == = ]] && cur=
    while read -r line; do
        line=${line%%$'\\t'*}
        if [[ $line == :files ]]; then
            files=($(compgen -f -- "$cur"))
            COMPREPLY+=("${files[@]}")
            ((${#files[@]})) && compopt -o filenames  # which quotes them, and any `=`
        else
            [[ $line == *= ]] && compopt -o nospace
            COMPREPLY+=("$line")
        fi
    done < <("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _raylaunch raylaunch
"""
_ZSH = """\
#compdef raylaunch
# eval "$(raylaunch completion zsh)", after compinit; or save it as `_raylaunch` in a folder of fpath
_raylaunch() {
    local line files=
    local -a found values
    while IFS= read -r line; do
        case $line in
            :files) files=yes ;;
            *=) values+=("$line") ;;
            *) found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}") ;;
        esac
    done < <(${words[1]} completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#found )) && _describe raylaunch found
    (( $#values )) && compadd -S '' -a values
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _raylaunch ]]; then _raylaunch "$@"; else compdef _raylaunch raylaunch; fi
"""
_FISH = """\
# raylaunch completion fish | source
function __raylaunch
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] completion --words $words[2..-1] 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c raylaunch -f -a '(__raylaunch)'
"""


def _tcsh() -> str:
    """Return a line for tcsh, which cannot ask: it completes flags, and names of files elsewhere."""
    return f"complete raylaunch 'c/--/({' '.join(flag.name for flag in FLAGS)})/' 'p/*/f/'\n"


SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH, "tcsh": _tcsh()}
"""By shell: what `raylaunch completion` and `--print-completion` print."""

HINT = "write bash, zsh, fish or tcsh"
