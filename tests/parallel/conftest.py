"""One pool of processes for all tests of this folder, because to start one takes seconds."""

import pytest
from tests.parallel.workers import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()
