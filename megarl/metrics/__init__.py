"""Metrics of a run: statistics of a batch, stage times, trackers, advice, and the reports at the end.

`reading/` has the files of a run's folder, `computing/` what they hold. `trackers/` are where metrics go, `advice/`
reads them for the user, `report/` makes a page of them. A room imports only from those before it; `report/` and
`reading/` need no torch.
Does not use losses, processes or the configuration.  Called by the driver in each step, and by train, sft and evaluate
at their end.
"""
