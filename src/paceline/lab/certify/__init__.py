"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""

from paceline.lab.certify.certificate import Certificate, CertifySpending, DistributionResult
from paceline.lab.certify.evidence import Evidence, Problem
from paceline.lab.certify.run import Certifier, certify
from paceline.lab.certify.schedule import Effort

__all__ = [
    "Certificate",
    "Certifier",
    "CertifySpending",
    "DistributionResult",
    "Effort",
    "Evidence",
    "Problem",
    "certify",
]
