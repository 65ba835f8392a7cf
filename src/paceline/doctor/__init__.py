"""What is wrong with a target and a drafter, found before anything is loaded."""

from paceline.doctor.examination import examine as examine
from paceline.doctor.findings import Finding as Finding
from paceline.doctor.kinds import Severity as Severity
