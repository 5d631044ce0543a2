"""The report of a run as one HTML file, and the same facts as JSON: `raylaunch report`, and `report.html` at the end.

Read `run_report` first: it reads the journal of a run folder, and writes the file. `report_facts` collects what the
report says, for JSON too; `outcome_text` has its first lines, what happened and what to do. `plots` computes where the
marks of the plots are, and `page` fills the template `report.html.j2`, which draws them as SVG.
"""
