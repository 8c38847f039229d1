import pytest, signal, threading
from tests.doubles.fixtures import *
from tests.doubles.fake import PATIENCE, until
@pytest.mark.parametrize("n", range(150))
def test_old(broker, connect, n):
    m = connect(broker)
    with m.subscribe("a") as stream:
        main = threading.get_ident()
        def interrupt():
            until(lambda: stream._pull is not None and stream._pull._asking is not None)
            signal.pthread_kill(main, signal.SIGINT)
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            stream.receive(PATIENCE)
        interrupter.join(PATIENCE)
        broker.deliver(b"1")
        assert stream.receive(PATIENCE).payload == b"1"
from tests.receiving.test_stream import test_an_interrupt_while_waiting_loses_nothing as body
@pytest.mark.parametrize("n", range(150))
def test_new(broker, connect, n): body(broker, connect)
