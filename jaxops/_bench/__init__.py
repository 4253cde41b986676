"""Benchmarks: cases, measuring and reporting, behind `python -m jaxops bench`.

`spec` is what a file of `benchmarks/` declares, `registry` finds those files. `contenders` makes
what is timed, `clock` times it, `ceilings` finds this machine's limits and `runner` ties them
together. `results` is the JSON file, `figures` derives numbers from it, `report`, `plots` and
`overview` show them: whatever is shown comes from a results file, whether it was measured now or
kept. `own` makes a case of a problem that the user names. `training_steps` times the `models` as
wholes, and `training_report` shows them.
"""
