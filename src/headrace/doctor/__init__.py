"""Why an endpoint is slow, and what to change: readings, probes, rules and their reports.

`scrape` and `engine_config` read, `probe` asks, `rules/` decides without any I/O, `report` shows.
Knows every engine by its metrics and endpoints only; imports no engine, not even ours.
"""
