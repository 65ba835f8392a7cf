"""``paceline check-drafter``: the laws on a drafter of one's own."""

from __future__ import annotations

import traceback
from dataclasses import MISSING

from paceline.cli.options import expand
from paceline.cli.output import JsonOptions
from paceline.core.stages import stage
from paceline.lab.report.document import Column, record_of, table_of
from paceline.model.names import EMBEDDED
from paceline.settings import setting

_LAWS = (
    Column("drafter", "drafter"),
    Column("law", "law", "name"),
    Column("broken", "holds", "broken", lambda broken: broken or "yes"),
)


@expand
def check_drafter(
    output: JsonOptions,
    drafter: str = setting(MISSING, "A record, a class or a function.", flags=("MODULE:NAME",)),
    model: str = setting(EMBEDDED, "The target; a record's examples may need weights made for it."),
) -> bool:
    """Run the laws on a drafter of your own, and say which it breaks.

    Trees are well-formed, text and distribution are plain decoding's, and nothing is kept of what
    has ended. Of errors raised at one place the first traceback is shown.
    """
    from paceline.lab.laws import Law, drafters_of, laws

    rows: list[Law] = []
    for name, make in drafters_of(drafter, model).items():
        with stage(f"checking {name}"):
            rows += laws(name, make, model)
    broken = [law for law in rows if law.broken]
    errors = [law.error for law in reversed(broken) if law.error is not None]
    raised = {str(traceback.extract_tb(error.__traceback__)[-1]): error for error in errors}
    for error in () if output.as_json else raised.values():
        traceback.print_exception(error)
    record = {"holds": not broken, "laws": [record_of(row, _LAWS) for row in rows]}
    output.show(record, table_of(rows, _LAWS))
    return bool(broken)
