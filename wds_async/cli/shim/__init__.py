"""A folder for ``sys.path``: it holds the module that stands in for webdataset under ``wds-async run``."""
