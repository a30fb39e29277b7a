compdef -d launcher python python3
unfunction _launcher_completion
(( $+functions[_python] )) && compdef _python python python3
