#!/bin/sh
# Resolve what the images install, with versions and hashes: docker/lock.sh, then look at the difference.
#
# One file holds for every Python from 3.11 on and for every platform (--universal), so the same lock is used by the
# image (3.13, amd64 and arm64) and by docker/check.sh with whatever Python is here.
set -eu
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "docker/lock.sh needs uv: python -m pip install uv" >&2; exit 1; }

lock() { # the file that is written, then its sources and extras
    target=$1
    shift
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command docker/lock.sh --output-file "$target" "$@"
}
lock docker/requirements-build.txt docker/requirements-build.in
lock docker/requirements-service.txt pyproject.toml \
    --extra service --extra s3 --extra gcs --extra azure --extra hf --extra ais
lock docker/requirements-train.txt docker/requirements-train.in --constraint docker/requirements-service.txt
lock docker/requirements-ray.txt docker/requirements-ray.in \
    --constraint docker/requirements-service.txt --constraint docker/requirements-train.txt
