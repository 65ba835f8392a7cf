"""What a trial's figures mean: worth it or not, and why."""

from __future__ import annotations

from paceline.tools.doctor.findings import Finding, finding
from paceline.tools.doctor.trial import SpeedupTrial

VERDICTS = ("worth-it", "barely-worth-it", "not-worth-it")
_WORTH, _HARMLESS = 1.1, 0.97  # speedups from which a draft helps, and does no harm
_UNSURE = 1.25  # between prediction and measurement, either way
_LOW = 0.4  # acceptance
_DEAR = 1 / 3  # of a target forward, for one pass of the drafter
_ROWS, _STEEP = 5, 1.5  # so many rows should cost less than so many times one


def judge(trial: SpeedupTrial) -> list[Finding]:
    """The verdict first, then what stands in the way."""
    found = trial.explored
    best, predicted = found.best, found.speedup(found.best)
    text = (
        f"measured {trial.measured:.2f}x of plain decoding at draft length {best}, predicted "
        f"{predicted:.2f}x; {found.acceptance:.0%} accepted"
    )
    code = "not-worth-it"
    if trial.measured >= _HARMLESS:
        code = "worth-it" if trial.measured >= _WORTH else "barely-worth-it"
    findings = [finding(code, "pair", text)]
    if not 1 / _UNSURE <= trial.predicted_by_measured <= _UNSURE:
        text = f"predicted {predicted:.2f}x, measured {trial.measured:.2f}x"
        findings.append(finding("measurement-unsure", "machine", text))
    ratio = found.cost_ratio
    if ratio is not None and found.acceptance < _LOW:
        text = f"of the drafted tokens that were tried {found.acceptance:.0%} were accepted"
        findings.append(finding("acceptance-low", "pair", text))
    if ratio is not None and ratio > _DEAR:
        text = f"a pass of the drafter takes {ratio:.2f} of a target forward"
        findings.append(finding("draft-dear", "pair", text))
    growth = found.target(_ROWS) / found.target(1)
    if growth > _STEEP:
        text = f"a target forward over {_ROWS} rows takes {growth:.2f} times one over one row"
        findings.append(finding("verify-dear", "machine", text))
    return findings
