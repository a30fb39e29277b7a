"""What the user asked for: settings, composed of YAML and the command line, and checked."""
