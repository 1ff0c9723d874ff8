"""How the runs of one cluster share it: what each publishes, what there is room for, and the limit
of one run.
"""
