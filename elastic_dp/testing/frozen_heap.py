"""Imported last by the server from which workers are forked: what is there by then is never
garbage. So no collection in a worker visits it, which would copy its pages, one by one."""

import gc

gc.collect()
gc.freeze()
