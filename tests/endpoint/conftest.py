from tests.loop.conftest import toy as toy
