"""Tab completion for bash, zsh and fish, of `launcher` and of `python -m launcher`.

Hydra's own scripts know no `python -m`, and in zsh they call what only bash has; who is asked for
the words is the same: `-sc query`, which takes the line from the variable `COMP_LINE`.
"""

from __future__ import annotations

_BASH = r"""
_launcher_completion() {
    local line=${COMP_LINE:0:COMP_POINT} before choice word
    local -a words choices program=(launcher)
    read -ra words <<< "$line"  # splits, and expands no * to the names of files
    [[ $line == *[[:space:]] ]] && words+=("")
    if [[ ${words[0]##*/} == python* ]]; then
        [[ ${words[1]-} == -m && ${words[2]-} == launcher ]] || return
        program=("${words[0]}" -m launcher)
        words=("${words[@]:2}")
    fi
    ((${#words[@]} > 1)) || return
    word=${words[-1]}
    read -rd '' -a choices < <(COMP_LINE="launcher ${words[*]:1}" COMP_POINT= \
        "${program[@]}" -sc query=bash 2>/dev/null)
    COMPREPLY=()
    for choice in "${choices[@]}"; do
        [[ $choice == "$word"* ]] && COMPREPLY+=("$choice")
    done
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then  # the shell replaces what follows it
        before=${word%"${word##*=}"}
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
}
complete -o nospace -o default -F _launcher_completion launcher
for _launcher_name in python python3; do  # unless somebody completes these already
    complete -p "$_launcher_name" &>/dev/null ||
        complete -o nospace -o default -F _launcher_completion "$_launcher_name"
done
unset _launcher_name
"""

_BASH_UNDONE = r"""
for _launcher_name in launcher python python3; do
    [[ $(complete -p "$_launcher_name" 2>/dev/null) == *_launcher_completion* ]] &&
        complete -r "$_launcher_name"
done
unset -f _launcher_completion
unset _launcher_name
"""

_ZSH = r"""
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -D }
_launcher_completion() {
    local -a program typed choices
    program=(launcher) typed=("${(@)words[2,CURRENT-1]}")
    if [[ ${words[1]:t} == python* ]]; then
        if [[ ${words[2]} != -m || ${words[3]} != launcher || $CURRENT -lt 4 ]]; then
            (( $+functions[_python] )) || autoload -Uz _python
            _python
            return
        fi
        program=($words[1] -m launcher) typed=("${(@)words[4,CURRENT-1]}")
    fi
    choices=(${=$(COMP_LINE="launcher ${(j: :)typed} $PREFIX" COMP_POINT= \
        $program -sc query=zsh 2>/dev/null)})
    (( $#choices )) && compadd -Q -S '' -- $choices || _files
}
compdef _launcher_completion launcher python python3
"""

_ZSH_UNDONE = r"""
compdef -d launcher python python3
unfunction _launcher_completion
(( $+functions[_python] )) && compdef _python python python3
"""

_FISH = r"""
function _launcher_completion
    set -l typed (commandline -opc)
    set -l program launcher
    if string match -q 'python*' (basename $typed[1])
        set program $typed[1] -m launcher
        set -e typed[1..3]
    else
        set -e typed[1]
    end
    set -lx COMP_LINE (string join ' ' launcher $typed (commandline -ct | string collect -a))
    set -lx COMP_POINT
    $program -sc query=fish 2>/dev/null | string split -n ' '
end
complete -c launcher -f -a '(_launcher_completion)'
for name in python python3
    complete -c $name -n 'string match -q -- "*-m launcher *" (commandline -cp)' \
        -f -a '(_launcher_completion)'
end
"""

_FISH_UNDONE = r"""
complete -e -c launcher
functions -e _launcher_completion
"""

SCRIPTS = {
    "bash": (_BASH, _BASH_UNDONE),
    "zsh": (_ZSH, _ZSH_UNDONE),
    "fish": (_FISH, _FISH_UNDONE),
}


def completion_script(shell: str, install: bool) -> str:
    """Return what a shell is to evaluate to complete the command's words, or no longer to."""
    return SCRIPTS[shell][0 if install else 1].lstrip("\n")
