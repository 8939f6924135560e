"""One set of problems and one model for all system tests, made once."""

import pytest

from tests.harness.toy import Toy, make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))
