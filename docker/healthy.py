"""Whether the service of this container is alive: ``python healthy.py [URL]``, ends with 0 or 1.

The standard library alone, because it runs every 15 seconds. Set ``HEALTH_URL`` for another port, or for TLS
(``https://127.0.0.1:51080/healthz``). Certificates are not verified, since only this container answers on its loopback.
"""

import os
import ssl
import sys
import urllib.request

URL = "http://127.0.0.1:51080/healthz"
TIMEOUT_S = 4.0


def alive(url: str) -> bool:
    """Whether ``url`` answers 200 within `TIMEOUT_S`; what it says otherwise goes to standard error."""
    context = ssl._create_unverified_context() if url.startswith("https://") else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # a proxy of the environment is for the stores
        *([urllib.request.HTTPSHandler(context=context)] if context else []),
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError as exn:
        sys.stderr.write(f"{url}: {exn}\n")
        return False


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("HEALTH_URL", URL)
    sys.exit(0 if alive(asked) else 1)
