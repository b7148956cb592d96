#!/bin/sh
# Put the digest that the registry gives today behind each image's version: docker/pin.sh     (needs docker with buildx)
#
# A version's tag is rebuilt now and then (for a fix in Debian, say); the digest is what makes a build the same build.
set -eu
cd "$(dirname "$0")"
files="Dockerfile Dockerfile.train Dockerfile.ray compose.yaml"
# shellcheck disable=SC2086 # words
grep -ohE '(PYTHON=|image: )[a-z0-9./-]+:[A-Za-z0-9._-]+' $files | sed -E 's/^(PYTHON=|image: )//' | sort -u |
    grep -v ':demo$' | while read -r image; do
        digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
        # shellcheck disable=SC2086
        sed -i -E "s|${image}(@sha256:[0-9a-f]+)?|${image}@${digest}|" $files
        echo "$image@$digest"
    done
