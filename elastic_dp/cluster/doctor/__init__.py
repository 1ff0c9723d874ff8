"""`elastic-dp doctor`: `node_facts` reads what one machine is like, `node_checks` judges it,
`store_check` tries a store, and `cluster_probe` asks all nodes of a Ray cluster.
"""
