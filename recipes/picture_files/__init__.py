"""Pictures on disk: where each lies, and what becomes of it on its way into a batch.

`scan` finds pictures in folders, tar files and `.npz` files, `index` keeps what was found, and
`decode` reads one. Nothing here imports JAX.
"""
