"""What a driver's end says of the signal that ended it."""

import os
import signal

import pytest

from elastic_dp.cluster.console import sigterm_interrupts
from elastic_dp.errors import Interrupted


def test_sigterm_inside_a_call_of_ray_exits_as_sigterm_and_not_as_ctrl_c():
    """Ray's compiled calls let the handler run and raise a KeyboardInterrupt of their own."""

    def call_of_ray():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1.0)  # a place where the handler runs
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, sigterm_interrupts():
        call_of_ray()
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_stays_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught, sigterm_interrupts():
        raise KeyboardInterrupt
    assert not isinstance(caught.value, Interrupted)
