"""A campaign of faults: disturb a job of real ranks at random moments, and count what held. Long runs: see what grows.

`make_faults.py` starts the campaign, whose arguments and output are in `program.py`. `job.py` has what the ranks do,
`rank.py` the process of a rank, `team.py` those of a job, `injections.py` what is done to them, `judge.py` what has to
hold then, `campaign.py` the trials, `table.py` the table, and `mismatches.py` ranks whose calls differ. `growth.py` is
the program for long runs: ranks do what is in `loads.py`, and `samples.py` counts what they have.
"""
