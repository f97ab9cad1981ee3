"""`megarl doctor`: whether a machine has what a run needs, and why a run failed.

A look at a machine (`command.py`) is a list of findings by section; one at a run's folder (`run_folder.py`) is one
sentence with its evidence and what to do next.  Starts no run and changes nothing: the speed of a disk is measured with
a file that is deleted again.  Called by the command line alone.
"""
