"""The lab: what trains, keeps, resumes, tabulates and shows experiments. It knows none of them.

`experiment.py` says what an experiment is, `training.py` and `stacked.py` train models, `runner.py` runs the rows of an
experiment in processes and `store.py` keeps their files; `tables.py`, `plots.py`, `pages.py` and `report/` show what came out.
The claims themselves stand in `shippo_ssm.experiments`.
"""
