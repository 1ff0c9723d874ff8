"""The report of a run: a function of the run's folder, as a value and as a page.

`ReportBuilder` takes the lines of a journal and returns a `Report`; `report_page` writes it as one
HTML file.
"""
