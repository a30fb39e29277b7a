"""Plans that follow another plan: evaluation, further losses, the update alone."""
