"""Writes an HTML file that shows a run or a service. A browser can show the file without a server
and without a network.

series.py    metrics.jsonl as thinned curves
facts.py     config.yaml or service.yaml as the facts at the top
timeline.py  timeline.jsonl and the staleness of all groups, for the lanes of trainer and engines
texts.py     a sample in one line
samples.py   token records as plain data of limited size, for the sample browser
collect.py   everything that the page of a run shows, as plain data
service.py   everything that the page of a service shows, as plain data
live/        the page that follows a run, and its server
render.py    the page as HTML, from this data and from page/*.html.j2, page/*.css, page/*.js
"""
