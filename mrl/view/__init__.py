"""Writes a run folder as one HTML file that needs no server and no network (`mrl view RUN`).

series.py    metrics.jsonl as thinned curves
timeline.py  timeline.jsonl and the staleness of all groups, for the lanes of trainer and engines
samples.py   token records (tokens/step_*.safetensors) as bounded plain data, for the sample browser
collect.py   everything the page shows, as plain data
render.py    that data inside the page: page/page.html.j2, page/*.css, page/*.js
"""
