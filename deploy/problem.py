"""The error of this package."""

__all__ = ["DeployError"]


class DeployError(Exception):
    """Something that an operator can put right; the message is one line that says how."""
