"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""

from paceline.tools.certify.certificate import Certificate, CertifySpending, DistributionResult
from paceline.tools.certify.evidence import Evidence, Problem
from paceline.tools.certify.run import Certifier, certify
from paceline.tools.certify.schedule import Effort

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
