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
