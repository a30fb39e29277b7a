for _launcher_name in launcher python python3; do
    [[ $(complete -p "$_launcher_name" 2>/dev/null) == *_launcher_completion* ]] &&
        complete -r "$_launcher_name"
done
unset -f _launcher_completion
unset _launcher_name
