"""A transport from outside is one class and a name in the registry."""

import logging

import jax
import pytest

from launcher.base.names import TRANSPORTS
from launcher.runtime import PermuteTransport, PullTransport, Transport, make_transport


class MailTransport(Transport):
    """Needs no keys; others reach it at a postal address."""

    def __init__(self, host="127.0.0.1"):
        super().__init__(host)
        self.address = f"post:{host}"

    def bind(self, parcels):
        def shipped(key, parts):
            return {n: jax.device_put(parts[n], x.dst) for n, x in enumerate(parcels)}

        return shipped


def test_a_name_in_the_registry_is_all_that_a_new_one_needs(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "launcher")
    monkeypatch.setitem(TRANSPORTS, "mail", f"{__name__}:MailTransport")
    made = make_transport("mail", "10.0.0.1")
    assert (type(made), made.address) == (MailTransport, "post:10.0.0.1")
    assert caplog.messages == ["arrays go between processes by cluster.transport=mail"]
    made.connect([made.address])
    made.open([], "order")  # this process is the only one, and passes its barrier
    assert made.reserve(3) == 0


@pytest.mark.parametrize("name", ["auto", "pull", "collective"])
def test_ours_are_made_by_their_names(name):
    made = make_transport(name, "127.0.0.1")
    assert type(made) is (PermuteTransport if name == "collective" else PullTransport)
    assert (made.address is None) == (name == "collective")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no transport pul for cpu; there are pull, collective"):
        make_transport("pul", "127.0.0.1")
