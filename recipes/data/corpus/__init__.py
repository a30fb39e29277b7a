"""Tokens on disk: what `task=prepare_data` writes, and rows of them for training.

A corpus is a sequence of token files, `TokenFile`s, which `files` finds; `rows` makes batches of
it. `documents` reads what people have (text, JSON lines, Parquet, Arrow), `tokenizers` turns it
into tokens, and `prepare` does that in parallel. Nothing here imports JAX.
"""
