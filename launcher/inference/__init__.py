"""A finished model on the devices of its plan: reading, generation, evaluation, export."""
