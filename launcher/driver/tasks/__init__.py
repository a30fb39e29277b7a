"""Tasks that neither train nor plan, and what several of them share.

`calibrate`, `evaluate`, `export`, `generate` and `prepare_data` are values of `task`.
`stored_model` finds a checkpoint, `model_workers` uses its model on the devices of its plan, and
`export_tokenizer` writes the tokenizer beside it. They import `planning` and `folder`; `record`
(for samples) and what lies beside these folders may import them.
"""
