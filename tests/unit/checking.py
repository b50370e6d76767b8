"""What the tests of the checks share: an answer passes, or is refused with the right words."""

import pytest

from tpcode.grading import Wrong, check


def passes(capsys, id: str, *answers, **named) -> None:
    check(id, *answers, **named)
    assert capsys.readouterr().out.startswith(f"{id} right")


def refused(said: str, *answers, **named) -> str:
    """What the check says of these answers, of which `said` is a part."""
    with pytest.raises(Wrong) as error:
        check(*answers, **named)
    text = str(error.value)
    assert said in text, text
    assert "tpcode/" not in text, "of a traceback, only the learner's lines"
    return text
