"""Arrays that are not JAX's own: stacked layers, arrays fetched on demand, `.npz` files."""
