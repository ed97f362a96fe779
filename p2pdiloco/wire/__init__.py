"""Bytes to messages and back. Everything from outside is untrusted until opened here."""
