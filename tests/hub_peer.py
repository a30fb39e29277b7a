"""A process that downloads a model, and says the hash of its weights."""

import hashlib
import sys

from launcher.base.hub_files import HubError, fetch, is_model

try:
    folder = fetch(sys.argv[1], is_model)
    print(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
except HubError as error:
    sys.exit(f"refused: {error.problem}. {error.remedy}")
