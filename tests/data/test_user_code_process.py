"""The process that runs user code which draws from global generators."""

import socket

import cloudpickle

from elastic_dp.data.pipeline.user_code_process import UserCodeProcess


def test_it_may_take_longer_than_the_default_timeout_that_user_code_has_set():
    process = UserCodeProcess("a process")
    socket.setdefaulttimeout(0.01)
    try:
        process.start(cloudpickle.dumps(lambda x: x + 1))
        assert process.run(1) == 2
    finally:
        socket.setdefaulttimeout(None)
        process.close()
