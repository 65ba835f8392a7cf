"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""

from paceline.certify.certificate import Bought, Certificate, LawResult
from paceline.certify.evidence import Evidence
from paceline.certify.findings import Problem
from paceline.certify.run import Certifier, certify
from paceline.certify.schedule import Effort

__all__ = [
    "Bought",
    "Certificate",
    "Certifier",
    "Effort",
    "Evidence",
    "LawResult",
    "Problem",
    "certify",
]
