"""The renderer of the measuring commands: a table is said once, as columns.

A command names its columns; screen, JSON, Markdown and HTML follow from them::

    from paceline.lab.report.document import Column, record_of, share, table_of, times
    from paceline.lab.report.document import Report
    from paceline.lab.report.render import print_report, write

    SPEEDS = (
        Column("method", "method"),               # key in JSON, heading; path is the key
        Column("speedup", "speedup", "rate.by_plain", times),  # path and format
        Column("accepted", "", "drafts.accepted"),  # no heading: in JSON only
        Column("", "share", "", lambda row: share(row.share)),  # no key: in tables only
    )
    report = Report("Benchmark")
    report.add("Speeds", table_of(rows, SPEEDS, note="Medians of three rounds."))
    print_report(report, Console())
    write(report, "speeds.html")  # or .md
    record = [record_of(row, SPEEDS) for row in rows]  # JSON
"""
