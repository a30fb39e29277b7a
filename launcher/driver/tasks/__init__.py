"""Tasks that neither train nor plan, and the registry of all tasks.

`task` has the base classes and the registry. The tasks import `planning` and `folder`; `record`
(for samples) and the modules beside these folders may import them.
"""
