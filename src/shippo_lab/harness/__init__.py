"""Trains, stores, resumes and shows experiments, which are defined in `shippo_lab.experiments`.

`experiment.py` defines what an experiment is, `training.py` and `stacked.py` train models, `runner.py` runs the rows of
an experiment in processes, `store.py` reads and writes files; `tables.py`, `plots.py` and `report/` show results.
"""
