"""The synonyms of the search: the author's, and the words that the glossary does not accept."""

import json

import pytest

from pagebuild.site.edition import BrokenInputError

pytestmark = pytest.mark.slow

OOM = {"say": ["oom", "爆显存"], "means": {"en": "memory", "zh-Hans": "显存"}, "page": "talk"}
GLOSSARY = {"Gradient": {"zh": ["梯度", "斜率"], "not": ["坡度"]}, "chunk": {"zh": ["块"], "not": []}}


def synonyms(make) -> dict:
    return json.loads(make()["data/search.json"])


def test_each_language_has_its_meaning_of_what_both_say(docs, make) -> None:
    docs.write("docs/search.json", [OOM])
    expected = {"say": OOM["say"], "page": "talk"}
    assert synonyms(make) == {
        "en": [expected | {"means": "memory"}],
        "zh-Hans": [expected | {"means": "显存"}],
    }


def test_the_words_of_the_glossary_lead_to_the_accepted_one_of_the_language(docs, make) -> None:
    docs.write("docs/glossary.json", GLOSSARY)
    assert synonyms(make) == {
        "en": [{"say": ["坡度", "斜率", "梯度"], "means": "Gradient"}, {"say": [], "means": "chunk"}],
        "zh-Hans": [{"say": ["gradient", "坡度", "斜率"], "means": "梯度"}, {"say": ["chunk"], "means": "块"}],
    }


def test_without_synonyms_the_site_has_none(make) -> None:
    assert synonyms(make) == {"en": [], "zh-Hans": []}


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (OOM | {"page": "gone"}, 'search.json:3: "oom" leads to gone, which does not exist'),
        (OOM | {"means": {"en": "memory"}}, 'search.json:3: "oom" has no meaning in zh-Hans'),
    ],
)
def test_an_entry_that_leads_nowhere_is_found(docs, make, entry, fault) -> None:
    docs.write("docs/search.json", "[\n\n" + json.dumps(entry, ensure_ascii=False) + "\n]")
    with pytest.raises(BrokenInputError) as caught:
        make()
    assert fault in str(caught.value)
