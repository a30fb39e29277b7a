"""A worker that stands in one of its calls."""

import time

from launcher.cluster.process_group import Peer


class Held(Peer):
    def __init__(self, method):
        super().__init__()
        setattr(self, method, lambda *arguments: time.sleep(600))
