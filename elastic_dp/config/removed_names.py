"""Names that earlier versions had, and what to write instead."""

_WIRE = 'use wire="bf16" or wire="int8", whose runs are exact'
REMOVED_NAMES = {
    "comm_hook": f"comm_hook= does not exist any more: {_WIRE}",
    "PowerSGDConfig": f"PowerSGDConfig does not exist any more, nor does comm_hook=: {_WIRE}",
}
