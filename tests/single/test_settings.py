"""Environment variables that are on or off, or numbers. That each is read at import: tests/jobs/test_faults.py."""

import pytest

from jaxcomm._runtime import number, setting

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


@pytest.mark.parametrize("value", ["2", "maybe", "-1", "0 1", "1.0", "true!", "0x1"])
def test_neither(monkeypatch, value):
    """Not taken for off: whoever sets it wants something."""
    monkeypatch.setenv(NAME, value)
    with pytest.raises(ValueError, match=f"{NAME} must be 0 or 1, got {value!r}"):
        setting(NAME)


@pytest.mark.parametrize(("value", "found"), [(None, 7), ("", 7), (" ", 7), ("0", 0), (" 12 ", 12), ("0012", 12)])
def test_number(monkeypatch, value, found):
    if value is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, value)
    assert number(NAME, 7) == found


@pytest.mark.parametrize(
    "value", ["-1", "+1", "1.5", "1e3", "64k", "0x10", "1 2", "inf", "nan", "1_000", "9" * 19, "9" * 5000]
)
def test_no_number(monkeypatch, value):
    monkeypatch.setenv(NAME, value)
    with pytest.raises(ValueError, match=f"{NAME} must be a number, not negative and below 10.18, got"):
        number(NAME, 7)
