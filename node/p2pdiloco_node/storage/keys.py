"""The node's identity on disk: the 32 raw bytes of an Ed25519 private key in hex, mode 0600."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from p2pdiloco.errors import OperatorError
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.storage.files import Files, guarded, make_folder, read_at_most, replace_file

HEX_CHARS = 64


def load_or_make_key(path: Path, files: Files | None = None) -> Ed25519Signer:
    """The key in `path`, made at the first start.

    Raises: OperatorError if others can read it, it is damaged, or cannot be written.
    """
    if os.path.lexists(path):
        return load_key(path)
    return make_key(path, files)


def check_key(path: Path) -> None:
    """Before work whose end needs the key: it can be read, or be made. Raises: OperatorError."""
    if os.path.lexists(path):
        load_key(path)
        return
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OperatorError(f"The key {path} cannot be made: {above} is no folder that can be written to.")


def make_key(path: Path, files: Files | None = None) -> Ed25519Signer:
    """A new identity in `path`, which must not exist. Raises: OperatorError."""
    files = files or Files()
    if os.path.lexists(path):
        raise OperatorError(f"{path} exists: a key is never overwritten; move it away first.")
    make_folder(files, path.parent)
    key = secrets.token_bytes(32)
    replace_file(files, path, key.hex().encode() + b"\n")
    return Ed25519Signer(key)


def load_key(path: Path) -> Ed25519Signer:
    """Raises: OperatorError if it is missing, others can read it, or it is damaged."""
    if not os.path.lexists(path):
        raise OperatorError(
            f"There is no key file {path}: check the path, or put the key back from a backup."
        )
    status = guarded(path.stat, path)
    if not stat.S_ISREG(status.st_mode):
        raise OperatorError(f"{path} is not a file: move it away, and a new key is made at the next start.")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise OperatorError(
            f"Others on this machine can read the key file {path} (mode {mode:04o}): run chmod 600 {path}; "
            "if somebody may have copied it, delete it instead and get a new identity."
        )
    text = read_at_most(path, HEX_CHARS + 3).strip()
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(text) != HEX_CHARS or len(key) != 32:
        raise OperatorError(
            f"The key file {path} is damaged ({HEX_CHARS} hex digits expected): put it back from a backup, "
            "or delete it to get a new identity."
        )
    return Ed25519Signer(key)
