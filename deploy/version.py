"""Flower's version, here and at the server."""

from importlib.metadata import version

__all__ = ["VERSION_HEADER", "flower_version"]

VERSION_HEADER = "x-flwr-version"
"""Header of the server's answer to the question after its health."""


def flower_version() -> str:
    """Return the version of Flower that is installed here."""
    return version("flwr")
