"""Doctor: the checklist of what makes a draft's acceptance low, gone through on what a run has left so far.

`checklist.py` lists the checks in order; a check is a small function from `Facts` to a `Finding`, in the file of its
section. `command.py` is `draftmill doctor`, and what runs by itself before training, bench and report.
"""
