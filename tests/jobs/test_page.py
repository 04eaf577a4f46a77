"""The page on reliability shows what the runs kept beside it say."""

import page


def test_the_page_shows_the_runs_that_are_kept():
    text = page.PAGE.read_text()
    assert page.kept()
    assert page.fill(text, page.kept()) == text


def test_every_section_of_the_page_has_its_figures():
    assert {found[1] for found in page.SECTION.findall(page.PAGE.read_text())} == set(page.SECTIONS)
