"""``python -m ourddp doctor``: looks for what would stop or slow down a job, on one machine or on all of an allocation.

Each rank gathers facts about its machine (:mod:`ourddp.doctor.facts`), ranks meet through a c10d store and try each
other's memory and ports (:mod:`ourddp.doctor.meeting`), and rank 0 judges all of it (:mod:`ourddp.doctor.checks`). No
process group is made, so that a machine on which none can be made is examined as well.
"""
