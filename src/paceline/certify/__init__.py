"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""

from paceline.certify.certificate import Certificate, LawResult, Problem
from paceline.certify.run import Certifier, Effort, certify

__all__ = ["Certificate", "Certifier", "Effort", "LawResult", "Problem", "certify"]
