"""Make the files that are made: ``python deploy/render.py``; with ``--check`` only say which are behind.

A PrometheusRule is a rule file in a frame, the Helm chart needs the same rules in its own folder, and cloud-init's
configuration carries the systemd unit and what belongs to it. All are made here, so that each thing is written once.
The token that clients show to the service is drawn where there is none yet; the files that hold it are not in git.
"""

import secrets
import sys
from pathlib import Path
from textwrap import indent

import click

DEPLOY = Path(__file__).parent
MADE = "# Made by `python deploy/render.py` from {sources}; change those.\n"
PATHS = {
    "wds-async.service": ("/etc/systemd/system/wds-async.service", "0644"),
    "sysusers.conf": ("/etc/sysusers.d/wds-async.conf", "0644"),
    "tmpfiles.conf": ("/etc/tmpfiles.d/wds-async.conf", "0644"),
    "local-disks.sh": ("/usr/local/sbin/local-disks", "0755"),
}
"""Files of vm/ that are the same on every cloud: where they go, and their mode."""
OWN = {
    "wds-async.env": ("/etc/wds-async/env", "0640"),
    "serve.yaml": ("/etc/wds-async/serve.yaml", "0644"),
    "requirements.txt": ("/etc/wds-async/requirements.txt", "0644"),
}
"""Files of vm/CLOUD/."""


TOKENS = DEPLOY / "base" / "tokens"
"""What the service knows: a token a line, then perhaps a tenant."""
CLIENTS = ("training/indexed", "training/trainjob", "offline", "distributed/work")
"""Folders whose pods show the first of them."""


def hand_out_token() -> list[Path]:
    """Draw a token where there is none, give it to the folders of clients, and return the files that were written."""
    written = []
    if not TOKENS.exists():
        TOKENS.touch(mode=0o600)
        TOKENS.write_text(f"{secrets.token_urlsafe(32)}\n", encoding="utf-8")
        written.append(TOKENS)
    (token, *_), *_ = (line.split() for line in TOKENS.read_text(encoding="utf-8").splitlines() if line[:1] not in "#")
    for path in (DEPLOY / client / "token" for client in CLIENTS):
        if not path.exists() or path.read_text(encoding="utf-8") != token:
            path.touch(mode=0o600)
            path.write_text(token, encoding="utf-8")
            written.append(path)
    return written


def prometheus_rule() -> str:
    """The rules as prometheus-operator takes them."""
    head = (
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: wds-async\n"
        "  labels:\n    app.kubernetes.io/name: wds-async\nspec:\n"
    )
    return MADE.format(sources="rules.yaml") + head + indent(_groups(), "  ")


def chart_rules() -> str:
    """The same rules for the Helm chart, which reads no file outside its own folder."""
    return MADE.format(sources="monitoring/rules.yaml") + _groups()


def _groups() -> str:
    rules = (DEPLOY / "monitoring" / "rules.yaml").read_text(encoding="utf-8")
    return rules[rules.index("groups:") :]


def cloud_init(cloud: str) -> str:
    """The user data of a machine of ``cloud``: frame.yaml of its folder, with every file behind ``write_files:``."""
    vm = DEPLOY / "vm"
    frame = (vm / cloud / "frame.yaml").read_text(encoding="utf-8")
    entries = [_entry(vm / name, *where) for name, where in PATHS.items()]
    entries += [_entry(vm / cloud / name, *where) for name, where in OWN.items()]
    made = MADE.format(sources=f"vm/ and vm/{cloud}/")
    return frame.replace("#cloud-config\n", f"#cloud-config\n{made}", 1).replace(
        "write_files: []\n", "write_files:\n" + "".join(entries), 1
    )


def _entry(path: Path, target: str, mode: str) -> str:
    content = indent(path.read_text(encoding="utf-8"), "      ")
    return f'  - path: {target}\n    permissions: "{mode}"\n    content: |\n{content}'


def rendered() -> dict[Path, str]:
    """Every file that is made, with its text."""
    return {
        DEPLOY / "monitoring" / "prometheusrule.yaml": prometheus_rule(),
        DEPLOY / "helm" / "wds-async" / "files" / "rules.yaml": chart_rules(),
        DEPLOY / "vm" / "cloud-init-gcp.yaml": cloud_init("gcp"),
        DEPLOY / "vm" / "cloud-init-aws.yaml": cloud_init("aws"),
    }


def main() -> int:
    """The command line; 1 where ``--check`` finds a file that is behind."""
    texts = rendered()
    behind = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in behind:
        if "--check" not in sys.argv:
            path.write_text(texts[path], encoding="utf-8")
        click.echo(path)
    if "--check" not in sys.argv:
        for path in hand_out_token():
            click.echo(path)
    return int(bool(behind) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
