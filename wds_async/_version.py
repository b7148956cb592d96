"""The version of this package, and of the WebDataset whose names, arguments and streams it has."""

__all__ = ["__version__", "__webdataset_version__"]

__version__ = "0.2.0"
__webdataset_version__ = "1.0.2"
