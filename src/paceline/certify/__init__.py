"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""

from paceline.certify.certificate import Certificate, CertifySpending, DistributionResult
from paceline.certify.evidence import Evidence
from paceline.certify.findings import Problem
from paceline.certify.run import Certifier, certify
from paceline.certify.schedule import Effort

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
