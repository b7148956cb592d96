"""Door: the names that programs import from ``webdataset.gopen``, whose own name is that of its function.

``wds.gopen`` is the function, and importing this module must not change that. The import system puts into the package
what it finds in ``sys.modules`` when the module has run: the function itself, with the module's names on it.
"""

import sys

from wds_async.reading.url_files import (
    Pipe,
    gopen,
    gopen_ais,
    gopen_curl,
    gopen_error,
    gopen_file,
    gopen_gsutil,
    gopen_hf,
    gopen_htgs,
    gopen_pipe,
    gopen_schemes,
    reader,
    rewrite_url,
    set_options,
)

__all__ = [
    "Pipe", "gopen", "gopen_ais", "gopen_curl", "gopen_error", "gopen_file", "gopen_gsutil", "gopen_hf",
    "gopen_htgs", "gopen_pipe", "gopen_schemes", "reader", "rewrite_url", "set_options",
]  # fmt: skip

vars(gopen).update({name: value for name, value in globals().items() if name in __all__})
vars(gopen).update(__all__=__all__, __file__=__file__, __spec__=__spec__)  # which importlib asks a module for
sys.modules[__name__] = gopen  # type: ignore[assignment]
