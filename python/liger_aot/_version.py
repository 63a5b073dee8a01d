"""The version, as pyproject.toml states it: a pack must be of the same."""

__version__ = "0.1.0"
