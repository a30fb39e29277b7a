complete -e -c launcher
functions -e _launcher_completion
