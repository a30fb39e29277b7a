"""Settings: composed of YAML files and the command line, and checked."""
