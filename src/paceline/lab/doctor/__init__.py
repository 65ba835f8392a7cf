"""What is wrong with a target and a drafter, found before they are loaded."""

from paceline.lab.doctor.examination import examine as examine
from paceline.lab.doctor.findings import Finding as Finding
from paceline.lab.doctor.findings import Severity as Severity
from paceline.lab.doctor.layers import check_layers as check_layers
from paceline.lab.doctor.logits import check_logits as check_logits
