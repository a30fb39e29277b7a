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
