"""The version, in one place that setup.py and the user agent can read."""

__version__ = "0.1.0"
