#!/bin/sh
# What the service's image holds, tried without Docker: docker/check.sh        (as root; two minutes, PyPI)
#
# The steps of the Dockerfile in a fresh environment: the wheel of this checkout, the locked packages by their hashes, no
# torch. Then as a container runs it: its own mounts with a read-only root, user 10001 without any capability, HOME and
# /tmp a tmpfs, a cache of its own. It must answer its health check, serve a file twice (the second time from the cache),
# show its metrics, refuse what is not allowed, and end by SIGTERM. Python is whichever is here (PYTHON=...).
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
step() { printf '== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "unshare and setpriv want root"

work=$(mktemp -d /var/tmp/wds-image.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
image=$work/opt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

step "packages, by their hashes"
"$PYTHON" -m venv "$work/build"
"$work/build/bin/pip" install -q --require-hashes --only-binary=:all: -r docker/requirements-build.txt
"$PYTHON" -m venv "$image"
"$image/bin/pip" install -q --require-hashes --only-binary=:all: -r docker/requirements-service.txt

step "the wheel of this checkout"
# A copy of what .dockerignore lets through, so that nothing else can be needed.
mkdir "$work/src"
cp -r LICENSE README.md pyproject.toml wds_async "$work/src"
"$work/build/bin/pip" wheel -q --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$work/src"
"$image/bin/pip" install -q --no-deps --no-index "$work"/wheels/*.whl
"$image/bin/pip" check
"$image/bin/pip" uninstall -q --yes pip
cp docker/healthy.py "$image/bin/healthy.py"
if "$image/bin/python" -c 'import torch' 2>/dev/null; then fail "torch is in the image"; fi
du -sh "$image" | cut -f1

step "as a container runs it"
mkdir "$work/cache" "$work/data" "$work/run"
head -c 9000000 /dev/urandom >"$work/data/shard.tar"
chmod 644 "$work/data/shard.tar"
cat >"$work/inside.sh" <<'INSIDE'
set -eu
work=$1
python=$2
mount --make-rprivate /
case $python in
/root/*) # a Python of root's own: let the user reach it, and nothing beside it
    mkdir "$work/python"
    mount --bind "$python" "$work/python"
    mount -t tmpfs -o mode=0755 tmpfs /root
    mkdir -p "$python"
    mount --bind "$work/python" "$python"
    ;;
esac
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o uid=10001,gid=10001,mode=0750 tmpfs "$work/cache"
mount -t tmpfs -o uid=10001,gid=10001,mode=0755 tmpfs "$work/run"
mount --bind / /
mount -o remount,ro,bind /
cd /tmp
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
    env -i PATH="$work/opt/bin:/usr/bin:/bin" HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    WDS_SERVE_CONFIG="$work/serve.yaml" sh "$work/asked.sh" "$work"
INSIDE
sed -e "s#^folder: /cache#folder: $work/cache#" -e 's#^host: .*#host: 127.0.0.1#' -e 's#^port: .*#port: 0#' \
    docker/serve.yaml >"$work/serve.yaml"
printf 'socket: %s\nallow: [%s]\nbuckets: {demo: %s}\n' "$work/run/serve.sock" "$work/data/" "$work/data/" \
    >>"$work/serve.yaml"
cat >"$work/asked.sh" <<'ASKED'
set -eu
work=$1
if touch /var/tmp/written 2>/dev/null; then echo "the root is not read-only" >&2; exit 1; fi
wds-async serve 2>/tmp/log & served=$!
trap 'cat /tmp/log >&2' EXIT
python -I - "$work" "$served" <<'PYTHON'
import filecmp, http.client, os, pathlib, socket, subprocess, sys, time

work, served = pathlib.Path(sys.argv[1]), int(sys.argv[2])
path = str(work / "run" / "serve.sock")


class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)


def ask(target):
    connection = Unix("localhost", timeout=20)
    connection.request("GET", target)
    answer = connection.getresponse()
    return answer.status, answer.read()


def metric(name):
    lines = [line for line in ask("/metrics")[1].decode().splitlines() if line.startswith(name)]
    assert lines, f"{name} is not on /metrics"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


deadline = time.monotonic() + 60
while True:
    try:
        if ask("/readyz")[0] == 200:
            break
    except OSError:
        pass
    assert time.monotonic() < deadline, "never ready"
    os.kill(served, 0)
    time.sleep(0.1)
print("ready as", os.getuid(), "with", next(l for l in open(f"/proc/{served}/status") if l.startswith("CapEff")).split()[1])
data = (work / "data" / "shard.tar").read_bytes()
for _ in range(2):
    status, body = ask("/v1/objects/demo/shard.tar?provider=ais")
    assert (status, body) == (200, data), status
assert metric("wds_cache_hit_bytes_total") >= len(data), "nothing came from the cache"
print("served", len(data), "bytes twice, the second time from the cache")
status, body = ask("/v1/objects/other/shard.tar?provider=aws")
assert status in (400, 401, 403, 404), status
print("refused", status, body[:90].decode(errors="replace"))
tcp = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
for port in sorted({int(one.rpartition(":")[2], 16) for one in tcp}):
    done = subprocess.run([sys.executable, "-I", str(work / "opt/bin/healthy.py"), f"http://127.0.0.1:{port}/healthz"],
                          capture_output=True)
    if done.returncode == 0:
        break
else:
    raise SystemExit("the health check fails at every port")
assert subprocess.run([sys.executable, "-I", str(work / "opt/bin/healthy.py"), "http://127.0.0.1:9/healthz"],
                      capture_output=True).returncode == 1
print("healthy; a closed port is not")
rss = next(l for l in open(f"/proc/{served}/status") if l.startswith("VmRSS")).split()
print("resident:", int(rss[1]) // 1024, "MiB")
PYTHON
kill -TERM $served
if ! wait $served; then echo "it did not end well" >&2; exit 1; fi
trap - EXIT
echo "ended by SIGTERM; its log:"
sed 's/^/    /' /tmp/log
ASKED
chmod 755 "$work/inside.sh" "$work/asked.sh"
unshare --mount --pid --fork --mount-proc sh "$work/inside.sh" "$work" \
    "$("$image/bin/python" -c 'import sys; print(sys.base_prefix)')"
step "all well"
