"""Places on the Hugging Face hub, and what its answers mean. The hub says why in ``X-Error-Code`` and
``X-Error-Message``, and hides private repositories behind 401 and 404."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, replace

from wds_async.storage.base import Answer, Fault, Verdict
from wds_async.storage.http.auth import ANONYMOUS, Identity
from wds_async.storage.http.errors import explain_status

__all__ = ["HubPlace", "explain_hub_answer"]

# RateLimit: "api";r=0;t=55  (seconds until the window is over)
_RESET = re.compile(r";\s*t\s*=\s*(\d{1,6})")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A file or folder ``path`` of ``repo`` ("owner/name") at ``revision``; ``folder`` is the kind of repository
    (``datasets``, ``models``, ``spaces``, ``kernels``), or ``buckets``, which have no revisions."""

    folder: str
    repo: str
    revision: str
    path: str

    @property
    def page(self) -> str:
        """Its page, below the endpoint."""
        return self.repo if self.folder == "models" else f"{self.folder}/{self.repo}"

    @property
    def name(self) -> str:
        """For people."""
        return f"the {self.folder[:-1]} {self.repo}"

    def resolve_url(self, endpoint: str) -> str:
        """Where the file is asked for."""
        revision = f"{urllib.parse.quote(self.revision, safe='')}/" if self.revision else ""
        return f"{endpoint}/{self.page}/resolve/{revision}{urllib.parse.quote(self.path)}"

    def tree_url(self, endpoint: str) -> str:
        """Where the folder is listed."""
        folder = self.path.strip("/")
        names = [urllib.parse.quote(name, safe="") for name in (self.revision, folder) if name]
        return "/".join([f"{endpoint}/api/{self.folder}/{self.repo}/tree", *names]) + "?recursive=false&expand=false"


def explain_hub_answer(
    answer: Answer, place: HubPlace, endpoint: str, identity: Identity, *, renewed: bool = False
) -> Fault:
    """An answer of the hub (or its CDN) for ``place``, asked for as ``identity``; ``renewed``: a refused token is being
    looked up again."""
    fault = explain_status(answer)
    said = identity.hidden(" ".join(answer.fields.get("x-error-message", "").split())[:200])
    said = f" ({said})" if said and said.isprintable() else ""
    status, code = answer.status, answer.fields.get("x-error-code", "")
    whom = f"asked with {identity.name}"
    if code == "RevisionNotFound":
        return Fault(
            Verdict.MISSING,
            f"on the hub {place.name} has no revision {place.revision!r}{said}; {whom}",
            "Check what follows the @.",
        )
    if code == "EntryNotFound":
        where = f" at revision {place.revision!r}" if place.revision else ""
        return Fault(
            Verdict.MISSING,
            f"on the hub {place.name} has no file {place.path!r}{where}{said}; {whom}",
            "Check the path.",
        )
    if code == "GatedRepo":
        advice = f"Accept its terms at {endpoint}/{place.page}"
        advice += ", then set HF_TOKEN." if identity is ANONYMOUS else ", with the account that the token belongs to."
        return Fault(Verdict.DENIED, f"on the hub {place.name} is gated{said}; {whom}", advice)
    if status == 401:
        return _unauthorised(place, identity, said, whom, renewed)
    if code == "RepoNotFound":
        advice = f"Check the name, and that {identity.name} may read it."
        return Fault(Verdict.MISSING, f"the hub shows no {place.folder[:-1]} {place.repo}{said}; {whom}", advice)
    if status == 403:
        advice = f"Check that {identity.name} may read {place.name}."
        return Fault(Verdict.DENIED, identity.hidden(fault.reason) + f"{said}; {whom}", advice)
    if status == 429:
        reset = _RESET.search(answer.fields.get("ratelimit", ""))
        wait_s = fault.retry_after_s if fault.retry_after_s is not None else float(reset[1]) if reset else None
        advice = "The hub limits the rate of requests" + (
            "; set HF_TOKEN for a higher limit." if not identity.headers else "."
        )
        return replace(fault, advice=advice, retry_after_s=wait_s)
    return replace(fault, reason=identity.hidden(fault.reason) + said)


def _unauthorised(place: HubPlace, identity: Identity, said: str, whom: str, renewed: bool) -> Fault:
    if identity is ANONYMOUS and not renewed:
        return Fault(
            Verdict.DENIED,
            f"the hub shows no {place.folder[:-1]} {place.repo} (401){said}; {whom}",
            "Check the name; where it is private or gated, set HF_TOKEN (or `hf auth login`).",
        )
    verdict = Verdict.EXPIRED if renewed else Verdict.DENIED
    return Fault(
        verdict, f"the hub refused the token (401){said}; {whom}", f"Renew {identity.name}, or check the name."
    )
