"""The version, apart from everything that imports torch: the build reads it too."""

__version__ = "0.1.0"
