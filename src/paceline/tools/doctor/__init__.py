"""What is wrong with a target and a drafter, found before anything is loaded."""

from paceline.tools.doctor.examination import examine as examine
from paceline.tools.doctor.findings import Finding as Finding
from paceline.tools.doctor.findings import Severity as Severity
