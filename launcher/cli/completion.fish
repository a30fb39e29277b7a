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
