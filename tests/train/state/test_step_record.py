"""Checkpoints that were made before a module moved are read after it."""

from elastic_dp.checkpoint.decoding import decode
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.train.state.step_record import StepRecord

# As a checkpoint has had it from the first version on.
STORED = {
    "$": "dataclass",
    "v": {
        "number": 5,
        "epoch": 0,
        "epoch_end": True,
        "loss": 0.5,
        "weight": 8.0,
        "metrics": {"accuracy": 0.25},
        "lr": 0.1,
        "grad_norm": None,
        "kept": True,
        "late": False,
    },
    "type": "elastic_dp.train.state:StepRecord",
}


def test_a_stored_record_of_before_the_module_moved_is_read_and_written_as_it_was():
    record = StepRecord(5, 0, True, 0.5, 8.0, {"accuracy": 0.25}, 0.1, None, True)
    assert decode(STORED, []) == record
    assert encode(record) == (STORED, [])
