"""Environment variables that are on or off."""

import pytest

from jaxcomm._runtime import setting

NAME = "JAXCOMM_TEST_SETTING"


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "TRUE", " On "])
def test_on(monkeypatch, value):
    monkeypatch.setenv(NAME, value)
    assert setting(NAME) is True


@pytest.mark.parametrize("value", [None, "", "0", "false", "off", "no", "No"])
def test_off(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, value)
    assert setting(NAME) is False


@pytest.mark.parametrize("value", ["2", "maybe", "-1", "0 1"])
def test_neither(monkeypatch, value):
    """Not taken for off: whoever sets it wants something."""
    monkeypatch.setenv(NAME, value)
    with pytest.raises(ValueError, match=f"{NAME} must be 0 or 1, got {value!r}"):
        setting(NAME)
