"""A campaign of faults: disturb a job of real ranks at random moments, and count what held.

`make_faults.py` is the program. `job.py` has what the ranks do, `rank.py` the process of a rank, `team.py` those of a
job, `injections.py` what is done to them, `judge.py` what has to hold then, and `campaign.py` the trials and the table.
"""
