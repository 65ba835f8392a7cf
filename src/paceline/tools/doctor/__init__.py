"""What is wrong with a target and a drafter, found before they are loaded."""

from paceline.tools.doctor.examination import examine as examine
from paceline.tools.doctor.findings import Finding as Finding
from paceline.tools.doctor.findings import Severity as Severity
from paceline.tools.doctor.logits import check_logits as check_logits
