"""``python -m wds_async`` is the ``wds-async`` command."""

from wds_async.cli import main

if __name__ == "__main__":
    main()
