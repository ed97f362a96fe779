"""Every adapter has its port's methods, with the same parameters: what the driver calls is what is there."""

from __future__ import annotations

import inspect

import pytest

from p2pdiloco_node import ports
from p2pdiloco_node.storage.address_book import DiskAddressBook
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.journal import DiskJournal
from p2pdiloco_node.storage.state_keeper import DiskStateKeeper
from p2pdiloco_node.transport.client import Client


@pytest.mark.parametrize(
    ("port", "adapter"),
    [
        (ports.AddressBook, DiskAddressBook),
        (ports.BlobStore, DiskBlobStore),
        (ports.Journal, DiskJournal),
        (ports.StateKeeper, DiskStateKeeper),
        (ports.Transport, Client),
    ],
)
def test_adapter(port: type, adapter: type) -> None:
    methods = {
        name: value for name, value in vars(port).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert methods
    for name, method in methods.items():
        real = getattr(adapter, name)
        assert inspect.signature(real) == inspect.signature(method), f"{adapter.__name__}.{name}"
        assert inspect.iscoroutinefunction(real) == inspect.iscoroutinefunction(method)
